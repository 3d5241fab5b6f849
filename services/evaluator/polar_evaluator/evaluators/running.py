"""Running a judged program in a clean copy: its output capped, its end told as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polar_common.errors import RuntimeFault, RuntimeUnavailable
from polar_runtime import Runtime

__all__ = ["Ran", "run"]

_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Ran:
    """`trouble` is empty where the program ended by itself."""

    exit_code: int | None
    stdout: bytes = b""
    log: bytes = b""
    tail: str = ""
    trouble: str = ""


async def run(
    runtime: Runtime,
    argv: Sequence[str],
    *,
    timeout: float,
    log_bytes: int,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> Ran:
    """Run to the end or to `timeout` seconds. Raises RuntimeUnavailable where the host is at fault.

    A runtime that breaks under the program is that program's doing: it holds the agent's code.
    """
    kept = bytearray()

    def keep(_stream: str, data: bytes) -> None:
        kept.extend(data[: max(0, log_bytes - len(kept))])

    try:
        result = await runtime.exec(argv, env=env, timeout=timeout, on_output=keep, stdin=stdin)
    except RuntimeUnavailable:
        raise
    except RuntimeFault as error:
        return Ran(None, log=bytes(kept), trouble=f"environment broken: {error}")
    trouble = ""
    if result.timed_out:
        trouble = f"timed out after {timeout:g} s"
    elif result.exhausted:
        trouble = f"{result.exhausted} limit reached"
    if result.output_bytes > len(kept):
        kept += b"\n[%d bytes more were written]\n" % (result.output_bytes - len(kept))
    return Ran(result.exit_code, result.stdout, bytes(kept), result.output_tail[-_TAIL:], trouble)
