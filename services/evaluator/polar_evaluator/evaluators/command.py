"""A shell command in a clean copy: exit code 0 passes; a reward file, where named, sets the reward."""

from __future__ import annotations

import json
import math

from polar_common.built_in import check_command
from polar_common.errors import EvaluationError
from polar_common.task_spec import EvaluatorSpec
from polar_runtime import Runtime

from .base import Case, Evaluator, Verdict
from .running import Ran, run

__all__ = ["CommandEvaluator", "parse_reward"]

# The kernel's limit for one environment string is 128 KiB; all of the answer is in the file.
_MAX_ENV = 100_000
_MAX_REWARD = 1 << 20


class CommandEvaluator(Evaluator):
    """The command finds the agent's answer in `$POLAR_ANSWER` (its first 100,000 bytes, NUL removed) and all of it in
    the file `$POLAR_ANSWER_FILE`. The reward file is relative to the working directory: a JSON number, or
    `{"reward": x, "trace_rewards": {completion: x}}`. One that the agent made is removed before the command runs."""

    name = "command"

    def check(self, spec: EvaluatorSpec) -> None:
        super().check(spec)
        check_command(spec)

    async def evaluate(self, case: Case) -> Verdict:
        spec = case.spec
        async with case.clean() as runtime:
            answer = f"{runtime.home}/.polar/answer.txt"
            await runtime.upload({answer: case.answer})
            if spec.reward_file:
                await runtime.exec(["rm", "-rf", "--", f"{runtime.workdir}/{spec.reward_file}"], timeout=30)
            ran = await run(
                runtime,
                ["/bin/sh", "-c", spec.command],
                timeout=spec.timeout_s,
                log_bytes=case.log_bytes,
                env={"POLAR_ANSWER": _env_text(case.answer), "POLAR_ANSWER_FILE": answer},
            )
            passed = ran.exit_code == 0 and not ran.trouble
            reward, traces = await self._reward(runtime, spec, passed)
        return Verdict(
            passed=passed,
            reward=reward,
            exit_code=ran.exit_code,
            detail=ran.trouble or ("" if passed else _last_line(ran)),
            log=ran.log,
            trace_rewards=traces,
        )

    async def _reward(
        self, runtime: Runtime, spec: EvaluatorSpec, passed: bool
    ) -> tuple[float | None, dict[str, float]]:
        if not spec.reward_file:
            return None, {}
        found = await runtime.download([spec.reward_file], max_bytes=_MAX_REWARD)
        if spec.reward_file not in found:
            if passed:
                raise EvaluationError(f"the command passed without writing {spec.reward_file}")
            return None, {}
        return parse_reward(found[spec.reward_file])


def _env_text(answer: bytes) -> str:
    """What one environment string can carry: a byte that isn't UTF-8 takes three as the sign that replaces it."""
    text = answer[:_MAX_ENV].decode(errors="replace").replace("\0", "")
    return text.encode()[:_MAX_ENV].decode(errors="ignore")


def parse_reward(body: bytes) -> tuple[float, dict[str, float]]:
    """Reward and rewards by completion. Raises EvaluationError for anything but finite numbers."""
    try:
        value = json.loads(body)
        if isinstance(value, dict):
            traces = {str(k): _finite(v) for k, v in value.get("trace_rewards", {}).items()}
            return _finite(value["reward"]), traces
        return _finite(value), {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(f"the reward file holds no reward: {error!r}") from error


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _last_line(ran: Ran) -> str:
    lines = [line.strip() for line in ran.tail.splitlines() if line.strip()]
    return f"ended with {ran.exit_code}" + (f": {lines[-1][:500]}" if lines else "")
