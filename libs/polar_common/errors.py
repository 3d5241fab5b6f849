"""The one error tree. Each class names the boundary that was crossed; `retryable` says whether trying again can help.

PolarError
├── ConfigError            settings, task files, rule files: the user can mend it; names the field
├── BusError               the log
│   ├── Stale              a fence or a used subject refused the publish: somebody else was first
│   ├── Unavailable        no answer from JetStream                                            (retryable)
│   ├── NotFound           the subject, stream or blob isn't there
│   ├── Conflict           one natural key, two bodies
│   └── Poison             a message that can never be handled
│       ├── FromTheFuture  written by a newer schema version: parked, not dead-lettered
│       └── Misplaced      a well-formed event on a subject that isn't its own
├── BlobError              a body whose hash doesn't match, or a part is missing
├── RuntimeFault           sandbox, container, process
│   ├── RuntimeUnavailable daemon down, image missing                                          (retryable)
│   ├── ResourceExhausted  the attempt used up one of its own limits; names it
│   └── CommandFailed      a prepare step ended with a non-zero exit code
├── HarnessError           the agent CLI couldn't be launched or died
├── EngineError            inference engine
│   ├── EngineRefused      4xx: the request is at fault
│   ├── EngineOverflow     the context is too long
│   ├── EngineBusy         429 / draining, with `retry_after` seconds                          (retryable)
│   └── EngineDown         5xx, a cut stream, no connection                                    (retryable)
├── RenderError            messages that the template can't express
├── RequestError           a harness's or user's HTTP request, with `status` and `path` of the offending field
├── EvaluationError        the evaluator itself failed; not the agent's answer
└── TraceError             a trace or build whose invariants don't hold
"""

from __future__ import annotations

__all__ = [
    "BlobError", "BusError", "CommandFailed", "ConfigError", "Conflict", "EngineBusy", "EngineDown", "EngineError",
    "EngineOverflow", "EngineRefused", "EvaluationError", "FromTheFuture", "HarnessError", "Misplaced", "NotFound",
    "Poison", "PolarError", "RenderError", "RequestError", "ResourceExhausted", "RuntimeFault",
    "RuntimeUnavailable", "Stale", "TraceError", "Unavailable",
]  # fmt: skip


class PolarError(Exception):
    """Base of everything Polar raises on purpose."""

    retryable = False


class ConfigError(PolarError):
    """A setting, task file or rule file is wrong. `where` names the field, e.g. `tasks[3].harness.name`."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class BusError(PolarError):
    """Something between a service and JetStream."""


class Stale(BusError):
    """A fence or once-publish was refused because another message is already there."""


class Unavailable(BusError):
    """JetStream didn't answer."""

    retryable = True


class NotFound(BusError):
    """No message, stream or blob under that name."""


class Conflict(BusError):
    """The same natural key was used with another body."""


class Poison(BusError):
    """A message that can never be handled, whatever happens."""


class FromTheFuture(Poison):
    """A message with a newer `schema_version` than this code knows."""


class Misplaced(Poison):
    """A well-formed event on a subject that isn't its own: whoever may write there, this isn't theirs to say."""


class BlobError(PolarError):
    """A stored body is damaged or incomplete."""


class RuntimeFault(PolarError):
    """A sandbox, container or process failed."""


class RuntimeUnavailable(RuntimeFault):
    """The runtime as such is not usable. `cause` is what `exited` tells: `daemon`, or `image` where that is missing."""

    retryable = True

    def __init__(self, message: str, cause: str = "daemon") -> None:
        super().__init__(message)
        self.cause = cause


class ResourceExhausted(RuntimeFault):
    """The attempt's own limit is used up; `resource` is `memory`, `pids`, `disk` or `patch`. The agent's doing."""

    def __init__(self, message: str, resource: str) -> None:
        super().__init__(message)
        self.resource = resource


class CommandFailed(RuntimeFault):
    """A command in a runtime ended with a non-zero exit code."""

    def __init__(self, command: str, exit_code: int, tail: str = "") -> None:
        super().__init__(f"`{command}` ended with {exit_code}" + (f": {tail}" if tail else ""))
        self.exit_code = exit_code
        self.tail = tail


class HarnessError(PolarError):
    """The agent CLI is missing or couldn't be started."""


class EngineError(PolarError):
    """The inference engine. `status` is its HTTP status, 0 where there was none."""

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class EngineRefused(EngineError):
    """The engine says that the request is wrong."""


class EngineOverflow(EngineRefused):
    """Prompt and answer don't fit the engine's context window."""


class EngineBusy(EngineError):
    """The engine is full, paused or draining; `retry_after` seconds."""

    retryable = True


class EngineDown(EngineError):
    """The engine can't be reached, answered 5xx, or broke off."""

    retryable = True


class RenderError(PolarError):
    """The model's template can't express these messages."""


class RequestError(PolarError):
    """An HTTP request that is refused. `path` names the offending field, e.g. `messages[3].content`."""

    def __init__(self, message: str, status: int = 400, path: str = "", kind: str = "invalid_request_error") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.status = status
        self.path = path
        self.kind = kind


class EvaluationError(PolarError):
    """The evaluator failed; this says nothing about the agent."""


class TraceError(PolarError):
    """An invariant of traces doesn't hold; names completion and place."""
