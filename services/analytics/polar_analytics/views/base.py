"""What a view is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["View"]


@dataclass(frozen=True, slots=True)
class View:
    """A named SELECT. `title` and `about` are shown on the page."""

    name: str
    title: str
    about: str
    sql: str
