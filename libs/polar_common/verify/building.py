"""The checks of builds: conservation, manifests and groups. The other checks are in `checks.py`."""

from __future__ import annotations

from collections.abc import Iterator

from .checks import Check, Judged, query
from .facts import Facts
from .findings import Finding

__all__ = ["ALL", "derive"]

_COVERED = """SELECT c.session, c.attempt, c.completion, c.seq, d.seq AS until, d.void, d.attempt AS chosen,
  (SELECT min(s.seq) FROM steps s WHERE s.session=d.session AND s.attempt=d.attempt AND s.name='sealed') AS seal
  FROM completions c JOIN decided d ON d.session=c.session WHERE c.seq <= d.seq"""
"""Completions that a build of their session must account for: those up to the message that decides the session."""


def derive(facts: Facts) -> None:
    """Facts that follow from others: what decides each session, and what a build has to cover."""
    facts.run(
        """INSERT INTO decided SELECT session, attempt, seq, at, void FROM
           (SELECT session, attempt, seq, at, void, row_number() OVER (PARTITION BY session ORDER BY seq) AS place
            FROM (SELECT a.session, a.attempt, a.seq, a.at, '' AS void FROM steps a JOIN steps x
                  ON x.session=a.session AND x.attempt=a.attempt AND x.name='exited' AND x.detail IN ('none', 'agent')
                  WHERE a.name='artifacts'
                  UNION ALL SELECT session, last_attempt, seq, at, outcome FROM ends WHERE kind != 'completed'))
           WHERE place=1"""
    )
    facts.run(f"CREATE TABLE covered AS {_COVERED}")
    facts.run("CREATE INDEX i_covered ON covered(session, completion)")


def conservation(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "conservation", "build {1}: completion {2} is neither trained nor excluded",
        """SELECT v.session, b.build, v.completion, v.seq FROM covered v JOIN builds b ON b.session=v.session AND b.ok=1
           WHERE NOT EXISTS (SELECT 1 FROM excluded e WHERE e.build=b.build AND e.session=v.session
                             AND e.completion=v.completion)
           AND NOT EXISTS (SELECT 1 FROM spans p WHERE p.build=b.build AND p.session=v.session
                           AND p.completion=v.completion AND p.trained=1)
           AND EXISTS (SELECT 1 FROM manifests m WHERE m.build=b.build AND m.session=b.session)""",
    )  # fmt: skip
    yield from query(
        facts, "conservation", "build {1}: completion {2} is trained {3} times",
        """SELECT p.session, p.build, p.completion, count(*), min(p.number), 0 FROM spans p WHERE p.trained=1
           GROUP BY p.session, p.build, p.completion HAVING count(*) > 1""",
    )  # fmt: skip
    yield from query(
        facts, "conservation", "build {1}: completion {2} is trained and excluded ({3})",
        """SELECT p.session, p.build, p.completion, e.reason, 0 FROM spans p JOIN excluded e
           ON e.build=p.build AND e.session=p.session AND e.completion=p.completion WHERE p.trained=1""",
    )  # fmt: skip
    yield from query(
        facts, "conservation", "build {1}: completion {2} is trained, and not below its session's deciding seal",
        """SELECT p.session, p.build, p.completion, 0 FROM spans p WHERE p.trained=1 AND NOT EXISTS
           (SELECT 1 FROM covered v WHERE v.session=p.session AND v.completion=p.completion AND v.void=''
            AND v.attempt=v.chosen AND v.seq <= v.seal)""",
    )  # fmt: skip
    yield from query(
        facts, "conservation", "build {1}: {2} is excluded ({3}) and on the log nowhere before the session's end",
        """SELECT e.session, e.build, e.completion, e.reason, 0 FROM excluded e WHERE NOT EXISTS
           (SELECT 1 FROM covered v WHERE v.session=e.session AND v.completion=e.completion)""",
    )  # fmt: skip
    yield from query(
        facts, "conservation", "build {1} counts {2} trained and {3} excluded completions, {4} are to be accounted for",
        """SELECT b.session, b.build, b.trained, b.excluded,
           (SELECT count(*) FROM covered v WHERE v.session=b.session) AS there, b.seq
           FROM builds b WHERE b.ok=1 AND b.trained + b.excluded != there""",
    )  # fmt: skip
    yield from query(
        facts, "conservation", "build {1}: the span of {2} has {3} tokens, {4} were sampled",
        """SELECT p.session, p.build, p.completion, p.length, c.tokens, c.seq FROM spans p JOIN completions c
           ON c.session=p.session AND c.completion=p.completion WHERE p.length > c.tokens""",
    )  # fmt: skip


