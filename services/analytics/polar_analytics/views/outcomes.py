"""How sessions ended. Outcome isn't reward: infrastructure faults are counted apart."""

from .base import View

VIEW = View(
    name="outcomes",
    title="Outcomes",
    about="Per run, harness and outcome: sessions, attempts, mean seconds.",
    sql="""
SELECT run, harness, outcome, count() AS sessions, sum(attempts) AS attempts, avg(run_s) AS mean_run_s
FROM sessions WHERE outcome != ''
GROUP BY run, harness, outcome
""",
)
