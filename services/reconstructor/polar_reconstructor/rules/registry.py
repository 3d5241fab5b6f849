"""Rules by name: built in, an entry point of the group `polar.rules`, or `module:Class`."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, cast

from polar_common.errors import ConfigError

from .base import Rule
from .exact import Exact
from .per_request import PerRequest
from .prefix_merging import PrefixMerging

__all__ = ["GROUP", "rule_named"]

GROUP = "polar.rules"
# `tree` finds the same chains as `exact`; what differs is how they are encoded.
_BUILT_IN: dict[str, type[Rule]] = {
    "exact": Exact, "tree": Exact, "per_request": PerRequest, "prefix_merging": PrefixMerging,
}  # fmt: skip


def rule_named(name: str, where: str = "rule") -> Rule:
    """Make the rule. Raises ConfigError, naming `where`, if there is none, or it has no `chains`."""
    made = _BUILT_IN.get(name) or _foreign(name, where)
    try:
        rule = made()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name} can't be made without arguments: {error!r}", where) from error
    if not callable(getattr(rule, "chains", None)):
        raise ConfigError(f"{name} has no method `chains`", where)
    return cast(Rule, rule)


def _foreign(name: str, where: str) -> Any:
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return getattr(importlib.import_module(module), attribute)
        for point in importlib.metadata.entry_points(group=GROUP):
            if point.name == name:
                return point.load()
    except (Exception, SystemExit) as error:
        # Whatever a module of the user's does when it is imported: a script may end itself.
        raise ConfigError(f"{name} can't be loaded: {error!r}", where) from error
    raise ConfigError(f"no rule of that name: {name!r}; built in: {', '.join(sorted(_BUILT_IN))}", where)