def manifests(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "manifest", "build {1} has no manifest on the trace stream",
        """SELECT b.session, b.build, b.seq FROM builds b WHERE b.ok=1
           AND EXISTS (SELECT 1 FROM manifests x WHERE x.build=b.build)
           AND NOT EXISTS (SELECT 1 FROM manifests m WHERE m.build=b.build AND m.session=b.session)""",
    )  # fmt: skip
    yield from query(
        facts, "manifest", "its {1} sessions have no traces any more: purged, and rebuildable",
        """SELECT b.build, count(*), max(b.seq) FROM builds b WHERE b.ok=1 AND NOT EXISTS
           (SELECT 1 FROM manifests x WHERE x.build=b.build) GROUP BY b.build""", "note",
    )  # fmt: skip
    yield from query(
        facts, "manifest", "build {1} names manifest {2:.16}, there is {3:.16} with {5} traces of {7} tokens",
        """SELECT b.session, b.build, b.manifest, m.hash, b.traces, m.traces, b.tokens, m.tokens, b.seq
           FROM builds b JOIN manifests m ON m.build=b.build AND m.session=b.session
           WHERE b.ok=1 AND (m.hash != b.manifest OR m.traces != b.traces OR m.tokens != b.tokens)""",
    )  # fmt: skip
    yield from query(
        facts, "manifest", "build {1}: trace {2} is named and isn't there",
        """SELECT m.session, m.build, m.number, m.id, 0 FROM manifest_traces m WHERE NOT EXISTS
           (SELECT 1 FROM traces t WHERE t.build=m.build AND t.session=m.session AND t.number=m.number
            AND t.id=m.id)""",
    )  # fmt: skip
    sql = """SELECT t.session, t.build, count(*), max(t.seq) FROM traces t WHERE NOT EXISTS
             (SELECT 1 FROM manifest_traces m WHERE m.build=t.build AND m.session=t.session AND m.number=t.number
              AND m.id=t.id) GROUP BY t.session, t.build"""
    for session, build, count, seq in facts.rows(sql):
        detail = f"build {build}: {count} traces that no manifest names; readers ignore them"
        yield Finding("manifest", session, detail, seq, "finding" if judged.settled else "note")
    sql = """SELECT m.session, m.build, m.seq FROM manifests m WHERE NOT EXISTS
             (SELECT 1 FROM builds b WHERE b.build=m.build AND b.session=m.session)"""
    for session, build, seq in facts.rows(sql):
        detail = f"build {build} has a manifest, and the log says nothing of it"
        yield Finding("manifest", session, detail, seq, "finding" if judged.settled else "note")
    yield from query(
        facts, "manifest", "build {1}: {2} of its spans' tokens are trained, the log says {3}",
        """SELECT b.session, b.build, (SELECT coalesce(sum(t.tokens), 0) FROM traces t WHERE t.build=b.build
           AND t.session=b.session) AS there, b.tokens, b.seq FROM builds b WHERE b.ok=1 AND there != b.tokens
           AND EXISTS (SELECT 1 FROM manifests x WHERE x.build=b.build AND x.session=b.session)""",
    )  # fmt: skip


