"""Rule sets: what decides how completions become traces, with a schema and a content hash.

The hash covers everything but names and places, so that a copy under another name gives the same trace ids. YAML files
are read by `loading.load`; built-in sets are named by `BUILT_IN`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from polar_common.errors import ConfigError

__all__ = ["BUILT_IN", "RuleSet", "parse"]

FORMAT = 4
"""Grows when the same settings come to mean other traces."""
Count = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
"""Strict: YAML's `yes` is no 1."""


class RuleSet(BaseModel):
    """One rule set. Defaults are those of the built-in sets."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    rule: str = "exact"
    """`per_request`, `exact`, `prefix_merging`, `tree`, an entry point of `polar.rules`, or `module:Class`."""
    options: dict[str, JsonValue] = {}
    """For rules of your own."""
    max_trace_tokens: Count = 0
    """Prompt + response; longer traces are cut at a span's end, keeping what comes before. 0: no bound."""
    min_action_tokens: Count = 1
    """Traces that train fewer tokens are left out (`min_tokens`)."""
    side: Literal["exclude", "train"] = "exclude"
    """Titles and the like: calls without tools that nothing was made of."""
    superseded: Literal["exclude", "train"] = "exclude"
    """Earlier answers to a request that was asked again, where a later one was used."""
    unused_parallel: Literal["exclude", "train"] = "exclude"
    """Parallel answers to one request that nothing was made of."""
    undelivered: Literal["exclude", "train"] = "exclude"
    """Answers that never reached the harness."""
    subagents: Literal["train", "exclude"] = "train"
    adopted_partial: Literal["mask", "train"] = "mask"
    """Cut answers whose finished items the harness went on with."""
    mixed_policy: Literal["keep", "split", "mask"] = "keep"
    """Chains sampled by several policy versions: as they are, one trace per version, or the newest version alone."""
    tokenizer: str = ""
    """Directory of the model's tokenizer: tells by text whether drift is the template's, another tokenisation or an
    edit. Without it, the ids and what the proxy recorded decide."""
    tokenizer_hash: str = ""
    """Its fingerprint, filled in when a rule set is loaded: the path may change, the tokenizer may not."""
    end_of_turn: tuple[Count, ...] = ()
    """`prefix_merging`: end-of-turn ids, where the log's engine facts don't tell them."""

    @model_validator(mode="after")
    def _one_place(self) -> RuleSet:
        if self.rule == "tree" and self.mixed_policy == "split":
            raise ValueError("a tree stores each span once: mixed_policy can't be split")
        try:
            _ = self.hash
        except TypeError as error:
            raise ValueError(f"options: {error}") from error
        return self

    @property
    def hash(self) -> str:
        """sha256 over everything but the name and the tokenizer's place."""
        body = self.model_dump(mode="json", exclude={"name", "tokenizer"}) | {"format": FORMAT}
        return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


BUILT_IN: dict[str, RuleSet] = {
    name: RuleSet(name=name, rule=name) for name in ("exact", "per_request", "prefix_merging", "tree")
}


def parse(value: object, source: str = "rules") -> RuleSet:
    """A rule set from parsed YAML. Raises ConfigError naming the field."""
    if not isinstance(value, dict):
        raise ConfigError("a rule set is a mapping of fields", source)
    try:
        return RuleSet.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        raise ConfigError(message, f"{source}: {where}" if where else source) from error
