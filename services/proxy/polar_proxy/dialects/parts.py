"""Answer parts in the form in which every client will echo them: adjacent pieces joined, empty ones gone."""

from __future__ import annotations

from collections.abc import Sequence

from polar_render.messages import Part, Text, Thinking

__all__ = ["joined"]


def joined(parts: Sequence[Part]) -> list[Part]:
    """Adjacent texts and adjacent thoughts become one part, as a stream of deltas would make them."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Text):
            if not part.text:
                continue
            if isinstance(last, Text):
                out[-1] = Text(last.text + part.text)
                continue
        elif isinstance(part, Thinking) and not part.redacted:
            if not part.text:
                continue
            if isinstance(last, Thinking) and not last.redacted:
                out[-1] = Thinking(last.text + part.text, last.signature or part.signature)
                continue
        out.append(part)
    return out
