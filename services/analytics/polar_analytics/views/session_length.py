"""How long sessions are: completions, tokens, chains, seconds."""

from .base import View

VIEW = View(
    name="session_length",
    title="Session length",
    about="Per session: model calls, sampled tokens, longest prompt, traces and seconds from claim to exit.",
    sql="""
SELECT
    s.session AS session, s.run AS run, s.task AS task, s.harness AS harness, s.outcome AS outcome, s.reward AS reward,
    c.calls AS completions, c.aborted AS aborted, c.sampled AS sampled_tokens, c.longest AS longest_prompt,
    s.traces AS traces, s.run_s AS run_s, dateDiff('millisecond', s.accepted, s.ended) / 1000 AS total_s
FROM sessions AS s
LEFT JOIN (
    SELECT session, countIf(kind = 'captured') AS calls, countIf(kind = 'aborted') AS aborted,
           sumIf(sampled_tokens, kind = 'captured') AS sampled, max(prompt_tokens) AS longest
    FROM completions FINAL GROUP BY session
) AS c ON c.session = s.session
""",
)
