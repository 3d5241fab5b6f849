"""Rule sets by name, or from YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from polar_common.errors import ConfigError
from polar_render.vocabulary import Vocabulary

from .registry import rule_named
from .ruleset import BUILT_IN, RuleSet, parse

__all__ = ["load"]


class _Unique(yaml.SafeLoader):
    """YAML in which a key stands once: of two, one would be dropped in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} stands here twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _with_tokenizer(rules: RuleSet, source: str) -> RuleSet:
    if not rules.tokenizer:
        return rules
    found = Vocabulary.load(Path(rules.tokenizer)).fingerprint
    if rules.tokenizer_hash not in ("", found):
        raise ConfigError(f"{rules.tokenizer} holds another tokenizer ({found[:12]})", f"{source}: tokenizer_hash")
    return rules.model_copy(update={"tokenizer_hash": found})


def load(name: str) -> RuleSet:
    """A built-in set by name, or a YAML file by path. Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"no rule set and no file of that name; built in: {', '.join(sorted(BUILT_IN))}", name)
    try:
        value = yaml.load(path.read_text(), _Unique)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"not readable as YAML: {error}", name) from error
    if isinstance(value, dict):
        value = {"name": path.stem[:64], **value}
    rules = parse(value, name)
    rule_named(rules.rule, f"{name}: rule")
    return _with_tokenizer(rules, name)
