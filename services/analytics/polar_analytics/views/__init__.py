"""The questions analytics answers: one view per file, each with its SQL and what its columns mean."""

from __future__ import annotations

from polar_analytics.schema import create_statements

from . import outcomes, policy_age, rewards, session_length, sessions
from .base import View

__all__ = ["VIEWS", "View", "ddl_text", "statements"]

VIEWS: tuple[View, ...] = (
    sessions.VIEW,
    policy_age.VIEW,
    policy_age.CONSUMED,
    session_length.VIEW,
    rewards.VIEW,
    outcomes.VIEW,
)


def statements() -> list[str]:
    """CREATE OR REPLACE VIEW statements, in order of dependence."""
    return [f"CREATE OR REPLACE VIEW {v.name} AS\n{v.sql.strip()}" for v in VIEWS]


def ddl_text() -> str:
    """All statements, tables first, as in `schemas/clickhouse.sql`."""
    return ";\n\n".join([*create_statements(), *statements()]) + ";\n"
