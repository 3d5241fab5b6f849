"""Rules: how a session's completions become chains. One file per rule behind `base.Rule`; settings in `ruleset`."""

from .base import Chain, Link, Links, Rule, View
from .loading import load
from .registry import rule_named
from .ruleset import BUILT_IN, RuleSet, parse

__all__ = ["BUILT_IN", "Chain", "Link", "Links", "Rule", "RuleSet", "View", "load", "parse", "rule_named"]