def groups(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "group", "closed without session {1}",
        """SELECT t.task, t.session, g.seq FROM task_sessions t JOIN groups g ON g.task=t.task WHERE NOT EXISTS
           (SELECT 1 FROM members m WHERE m.task=t.task AND m.session=t.session)""",
    )  # fmt: skip
    yield from query(
        facts, "group", "says {1} expected, {2} terminal, {3} trainable; its members say {4}, {5}, {6}",
        """SELECT g.task, g.expected, g.terminal, g.trainable, count(m.session) AS expected, count(m.outcome) AS ended,
           coalesce(sum(m.trainable), 0) AS trained, g.seq FROM groups g LEFT JOIN members m ON m.task=g.task
           GROUP BY g.task HAVING g.expected != count(m.session) OR g.terminal != count(m.outcome)
           OR g.trainable != coalesce(sum(m.trainable), 0)""",
    )  # fmt: skip
    yield from query(
        facts, "group", "session {1} is {2} (reward {3}) there, and ended as {4} (reward {5})",
        """SELECT m.task, m.session, m.outcome, m.reward, e.outcome, e.reward, g.seq FROM members m
           JOIN groups g ON g.task=m.task JOIN ends e ON e.session=m.session AND e.seq < g.seq
           WHERE m.outcome IS NOT e.outcome OR m.reward IS NOT e.reward""",
    )  # fmt: skip
    yield from query(
        facts, "group", "session {1} counts as {2}, and had no end then",
        """SELECT m.task, m.session, m.outcome, g.seq FROM members m JOIN groups g ON g.task=m.task
           WHERE (m.outcome IS NOT NULL OR g.manner='complete') AND NOT EXISTS
           (SELECT 1 FROM ends e WHERE e.session=m.session AND e.seq < g.seq)""",
    )  # fmt: skip
    yield from query(
        facts, "group", "session {1} is trainable there, with the outcome {2}",
        """SELECT m.task, m.session, m.outcome, g.seq FROM members m JOIN groups g ON g.task=m.task
           WHERE m.trainable AND (m.outcome IS NULL OR m.outcome NOT IN
           ('passed', 'failed', 'budget_exhausted', 'no_action'))""",
    )  # fmt: skip
    sql = """SELECT t.task, t.seq, max(e.at), count(e.session), t.samples FROM tasks t
             JOIN task_sessions s ON s.task=t.task LEFT JOIN ends e ON e.session=s.session
             WHERE NOT EXISTS (SELECT 1 FROM groups g WHERE g.task=t.task) GROUP BY t.task"""
    for task, seq, at, ended, samples in facts.rows(sql):
        if ended == samples and judged.late(at):
            yield Finding("group", task, "all its sessions have ended and it isn't closed", seq)
    yield from _projections(facts, judged)


def _projections(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "group", "build {1} projects manifest {3:.16} of {2}, which isn't there",
        """SELECT p.task, p.build, p.session, p.manifest, 0 FROM projected p
           WHERE EXISTS (SELECT 1 FROM manifests x WHERE x.build=p.build) AND NOT EXISTS
           (SELECT 1 FROM manifests m WHERE m.build=p.build AND m.session=p.session AND m.hash=p.manifest)""",
    )  # fmt: skip
    yield from query(
        facts, "group", "build {1} projects a group that never closed",
        """SELECT p.task, p.build, p.seq FROM projections p WHERE NOT EXISTS
           (SELECT 1 FROM groups g WHERE g.task=p.task)""",
    )  # fmt: skip
    if judged.settled:
        sql = """SELECT g.task, g.seq FROM groups g WHERE NOT EXISTS
                 (SELECT 1 FROM projections p WHERE p.task=g.task AND p.build=?)
                 AND EXISTS (SELECT 1 FROM manifests x WHERE x.build=?)"""
        for task, seq in facts.rows(sql, judged.build, judged.build):
            yield Finding("group", task, f"closed, and build {judged.build}'s trainers weren't told", seq)


ALL: tuple[Check, ...] = (conservation, manifests, groups)
