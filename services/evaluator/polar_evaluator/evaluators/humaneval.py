"""HumanEval problems: the agent's function against the problem's tests, in the sandbox and nowhere else."""

from __future__ import annotations

import ast
import re

from polar_common.built_in import HumanEvalArgs, read_args
from polar_common.ids import new_id
from polar_common.task_spec import EvaluatorSpec
from polar_runtime import Runtime

from .base import ARGS, Case, Evaluator, Verdict
from .running import run

__all__ = ["HumanEvalEvaluator", "candidate_code"]

_MAX_CODE = 1 << 20
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
# A candidate that ends the process itself, with whatever code, hasn't passed: only who got through the tests knows the
# word, which is read before the candidate's code is executed.
_RUNNER = """
import sys
PROGRAMS, ENTRY = %r, %r
def main():
    word = sys.stdin.readline()
    space = {"__name__": "candidate"}
    for name in PROGRAMS:
        with open(name) as file:
            exec(compile(file.read(), name, "exec"), space)
    space["check"](space[ENTRY])
    sys.stdout.flush()
    sys.__stdout__.write("\\n" + word)
main()
"""


class HumanEvalEvaluator(Evaluator):
    """Arguments: `prompt`, `test`, `entry_point` as in the data set; `file`, the candidate's path in the working
    directory, or none for the answer itself (its last fenced block that defines the function, else its first block,
    else all of it). A candidate without the function's definition continues the prompt."""

    name = "humaneval"
    known_args = frozenset(HumanEvalArgs.model_fields)

    def check(self, spec: EvaluatorSpec) -> None:
        super().check(spec)
        read_args(HumanEvalArgs, spec.args, ARGS)

    async def evaluate(self, case: Case) -> Verdict:
        args = read_args(HumanEvalArgs, case.spec.args, ARGS)
        async with case.clean() as runtime:
            answer = await _candidate(runtime, case, args.file)
            if answer is None:
                return Verdict(False, detail=f"no file {args.file}")
            return await self._tested(runtime, case, args, candidate_code(answer, args.prompt, args.entry_point))

    async def _tested(self, runtime: Runtime, case: Case, args: HumanEvalArgs, code: str) -> Verdict:
        place = f"{runtime.home}/.polar"
        programs = [f"{place}/candidate.py", f"{place}/tests.py"]
        runner = _RUNNER % (programs, args.entry_point)
        await runtime.upload(
            {
                programs[0]: code.encode(errors="replace"),
                programs[1]: args.test.encode(),
                f"{place}/run.py": runner.encode(),
            }
        )
        word = new_id()
        ran = await run(
            runtime,
            ["python3", "-I", f"{place}/run.py"],
            timeout=case.spec.timeout_s,
            log_bytes=case.log_bytes,
            stdin=word.encode() + b"\n",
        )
        passed = ran.exit_code == 0 and not ran.trouble and word in ran.tail
        lines = [line for line in ran.tail.splitlines() if line.strip()]
        detail = ran.trouble or (lines[-1][:300] if lines else "the candidate ended before its tests did")
        log = ran.log.replace(word.encode(), b"")
        return Verdict(passed, exit_code=ran.exit_code, detail="" if passed else detail, log=log)


async def _candidate(runtime: Runtime, case: Case, path: str) -> str | None:
    if not path:
        return case.answer[:_MAX_CODE].decode(errors="replace")
    found = await runtime.download([path], max_bytes=_MAX_CODE)
    return found[path].decode(errors="replace") if path in found else None


def candidate_code(text: str, prompt: str, entry_point: str) -> str:
    """The program in an answer or file, completed by the prompt where it only continues it."""
    blocks = [text] if _defines(text, entry_point) else [m.group(1) for m in _FENCE.finditer(text)]
    defining = [b for b in blocks if _defines(b, entry_point)]
    if defining:
        # Imports and helpers of the prompt belong to the problem; a later definition replaces the prompt's.
        return f"{_without_function(prompt, entry_point)}\n{defining[-1]}"
    return prompt + (blocks[0] if blocks else text)


def _defines(code: str, name: str) -> bool:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def _without_function(prompt: str, name: str) -> str:
    """The part of the prompt before the function."""
    found = re.search(rf"^(?:@.*\n)*def {re.escape(name)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else ""
