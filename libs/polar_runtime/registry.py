"""From a spec to a runtime: the built-in kinds, entry points in the group `polar.runtimes`, or `module:Class`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from polar_common.errors import ConfigError
from polar_runtime.base import Runtime, RuntimeSpec

__all__ = ["kinds", "make_runtime"]

_GROUP = "polar.runtimes"
_BUILT_IN = {
    "local": "polar_runtime.local:LocalRuntime",
    "docker": "polar_runtime.docker:DockerRuntime",
    "apptainer": "polar_runtime.apptainer:ApptainerRuntime",
}


def kinds() -> list[str]:
    """The names that `make_runtime` knows."""
    return sorted({*_BUILT_IN, *(e.name for e in entry_points(group=_GROUP))})


def make_runtime(spec: RuntimeSpec) -> Runtime:
    """A runtime that isn't started yet. `ConfigError` for an unknown kind or a class that isn't a `Runtime`."""
    kind = spec.kind
    where = _BUILT_IN.get(kind) or next((e.value for e in entry_points(group=_GROUP) if e.name == kind), kind)
    module, colon, name = where.partition(":")
    if not colon:
        raise ConfigError(f"unknown runtime {kind!r}; known: {', '.join(kinds())}, or module:Class", "runtime.kind")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        # A user's own module may raise anything.
        raise ConfigError(f"cannot load {where!r}: {error!r}", "runtime.kind") from error
    if not (isinstance(found, type) and issubclass(found, Runtime)):
        raise ConfigError(f"{where!r} isn't a Runtime", "runtime.kind")
    return found(spec)
