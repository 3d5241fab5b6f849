"""One row per session, folded from what its events told."""

from polar_analytics.schema import TABLES

from .base import View

_FACTS = next(t for t in TABLES if t.name == "session_facts")
_COLUMNS = ",\n    ".join(f"max(f.{c}) AS {c}" for c in _FACTS.columns if c not in ("session", "state"))

VIEW = View(
    name="sessions",
    title="Sessions",
    about="State, outcome, reward and stage times (seconds) of every session.",
    sql=f"""
SELECT
    f.session AS session,
    multiIf(max(f.state) != '', max(f.state), toYear(max(f.exited)) > 1970, 'exited',
            toYear(max(f.running)) > 1970, 'running', toYear(max(f.claimed)) > 1970, 'claimed',
            toYear(max(f.queued)) > 1970, 'queued', 'accepted') AS state,
    {_COLUMNS}
FROM session_facts AS f
GROUP BY f.session
""",
)
