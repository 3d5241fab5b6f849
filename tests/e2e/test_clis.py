"""Real agent CLIs on a whole house: each finishes its job, every call is captured, and every context is exact.

Here those that CI runs; `test_clis_more.py` has the others. What is checked twice, by the log and by what the engine
itself wrote down, is said in `clis_kit.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from clis_kit import CLIS, VARIANTS, Job, Told, cli_house, jobs_of, read_journal, run_jobs, same_ids, tell, unseen
from house_kit import POLAR, Live

pytestmark = [pytest.mark.nats, pytest.mark.chdb, pytest.mark.harness, pytest.mark.timeout(900)]

JOBS = jobs_of("pi-chat", "pi-responses", "pi-anthropic", "pi-google", "claude", "codex")


class Outcome:
    """All jobs' ends; `strangers` are calls that the engine saw and no session has."""

    def __init__(self, live: Live, told: dict[Job, Told], strangers: set[str]) -> None:
        self.live = live
        self.told = told
        self.strangers = strangers


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    yield from run_all(tmp_path_factory, JOBS)


def run_all(tmp_path_factory: pytest.TempPathFactory, jobs: list[Job]) -> Iterator[Outcome]:
    """Install what is missing while the house starts, then run everything as one run."""
    names = sorted({CLIS[j.cli].name for j in jobs})
    installing = subprocess.Popen([*POLAR, "harness", "install", *names], stdout=sys.stderr)
    try:
        with cli_house() as (live, journal):
            assert installing.wait(800) == 0
            rows = run_jobs(live, tmp_path_factory.mktemp("clis"), "clis", jobs)
            told = asyncio.run(tell(live, jobs, rows, journal))
            known = {name for one in told.values() for name in one.journal}
            yield Outcome(live, told, read_journal(journal).keys() - known)
    finally:
        if installing.poll() is None:
            installing.kill()


def ids(job: Job) -> str:
    return job.id


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_the_job_is_done(ended: Outcome, job: Job) -> None:
    check_done(ended.told[job])


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_every_call_is_captured_as_the_engine_made_it(ended: Outcome, job: Job) -> None:
    check_captured(ended.told[job])


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_contexts_are_exact_and_faithful_and_go_on(ended: Outcome, job: Job) -> None:
    check_shares(ended.told[job])


@pytest.mark.parametrize("job", JOBS, ids=ids)
def test_one_trace_per_conversation(ended: Outcome, job: Job) -> None:
    check_traces(ended.told[job])


def test_no_call_is_outside_the_sessions(ended: Outcome) -> None:
    assert ended.strangers == set()


def test_samples_were_not_what_a_tokenizer_would_make_of_them(ended: Outcome) -> None:
    """Else `split` proves nothing."""
    for job, told in ended.told.items():
        if "split" in VARIANTS[job.variant].script:
            sampled = [e["sampled"] for e in told.journal.values()]
            again = [told.tokenizer.encode(told.tokenizer.decode(s, skip_special_tokens=False)).ids for s in sampled]
            assert sampled != again, job.id


def test_a_harness_can_be_tried_out_on_the_house_that_runs(ended: Outcome) -> None:
    rows = ended.live.polar("harness", "test", "pi")
    assert {r["api"]: r["spoken"] for r in rows} == {
        "openai-chat": "openai_chat", "openai-responses": "openai_responses", "anthropic": "anthropic",
        "google": "google",
    }  # fmt: skip
    assert all(r["ok"] and r["streamed"] and r["outcome"] == "passed" for r in rows)
    assert [(r["calls"], r["exit"], r["exact"], r["continued"], r["traces"]) for r in rows] == [(2, 0, 1.0, 1, 1)] * 4


# What is checked of each session; `test_clis_more.py` checks the same of other harnesses.


def check_done(told: Told) -> None:
    """The evaluator passed, in one attempt, and the program ended with 0."""
    words = [(a["fault"], a["cause"], a["detail"], a["log_tail"][-1500:]) for a in told.shown["attempts"]]
    assert told.row["outcomes"] == {"passed": 1}, words
    assert [a["exit_code"] for a in told.shown["attempts"]] == [0], words


