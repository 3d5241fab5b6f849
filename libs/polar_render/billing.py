"""The billing line that one harness puts before its system prompt.

It changes with every request (a hash of the conversation), so rendering it would break every prefix. It is recorded
with the completion and never shown to the model.
"""

from __future__ import annotations

__all__ = ["split_billing"]

_PREFIX = "x-anthropic-billing-header:"


def split_billing(text: str) -> tuple[str, str]:
    """The billing line at the very beginning of a system text, and the rest; ("", text) where there is none.

    The line's break goes with it. A mention anywhere else is text like any other.
    """
    if text[: len(_PREFIX)].lower() != _PREFIX:
        return "", text
    line, _, rest = text.partition("\n")
    return line.rstrip("\r"), rest
