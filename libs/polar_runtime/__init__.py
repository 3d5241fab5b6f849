"""Where attempts and evaluations run: `make_runtime(RuntimeSpec(...))` and the contract of what it returns."""

from polar_runtime.archive import pack_files
from polar_runtime.base import (
    RELAY_PORT,
    ExecResult,
    Limits,
    Mount,
    OnOutput,
    Runtime,
    RuntimeSpec,
    RuntimeStats,
    Stream,
)
from polar_runtime.ledger import is_owned, reap
from polar_runtime.registry import kinds, make_runtime

__all__ = [
    "RELAY_PORT",
    "ExecResult",
    "Limits",
    "Mount",
    "OnOutput",
    "Runtime",
    "RuntimeSpec",
    "RuntimeStats",
    "Stream",
    "is_owned",
    "kinds",
    "make_runtime",
    "pack_files",
    "reap",
]