def check_captured(told: Told) -> None:
    """The log and the engine's journal tell the same, fault by fault and id by id."""
    variant, cli = VARIANTS[told.job.variant], CLIS[told.job.cli]
    broken = {name for name, entry in told.journal.items() if "fault" in entry}
    assert {a.completion for a in told.aborted} == broken and len(broken) == variant.broken
    assert {a.reason for a in told.aborted} <= {"engine_error"} and told.rejected == []
    assert [c.completion for c in told.calls if c.completion in broken] == []
    assert {c.completion for c in told.calls} == told.journal.keys() - broken
    for call in told.calls:
        entry = told.journal[call.completion]
        assert same_ids(entry["prompt"], call.prompt) and same_ids(entry["sampled"], call.sampled)
        # Claude Code asks again without a stream where one broke.
        assert (call.event.stream or variant.broken) and not call.event.untrainable
    # Each is trained once, or left out for a reason.
    spans = Counter(s.completion for t in told.traces for s in t.trace.spans if s.trained)
    assert set(spans.values()) == {1}
    everything = {c.completion for c in told.calls} | broken
    assert spans.keys() | told.excluded.keys() == everything and not spans.keys() & told.excluded.keys()
    reasons = Counter(told.excluded.values())
    assert reasons.pop("aborted", 0) == variant.broken
    assert reasons.pop("side", 0) <= cli.sides and not reasons
    if told.job.variant != "subagents":
        assert len(spans) == 2


def check_shares(told: Told) -> None:
    """All of them 100 %; the prompts show all that the harness said, and nothing else but what is known."""
    shares = told.shares()
    assert {name: part for name, (part, whole) in shares.items() if part != whole} == {}
    assert shares["continued"][1] > 0
    for call in told.calls:
        assert unseen(call, told.texts[call.completion]) == []
        extends = told.turns(call.completion) > 0
        assert (call.event.chain_class == "continued") == extends
        assert call.event.parent_ambiguous is False
    additions = {a for c in told.calls for a in c.event.additions}
    assert additions == CLIS[told.job.cli].additions


def check_traces(told: Told) -> None:
    """As many as there were agents, each holding just the ids that the engine saw and sampled last."""
    agents = 3 if told.job.variant == "subagents" else 1
    assert len(told.traces) == agents
    first = told.traces[0]
    for found in told.traces:
        last = told.journal[found.trace.spans[-1].completion]
        assert same_ids([*last["prompt"], *last["sampled"]], [*found.prompt, *found.response])
        for span in found.trace.spans:
            at = slice(span.start, span.start + span.length)
            assert same_ids(told.journal[span.completion]["sampled"], found.response[at])
            assert span.context_exact and span.context_faithful and found.mask[at].all()
        assert int(found.mask.sum()) == sum(s.length for s in found.trace.spans)
    assert (first.trace.agent_role, first.trace.agent_depth) == ("main", 0)
    started = {s.completion for s in first.trace.spans}
    for child in told.traces[1:]:
        assert child.trace.agent_depth == 1 and child.trace.parent_call in started
    check_agents(told)


def check_agents(told: Told) -> None:
    """Each agent's calls carry its name; where the harness has none for it, that of the tool call that started it."""
    assert len({t.trace.agent for t in told.traces}) == len(told.traces)
    if told.job.variant != "subagents":
        return
    nameless = CLIS[told.job.cli].sub_agents == "nameless"
    for child in told.traces[1:]:
        calls = [c.event for c in told.calls if c.completion in {s.completion for s in child.trace.spans}]
        assert {c.agent for c in calls} == {child.trace.agent}
        assert calls[0].spawned_by == child.trace.parent_call and calls[0].chain_class == "subagent"
        assert child.trace.agent.startswith(f"call_{child.trace.parent_call}_") == nameless
        assert child.trace.agent_role == CLIS[told.job.cli].role
