"""Adapters as users write them: short of something, or with a defect."""

from __future__ import annotations

from typing import Any

from polar_evaluator.evaluators.base import Case, Evaluator, Verdict
from polar_gateway.harnesses.base import Exit, Harness, Launch, LaunchContext, Recipe


class Short(Harness):
    """Declares no version: it installs nothing that has one."""

    name = "short"

    def launch(self, ctx: LaunchContext) -> Launch:
        return Launch(("/bin/sh", "-c", "echo word"))


class Nameless(Harness):
    def launch(self, ctx: LaunchContext) -> Launch:
        return Launch(("true",))


class Unversioned(Nameless):
    name = "unversioned"
    recipe = Recipe("npm", ("x@1",))


class Unmade(Nameless):
    name = "unmade"

    def __init__(self, told: str) -> None:
        self.told = told


class Nothing(Nameless):
    name = "nothing"

    def launch(self, ctx: LaunchContext) -> Launch:
        return None  # type: ignore[return-value]


class Ending(Nameless):
    """As a script ends itself."""

    name = "ending"

    def launch(self, ctx: LaunchContext) -> Launch:
        raise SystemExit("no licence")


class Numbers(Nameless):
    name = "numbers"

    def launch(self, ctx: LaunchContext) -> Launch:
        return Launch(("sleep", 1))  # type: ignore[arg-type]


class Mixed(Nameless):
    name = "mixed"

    def launch(self, ctx: LaunchContext) -> Launch:
        return Launch(("true",), {"DEPTH": 3})  # type: ignore[dict-item]


class Silent(Short):
    """Says nothing of how it ended."""

    name = "silent"

    def classify_exit(self, exit_code: int, output_tail: str) -> Exit:
        return None  # type: ignore[return-value]


class Leaving(Short):
    name = "leaving"

    def classify_exit(self, exit_code: int, output_tail: str) -> Exit:
        raise SystemExit(exit_code)


class Judge(Evaluator):
    """Returns what the task's arguments say."""

    name = "judge"
    known_args = frozenset({"returns", "check", "ends"})
    returned: tuple[Any, ...] = (
        None, {"passed": True}, Verdict(True, float("nan")), Verdict(True, "1"),  # type: ignore[arg-type]
        Verdict(True, trace_rewards={"c": float("inf")}), Verdict(True, details={"x": object()}),
        Verdict("yes"), Verdict(True, log="text"),  # type: ignore[arg-type]
    )  # fmt: skip

    def check(self, spec: Any) -> None:
        if spec.args.get("check"):
            raise KeyError("boom")
        if spec.args.get("ends"):
            raise SystemExit(1)

    async def evaluate(self, case: Case) -> Verdict:
        return self.returned[case.spec.args["returns"]]  # type: ignore[no-any-return]
