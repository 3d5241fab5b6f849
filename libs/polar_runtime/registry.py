"""From a spec to a runtime: the built-in kinds, entry points in the group `polar.runtimes`, or `module:Class`."""

from __future__ import annotations

from polar_common.plugins import known_names, load_class, located
from polar_runtime.base import Runtime, RuntimeSpec

__all__ = ["kinds", "make_runtime"]

_GROUP = "polar.runtimes"
_FIELD = "runtime.kind"
_BUILT_IN = {
    "local": "polar_runtime.local:LocalRuntime",
    "docker": "polar_runtime.docker:DockerRuntime",
    "apptainer": "polar_runtime.apptainer:ApptainerRuntime",
}


def kinds() -> list[str]:
    """The names that `make_runtime` knows."""
    return known_names(_GROUP, _BUILT_IN)


def make_runtime(spec: RuntimeSpec) -> Runtime:
    """A runtime that isn't started yet. `ConfigError` for an unknown kind or a class that isn't a `Runtime`."""
    place = located("runtime", spec.kind, _GROUP, _BUILT_IN, _FIELD)
    return load_class(place, Runtime, _FIELD)(spec)  # type: ignore[type-abstract]
