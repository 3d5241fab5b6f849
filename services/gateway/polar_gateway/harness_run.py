"""RUNNING: the harness's process, from its launch to the verdict on how it ended."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from polar_common.bus import Bus
from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_common.events import SessionQueued
from polar_runtime import ExecResult, OnOutput, Runtime

from .domain import Ending, Evidence, HarnessSays, judge
from .evidence import has_completion, last_call
from .harnesses.base import Exit, Harness
from .output import redact
from .preparing import Prepared
from .waiting import Interrupt

__all__ = ["HarnessEnd", "execute", "judged"]

_TAIL = 4000
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HarnessEnd:
    """`result`, or the runtime's `fault` under the harness, or why the launch was `refused`."""

    result: ExecResult | None = None
    fault: RuntimeFault | None = None
    refused: str = ""

    @property
    def exhausted(self) -> str:
        return self.result.exhausted if self.result else ""


async def execute(runtime: Runtime, prepared: Prepared, on_output: OnOutput) -> HarnessEnd:
    """Run the harness to its end. A runtime that fails under it is a result to be judged."""
    launch = prepared.launch
    try:
        result = await runtime.exec(
            launch.argv,
            env=launch.env,
            cwd=launch.cwd or None,
            on_output=on_output,
            stdin=launch.stdin,
            proxy=True,
        )
    except RuntimeFault as error:
        return HarnessEnd(fault=error)
    except ConfigError as error:
        return HarnessEnd(refused=str(error))
    return HarnessEnd(result)


async def judged(
    bus: Bus, queued: SessionQueued, prepared: Prepared, end: HarnessEnd, why: Interrupt | None, key: str
) -> Ending:
    """The ending. Called after the seal: model calls that aren't on the log by then don't count."""
    code, tail, says = None, "", HarnessSays()
    if end.result is not None:
        code = end.result.exit_code
        tail = redact(end.result.output_tail.encode(), key).decode(errors="replace")
        says = _says(prepared.harness, code, tail)
    if why == "cancelled":
        return Ending(code, cancelled=True, log_tail=tail[-_TAIL:])
    unavailable = isinstance(end.fault, RuntimeUnavailable)
    last = await last_call(bus, queued.session, queued.attempt)
    evidence = Evidence(
        exit_code=code,
        timed_out=why == "timeout",
        exhausted=end.exhausted,
        broken=str(end.fault) if end.fault is not None else "",
        unavailable=str(end.fault) if unavailable else "",
        refused=end.refused,
        completions=await has_completion(bus, queued.session, queued.attempt),
        engine_failed=last.engine_failed,
        used_up=last.used_up,
        says=says,
    )
    verdict = judge(evidence)
    return Ending(
        code,
        timed_out=evidence.timed_out,
        fault=verdict.fault,
        cause=verdict.cause,
        detail=verdict.detail,
        log_tail=tail[-_TAIL:],
    )


def _says(harness: Harness, code: int, tail: str) -> HarnessSays:
    try:
        told = harness.classify_exit(code, tail)
        if not isinstance(told, Exit) or told.kind not in ("finished", "budget_exhausted", "harness_error"):
            raise TypeError(f"{told!r} isn't an Exit")
        return HarnessSays(told.kind, str(told.reason))
    except (Exception, SystemExit) as error:
        # A user's own adapter may raise anything, and scripts end themselves; the exit code still says enough.
        _log.warning("classify_exit failed", harness=harness.name, error=repr(error))
        return HarnessSays("finished" if code == 0 else "harness_error", f"ended with {code}")
