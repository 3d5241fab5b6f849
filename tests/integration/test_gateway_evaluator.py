"""Gateway and evaluator together: an agent's work is judged by files that it never saw."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.integration import gateway_kit as kit

from polar_common import subjects
from polar_common.bus import Bus, Worker
from polar_common.events import EvaluationEvaluated
from polar_common.task_spec import TaskSpec
from polar_common.topology import Topology, consumers
from polar_evaluator.handlers import Evaluations
from polar_evaluator.settings import EvaluatorSettings

pytestmark = pytest.mark.nats
TEST = "import mod\nassert mod.double(4) == 8\n"


def task(name: str, agent: str) -> TaskSpec:
    return kit.script(
        agent,
        name=name,
        files={"mod.py": "def double(x):\n    return x\n"},
        evaluator={"command": "python3 test_mod.py", "files": {"test_mod.py": TEST}},
    )


async def outcomes(bus: Bus, tmp_path: Path, tasks: list[TaskSpec]) -> dict[str, EvaluationEvaluated]:
    evaluations = Evaluations(bus, EvaluatorSettings(data=tmp_path))
    spec = next(c for c in consumers(Topology()) if c.durable == "evaluator")
    stop = asyncio.Event()
    working = asyncio.ensure_future(Worker(bus, spec, evaluations.on_artifacts, 2).run(stop))
    found: dict[str, EvaluationEvaluated] = {}
    async with kit.gateway(bus, kit.settings(tmp_path)):
        sessions = {t.id: await kit.release(bus, t) for t in tasks}
        async with asyncio.timeout(60):
            while len(found) < len(sessions):
                for name, session in sessions.items():
                    stored = await bus.last(subjects.evaluation(session, 1, "live", "evaluated"))
                    if stored is not None and isinstance(stored.event, EvaluationEvaluated):
                        found[name] = stored.event
                await asyncio.sleep(0.05)
    stop.set()
    await working
    return found


async def test_work_is_judged_by_tests_the_agent_never_saw(bus: Bus, tmp_path: Path) -> None:
    found = await outcomes(
        bus,
        tmp_path,
        [
            task("mends", "sed -i 's/return x/return 2 * x/' mod.py"),
            task("peeks", "if cat test_mod.py; then sed -i 's/return x/return 2 * x/' mod.py; fi"),
            task("forges", "echo 'raise SystemExit(0)' > test_mod.py"),
            task("idles", "true"),
            task("commits", "git init -q . && echo '*' > .gitignore && sed -i 's/return x/return 2 * x/' mod.py "
                 "&& git add -f . && git -c user.name=a -c user.email=a@b commit -qm x"),
        ],
    )  # fmt: skip
    assert {name: event.outcome for name, event in found.items()} == {
        "mends": "passed",
        "peeks": "no_action",
        "forges": "failed",
        "idles": "no_action",
        "commits": "passed",
    }
