"""How old the policy was: at sampling (versions published since), and when a trainer used the trace."""

from .base import View

VIEW = View(
    name="policy_age",
    title="Policy age at sampling",
    about="Per completion: how many policy versions had been published beyond the one that sampled it.",
    sql="""
SELECT
    c.session AS session, c.completion AS completion, c.run AS run, c.task AS task, c.time AS time,
    c.policy_seq AS policy_seq, c.version AS version, c.sampled_tokens AS sampled_tokens,
    greatest(p.policy_seq, c.policy_seq) - c.policy_seq AS age
FROM (SELECT * FROM completions FINAL WHERE kind = 'captured') AS c
ASOF LEFT JOIN (
    SELECT 1 AS one, time, max(policy_seq) OVER (ORDER BY time) AS policy_seq
    FROM policies FINAL WHERE kind = 'published'
) AS p ON p.one = toUInt8(c.seq > 0) AND p.time <= c.time
""",
)

CONSUMED = View(
    name="policy_age_consumed",
    title="Policy age at consumption",
    about="Per consumed trace: the trainer's version minus the oldest one that sampled in the trace.",
    sql="""
SELECT trainer, epoch, step, trace, session, build, policy_seq, trace_policy_seq, time,
       greatest(policy_seq, trace_policy_seq) - trace_policy_seq AS age
FROM consumed FINAL
""",
)
