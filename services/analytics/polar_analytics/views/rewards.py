"""How rewards are distributed, and how much they differ within groups."""

from .base import View

VIEW = View(
    name="reward_distribution",
    title="Rewards",
    about="Per run, harness and task: mean, spread, pass share. A group without spread teaches nothing.",
    sql="""
SELECT
    run, harness, task, count() AS sessions, countIf(has_reward = 1) AS rewarded,
    avgIf(reward, has_reward = 1) AS mean_reward, stddevPopIf(reward, has_reward = 1) AS spread,
    countIf(outcome = 'passed') / count() AS pass_share,
    groupArrayIf(reward, has_reward = 1) AS rewards
FROM sessions WHERE state IN ('completed', 'failed', 'cancelled')
GROUP BY run, harness, task
""",
)
