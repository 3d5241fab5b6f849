"""Qwen Code, Gemini CLI and opencode on a whole house: the same jobs and checks as in `test_clis.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clis_kit import Job, jobs_of
from test_clis import Outcome, check_captured, check_done, check_shares, check_traces, ids, run_all

pytestmark = [
    pytest.mark.nats, pytest.mark.chdb, pytest.mark.harness, pytest.mark.slow, pytest.mark.timeout(1200)
]  # fmt: skip

JOBS = jobs_of("qwen", "gemini", "opencode")


@pytest.fixture(scope="module")
def ended_more(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    yield from run_all(tmp_path_factory, JOBS)


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_the_job_is_done(ended_more: Outcome, job: Job) -> None:
    check_done(ended_more.told[job])


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_every_call_is_captured_as_the_engine_made_it(ended_more: Outcome, job: Job) -> None:
    check_captured(ended_more.told[job])


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_contexts_are_exact_and_faithful_and_go_on(ended_more: Outcome, job: Job) -> None:
    check_shares(ended_more.told[job])


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_one_trace_per_conversation(ended_more: Outcome, job: Job) -> None:
    check_traces(ended_more.told[job])


def test_no_call_is_outside_the_sessions(ended_more: Outcome) -> None:
    assert ended_more.strangers == set()
