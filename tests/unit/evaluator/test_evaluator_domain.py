"""The evaluator's decisions: outcomes, rewards, what is evaluated, candidates, arguments."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from polar_common.errors import ConfigError, EvaluationError
from polar_common.events import (
    Event,
    SessionArtifacts,
    SessionCompleted,
    SessionExited,
    SessionQueued,
)
from polar_common.session_state import SessionState
from polar_common.task_spec import EvaluatorSpec, HarnessSpec, RuntimeChoice, TaskSpec
from polar_evaluator.clean import runtime_spec
from polar_evaluator.domain import outcome_of, reward_of, wanted
from polar_evaluator.evaluators.base import Evaluator, Verdict
from polar_evaluator.evaluators.command import CommandEvaluator, parse_reward
from polar_evaluator.evaluators.humaneval import candidate_code
from polar_evaluator.evaluators.registry import find, names
from polar_evaluator.settings import EvaluatorSettings

SID = "s1-abc-0"
AT = datetime(2026, 1, 1, tzinfo=UTC)


def exited(attempt: int = 1, **fields: Any) -> SessionExited:
    return SessionExited(session=SID, attempt=attempt, exit_code=0, **fields)


@pytest.mark.parametrize(
    ("fields", "passed", "acted", "outcome"),
    [
        ({}, True, True, "passed"),
        ({}, True, False, "passed"),
        ({}, False, True, "failed"),
        ({}, False, False, "no_action"),
        ({"timed_out": True, "fault": "agent", "cause": "timeout"}, True, True, "passed"),
        ({"timed_out": True, "fault": "agent", "cause": "timeout"}, False, False, "budget_exhausted"),
        ({"fault": "agent", "cause": "limit"}, False, True, "budget_exhausted"),
        ({"fault": "agent", "cause": "resource_exhausted"}, False, False, "failed"),
        ({"fault": "agent", "cause": "environment_broken"}, False, True, "failed"),
    ],
)
def test_outcomes(fields: dict[str, Any], passed: bool, acted: bool, outcome: str) -> None:
    assert outcome_of(exited(**fields), Verdict(passed), acted=acted) == outcome


def test_rewards() -> None:
    assert (reward_of(Verdict(True)), reward_of(Verdict(False))) == (1.0, 0.0)
    assert (reward_of(Verdict(True, reward=0.0)), reward_of(Verdict(False, reward=0.5))) == (0.0, 0.5)


def state(*events: Event) -> SessionState:
    made = SessionState(SID)
    for number, event in enumerate(events, 1):
        made.apply(event, number, AT)
    return made


def queued(attempt: int) -> SessionQueued:
    spec = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"))
    return SessionQueued(session=SID, attempt=attempt, work_class="local", spec=spec)


ARTIFACTS = SessionArtifacts(session=SID, attempt=1)
DONE = SessionCompleted(session=SID, attempt=0, last_attempt=1, outcome="failed", reward=0, evaluation="live")


@pytest.mark.parametrize(
    ("events", "yes"),
    [
        ((queued(1), exited(), ARTIFACTS), True),
        ((queued(1), exited(fault="agent", cause="timeout"), ARTIFACTS), True),
        ((queued(1), exited(fault="harness"), ARTIFACTS), False),
        ((queued(1), exited(fault="infra"), ARTIFACTS), False),
        ((queued(1), exited(cancelled=True), ARTIFACTS), False),
        ((queued(1), exited(), ARTIFACTS, queued(2)), False),
        ((queued(1), exited(), ARTIFACTS, DONE), False),
        ((queued(1), ARTIFACTS), False),
    ],
)
def test_what_is_evaluated(events: tuple[Event, ...], yes: bool) -> None:
    assert wanted(state(*events), 1) is yes


@pytest.mark.parametrize(
    ("body", "reward", "traces"),
    [
        (b"1", 1.0, {}),
        (b" 0.25\n", 0.25, {}),
        (b'{"reward": -1.5}', -1.5, {}),
        (b'{"reward": 1, "trace_rewards": {"c1": 0.5}}', 1.0, {"c1": 0.5}),
    ],
)
def test_reward_files(body: bytes, reward: float, traces: dict[str, float]) -> None:
    assert parse_reward(body) == (reward, traces)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"one",
        b"true",
        b"NaN",
        b"Infinity",
        b"[1]",
        b"{}",
        b'{"reward": "1"}',
        b'{"reward": 1, "trace_rewards": [1]}',
        b"\xff\xfe",
        b'{"reward": 1, "trace_rewards": {"c": null}}',
    ],
)
def test_a_reward_file_without_a_reward_is_the_evaluators_fault(body: bytes) -> None:
    with pytest.raises(EvaluationError):
        parse_reward(body)


PROMPT = "import math\n\ndef f(x):\n    '''Doc.'''\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("    return 1\n", PROMPT + "    return 1\n"),
        ("def f(x):\n    return 2\n", "import math\n\n\ndef f(x):\n    return 2\n"),
        ("So:\n```python\ndef f(x):\n    return 3\n```\n", "import math\n\n\ndef f(x):\n    return 3\n"),
        ("```\n    return 4\n```", PROMPT + "    return 4\n"),
        (
            "```py\ndef g():\n    pass\n```\nand\n```py\ndef f(x):\n    return 5\n```\n",
            "import math\n\n\ndef f(x):\n    return 5\n",
        ),
        ("", PROMPT),
    ],
)
def test_candidates(text: str, code: str) -> None:
    assert candidate_code(text, PROMPT, "f") == code


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ({"kind": "command"}, "evaluator.command"),
        ({"kind": "command", "command": "true", "reward_file": "../x"}, "evaluator.reward_file"),
        ({"kind": "command", "command": "true", "args": {"x": 1}}, "evaluator.args"),
        ({"kind": "answer"}, "evaluator.args.expected"),
        ({"kind": "answer", "args": {"expected": []}}, "evaluator.args.expected"),
        ({"kind": "answer", "args": {"expected": "x", "mode": "near"}}, "evaluator.args.mode"),
        ({"kind": "answer", "args": {"expected": "x", "ignore_case": "yes"}}, "evaluator.args.ignore_case"),
        ({"kind": "humaneval", "args": {"test": "x"}}, "evaluator.args.entry_point"),
        ({"kind": "humaneval", "args": {"test": "x", "entry_point": "a b"}}, "evaluator.args.entry_point"),
        ({"kind": "nobody"}, "evaluator.kind"),
        ({"kind": "json:nothing"}, "evaluator.kind"),
        ({"kind": "json:JSONDecoder"}, "evaluator.kind"),
    ],
)
def test_a_wrong_spec_names_its_field(spec: dict[str, Any], where: str) -> None:
    made = EvaluatorSpec(**spec)
    with pytest.raises(ConfigError) as caught:
        find(made.kind).check(made)
    assert caught.value.where == where


def test_evaluators_by_name_and_by_class() -> None:
    assert {"answer", "command", "humaneval"} <= set(names())
    assert isinstance(find("command"), CommandEvaluator)
    own = find("polar_evaluator.evaluators.answer:AnswerEvaluator")
    assert isinstance(own, Evaluator) and own.name == "answer"


@pytest.mark.parametrize(("network", "told"), [(False, "none"), (True, "host")])
def test_a_clean_copy_reaches_nothing_unless_the_task_has_the_network(tmp_path: Path, network: bool, told: str) -> None:
    runtime = RuntimeChoice(network=network, memory_mb=64, pids=9, disk_mb=5)
    task = TaskSpec(id="t", instruction="do", harness=HarnessSpec(name="command"), runtime=runtime)
    spec = runtime_spec(EvaluatorSettings(data=tmp_path), task, "s.1")
    assert (spec.network, spec.proxy_socket, spec.proxy_url) == (told, None, "")
    assert (spec.limits.memory_mb, spec.limits.pids, spec.limits.disk_mb) == (64, 9, 5)
