"""Scripts in, built sessions out, and readable forms of traces."""

from __future__ import annotations

from typing import Any

from tests.scripted_sessions import Script

from polar_reconstructor.build import Built, build_session, prepare
from polar_reconstructor.domain import select
from polar_reconstructor.rules import BUILT_IN, RuleSet


def built(script: Script, rules: str | RuleSet = "exact", **options: Any) -> Built:
    """Build a script that has ended; `options` override the rule set's fields."""
    rule_set = BUILT_IN[rules] if isinstance(rules, str) else rules
    decode = options.pop("decode", None)
    rule_set = RuleSet.model_validate(rule_set.model_dump() | options)
    selection = select(script.session, script.stored())
    assert selection is not None
    return build_session(prepare(selection), script.blobs, rule_set, decode=decode)


def ids(made: Built) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) per trace."""
    return [(t.draft.prompt.tolist(), t.draft.response.tolist()) for t in made.traces]


def masks(made: Built) -> list[str]:
    return ["".join(map(str, t.draft.mask.tolist())) for t in made.traces]


def trained(made: Built) -> list[list[str]]:
    """Completions trained, per trace."""
    return [[c.id for c in t.draft.trained] for t in made.traces]


def spans(made: Built, trace: int = 0) -> list[dict[str, Any]]:
    return made.traces[trace].draft.spans
