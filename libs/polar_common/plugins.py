"""Classes by name: built-in ones, entry points of a group, or `module:Class` of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from .errors import ConfigError

__all__ = ["known_names", "load_class", "load_instance", "located", "unknown"]

T = TypeVar("T")


def known_names(group: str, built_in: Iterable[str]) -> list[str]:
    """The built-in names and those of this installation's entry points."""
    return sorted({*built_in, *(e.name for e in entry_points(group=group))})


def unknown(what: str, name: str, known: Iterable[str], field: str) -> ConfigError:
    """What is said of a name that nobody knows."""
    return ConfigError(f"unknown {what} {name!r}; known: {', '.join(known)}, or module:Class", field)


def located(what: str, name: str, group: str, built_in: Mapping[str, str], field: str) -> str:
    """`module:Class` of a name. Raises ConfigError, with the known names, where there is none."""
    place = built_in.get(name) or next((e.value for e in entry_points(group=group) if e.name == name), name)
    if ":" not in place:
        raise unknown(what, name, known_names(group, built_in), field)
    return place


def load_class(place: str, base: type[T], field: str) -> type[T]:
    """The class at `place`. Raises ConfigError where it can't be loaded, or is no `base`."""
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise _broken(place, error, field) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        article = "an" if base.__name__[0] in "AEIOU" else "a"
        raise ConfigError(f"{place!r} isn't {article} {base.__name__}", field)
    return found


def load_instance(place: str, base: type[T], field: str) -> T:
    """One of the class at `place`, made without arguments. Raises ConfigError."""
    found = load_class(place, base, field)
    try:
        return found()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(place, error, field) from error


def _broken(place: str, error: BaseException, field: str) -> ConfigError:
    """A user's own module may raise anything, and a script end itself."""
    return ConfigError(f"cannot load {place!r}: {error!r}", field)
