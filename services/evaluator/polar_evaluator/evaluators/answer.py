"""The agent's answer against an expected one; no runtime is needed."""

from __future__ import annotations

import asyncio
import json
import sys

from polar_common.built_in import AnswerArgs, read_args
from polar_common.errors import ConfigError, EvaluationError
from polar_common.task_spec import EvaluatorSpec

from .base import ARGS, Case, Evaluator, Verdict

__all__ = ["AnswerEvaluator"]

_REGEX_S = 10.0
# A pattern may take for ever on an answer that was made for it, so it runs where it can be killed.
_MATCH = """
import json, re, sys
want = json.load(sys.stdin)
flags = re.DOTALL | (re.IGNORECASE if want["ignore_case"] else 0)
sys.exit(0 if re.search(want["pattern"], want["text"], flags) else 1)
"""


class AnswerEvaluator(Evaluator):
    """Arguments: `expected` (a text, or a list of which one suffices), `mode` (`exact`, by default; `contains`;
    `regex`, which may match anywhere), `ignore_case`. White space at both ends doesn't count."""

    name = "answer"
    known_args = frozenset(AnswerArgs.model_fields)

    def check(self, spec: EvaluatorSpec) -> None:
        super().check(spec)
        read_args(AnswerArgs, spec.args, ARGS)

    async def evaluate(self, case: Case) -> Verdict:
        text = case.answer.decode(errors="replace").strip()
        args = read_args(AnswerArgs, case.spec.args, ARGS)
        for expected in args.expected:
            if await _matches(expected, text, args.mode, args.ignore_case):
                return Verdict(True)
        return Verdict(False, detail=f"the answer is {text[:200]!r}")


async def _matches(expected: str, text: str, mode: str, ignore_case: bool) -> bool:
    if mode == "regex":
        return await _regex(expected, text, ignore_case)
    wanted, given = expected.strip(), text
    if ignore_case:
        wanted, given = wanted.casefold(), given.casefold()
    return wanted in given if mode == "contains" else wanted == given


async def _regex(pattern: str, text: str, ignore_case: bool) -> bool:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        _MATCH,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    told = json.dumps({"pattern": pattern, "text": text, "ignore_case": ignore_case}).encode()
    try:
        async with asyncio.timeout(_REGEX_S):
            _, errors = await process.communicate(told)
    except TimeoutError as error:
        raise EvaluationError(f"{pattern!r} took more than {_REGEX_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if errors:
        raise ConfigError(errors.decode(errors="replace").strip()[-300:], f"{ARGS}.expected")
    return process.returncode == 0
