"""The checks that need more than one message: queries over the facts, each yielding what breaks its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .facts import Facts
from .findings import Finding, Severity

__all__ = ["ALL", "Check", "Judged", "query", "reattempts"]


class Judged:
    """The instant of the audit (Unix seconds), and how strict it is. `settled`: everything should have ended."""

    def __init__(self, now: float, grace_s: float, build: str, settled: bool) -> None:
        self.now = now
        self.grace_s = grace_s
        self.build = build
        self.settled = settled

    def late(self, since: float) -> bool:
        """Whether something that began then should be over."""
        return self.settled or since + self.grace_s < self.now


Check = Callable[[Facts, Judged], Iterator[Finding]]


def query(facts: Facts, check: str, detail: str, sql: str, severity: Severity = "finding") -> Iterator[Finding]:
    """Findings of a query: first column `where`, last the sequence, all of them fill `detail`."""
    for row in facts.rows(sql):
        yield Finding(check, str(row[0]), detail.format(*row), int(row[-1] or 0), severity)


def unreadable(facts: Facts, judged: Judged) -> Iterator[Finding]:
    sql = """SELECT u.subject, u.reason, u.newer, EXISTS(SELECT 1 FROM dead d WHERE d.stream=u.stream AND d.seq=u.seq),
             u.seq FROM unread u"""
    for subject, reason, newer, buried, seq in facts.rows(sql):
        if newer:
            yield Finding("unreadable", subject, f"written by a newer version: {reason}", seq, "note")
        elif buried:
            yield Finding("unreadable", subject, f"dead-lettered: {reason}", seq, "note")
        else:
            yield Finding("unreadable", subject, f"{reason}; no dead letter names it", seq)


def two_bodies(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "two_bodies", "{1} messages on one subject: sequences {2} to {3}",
        "SELECT stream, count(*), min(seq), max(seq) FROM subjects GROUP BY stream, key HAVING count(*) > 1",
    )  # fmt: skip
    yield from query(
        facts, "two_bodies", "completion {1} is on the log {2} times",
        """SELECT session, completion, count(*), max(seq) FROM completions GROUP BY session, completion
           HAVING count(*) > 1""",
    )  # fmt: skip


def foreign(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "foreign", "accepted, and no task names it",
        """SELECT s.session, s.seq FROM sessions s WHERE NOT EXISTS
           (SELECT 1 FROM task_sessions t WHERE t.session=s.session)""",
    )  # fmt: skip
    yield from query(
        facts, "foreign", "named by task {1}, never accepted",
        """SELECT t.session, t.task, 0 FROM task_sessions t WHERE NOT EXISTS
           (SELECT 1 FROM sessions s WHERE s.session=t.session)""",
    )  # fmt: skip
    for table in ("mentions", "steps", "completions", "evaluations", "ends", "builds"):
        yield from query(
            facts, "foreign", f"has {table} and was never accepted",
            f"""SELECT x.session, min(x.seq) FROM {table} x WHERE NOT EXISTS
                (SELECT 1 FROM sessions s WHERE s.session=x.session) GROUP BY x.session""",
        )  # fmt: skip
    yield from query(
        facts, "foreign", "closed, and no such task was accepted",
        "SELECT g.task, g.seq FROM groups g WHERE NOT EXISTS (SELECT 1 FROM tasks t WHERE t.task=g.task)",
    )  # fmt: skip
    yield from query(
        facts, "foreign", "completion {1} of attempt {2}, which nobody claimed before it",
        """SELECT c.session, c.completion, c.attempt, c.seq FROM completions c WHERE NOT EXISTS
           (SELECT 1 FROM steps s WHERE s.session=c.session AND s.attempt=c.attempt AND s.name='claimed'
            AND s.seq < c.seq)""",
    )  # fmt: skip


def order(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "order", "attempt {1}: `{2}` came before `{3}`",
        """SELECT a.session, a.attempt, a.name, b.name, a.seq FROM steps a JOIN steps b
           ON a.session=b.session AND a.attempt=b.attempt AND a.rank > b.rank AND a.seq < b.seq
           WHERE a.name != 'lost'""",
    )  # fmt: skip
    yield from query(
        facts, "order", "attempt {1}: `{2}` without `{3}`",
        """SELECT s.session, s.attempt, s.name, needed.name, s.seq FROM steps s JOIN
           (SELECT 'queued' AS name UNION ALL SELECT 'claimed') needed
           WHERE s.name NOT IN ('queued', needed.name) AND NOT EXISTS
           (SELECT 1 FROM steps n WHERE n.session=s.session AND n.attempt=s.attempt AND n.name=needed.name)""",
    )  # fmt: skip
    yield from query(
        facts, "order", "{1} ends",
        "SELECT session, count(*), max(seq) FROM ends GROUP BY session HAVING count(*) > 1",
    )  # fmt: skip
    yield from query(
        facts, "order", "attempt {1}: `{2}` after the session's end",
        """SELECT s.session, s.attempt, s.name, s.seq FROM steps s JOIN ends e ON e.session=s.session
           WHERE s.seq > e.seq""",
    )  # fmt: skip
    yield from query(
        facts, "order", "attempt {1} was queued while attempt {2} wasn't over",
        """SELECT s.session, s.attempt, s.attempt - 1, s.seq FROM steps s
           WHERE s.name='queued' AND s.attempt > 1 AND NOT EXISTS
           (SELECT 1 FROM steps p WHERE p.session=s.session AND p.attempt=s.attempt-1
            AND p.name IN ('lost', 'exited') AND p.seq < s.seq)""",
    )  # fmt: skip
    yield from query(
        facts, "order", "it ended with attempt {1}, its last is {2}",
        """SELECT e.session, e.last_attempt, (SELECT coalesce(max(attempt), 0) FROM steps s WHERE s.session=e.session)
           AS last, e.seq FROM ends e WHERE e.last_attempt != last""",
    )  # fmt: skip


def live(facts: Facts, judged: Judged) -> Iterator[Finding]:
    sql = """SELECT s.session, s.seq, t.deadline,
             (SELECT max(until) FROM deadlines d WHERE d.session=s.session),
             (SELECT name || ' ' || attempt || ' ' || detail || ' ' || at FROM steps x WHERE x.session=s.session
              ORDER BY attempt DESC, seq DESC LIMIT 1)
             FROM sessions s LEFT JOIN tasks t ON t.task=s.task
             WHERE NOT EXISTS (SELECT 1 FROM ends e WHERE e.session=s.session)"""
    for session, seq, queue_deadline, session_deadline, newest in facts.rows(sql):
        until = session_deadline or queue_deadline or 0.0
        phase, owner = _owner(newest, facts, session)
        late = judged.settled or until + judged.grace_s < judged.now
        detail = f"{phase}, in the hands of {owner}" + ("; its deadline has passed" if late else "")
        yield Finding("live", session, detail, seq, "finding" if late else "note")


def _owner(newest: str | None, facts: Facts, session: str) -> tuple[str, str]:
    """Phase, and who has to act next."""
    if newest is None:
        return "accepted", "the scheduler"
    name, attempt, detail, _ = newest.split(" ", 3)
    if name == "queued":
        return f"attempt {attempt} queued", f"gateways of class {detail}"
    if name in ("artifacts", "lost"):
        waiting = name == "artifacts" and not facts.one(
            "SELECT count(*) FROM evaluations WHERE session=? AND attempt=?", session, int(attempt)
        )
        return f"attempt {attempt} {name}", "the evaluator" if waiting else "the scheduler"
    sql = "SELECT detail FROM steps WHERE session=? AND attempt=? AND name='claimed'"
    found = next(iter(facts.rows(sql, session, int(attempt))), ("nobody",))
    return f"attempt {attempt} {name}", f"gateway {found[0]}"


def unsealed(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "unsealed", "attempt {1} is over (`{2}`) and has no seal",
        """SELECT s.session, s.attempt, s.name, s.seq FROM steps s WHERE s.name IN ('exited', 'lost', 'artifacts')
           AND NOT EXISTS (SELECT 1 FROM steps x WHERE x.session=s.session AND x.attempt=s.attempt
           AND x.name='sealed')""",
    )  # fmt: skip


def unbuilt(facts: Facts, judged: Judged) -> Iterator[Finding]:
    sql = """SELECT d.session, d.attempt, d.at, d.seq FROM decided d WHERE NOT EXISTS
             (SELECT 1 FROM builds b WHERE b.session=d.session AND b.build=?)"""
    for session, attempt, at, seq in facts.rows(sql, judged.build):
        if judged.late(at):
            yield Finding("unbuilt", session, f"attempt {attempt} ended, and build {judged.build} says nothing", seq)
    yield from query(
        facts, "unbuilt", "build {1} failed: {2}",
        "SELECT session, build, rules, seq FROM builds WHERE ok=0", "note",
    )  # fmt: skip


def outcome(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "outcome", "completed as {1}, and evaluation {2} of attempt {3} says so nowhere before it",
        """SELECT e.session, e.outcome, e.evaluation, e.last_attempt, e.seq FROM ends e WHERE e.kind='completed'
           AND NOT EXISTS (SELECT 1 FROM evaluations v WHERE v.session=e.session AND v.attempt=e.last_attempt
           AND v.evaluation=e.evaluation AND v.outcome=e.outcome AND v.reward IS e.reward AND v.seq < e.seq)""",
    )  # fmt: skip
    yield from query(
        facts, "outcome", "attempt {1} was evaluated, its harness had left nothing to judge",
        """SELECT v.session, v.attempt, v.seq FROM evaluations v WHERE NOT EXISTS
           (SELECT 1 FROM steps s WHERE s.session=v.session AND s.attempt=v.attempt AND s.name='artifacts'
            AND s.seq < v.seq)""",
    )  # fmt: skip


def blobs(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "blob", "{1} is named and isn't there",
        """SELECT min(subject), sha, 0 FROM blob_refs r WHERE NOT EXISTS
           (SELECT 1 FROM blobs b WHERE b.sha=r.sha) GROUP BY sha""",
    )  # fmt: skip
    yield from query(
        facts, "blob", "{1} has {2} bytes, its name says {3}",
        """SELECT min(r.subject), r.sha, b.size, r.size, 0 FROM blob_refs r JOIN blobs b ON b.sha=r.sha
           WHERE b.size >= 0 AND b.size != r.size GROUP BY r.sha, r.size, b.size""",
    )  # fmt: skip


def references(facts: Facts, judged: Judged) -> Iterator[Finding]:
    yield from query(
        facts, "reference", "completion {1} names {2} ({3}), which is no earlier completion of its attempt",
        """SELECT r.session, r.completion, r.target, r.what, r.seq FROM refs r WHERE NOT EXISTS
           (SELECT 1 FROM completions c WHERE c.session=r.session AND c.completion=r.target AND c.attempt=r.attempt
            AND c.seq < r.seq AND (c.kind='captured' OR r.what IN ('parent', 'replay_of')))""",
    )  # fmt: skip


def reattempts(facts: Facts) -> dict[str, list[dict[str, object]]]:
    """Attempts per session, by task and by policy version; the denominator is sessions with an attempt."""
    by_task = [
        {"run": run, "task": task, "sessions": sessions, "attempts": attempts, "lost": lost, "infra": infra,
         "rate": attempts / sessions - 1}
        for run, task, sessions, attempts, lost, infra in facts.rows(
            """SELECT s.run, s.task, count(DISTINCT s.session), count(DISTINCT x.session || '.' || x.attempt),
               sum(x.name='lost'), sum(x.name='exited' AND x.detail='infra')
               FROM sessions s JOIN steps x ON x.session=s.session GROUP BY s.run, s.task"""
        )
    ]  # fmt: skip
    by_policy = [
        {"policy_seq": policy, "attempts": attempts, "lost": lost, "infra": infra,
         "rate": (lost + infra) / attempts}
        for policy, attempts, lost, infra in facts.rows(
            """SELECT p.policy, count(*), sum(p.lost), sum(p.infra) FROM
               (SELECT x.session, x.attempt, max(x.name='lost') AS lost,
                max(x.name='exited' AND x.detail='infra') AS infra,
                (SELECT min(policy) FROM completions c WHERE c.session=x.session AND c.attempt=x.attempt) AS policy
                FROM steps x GROUP BY x.session, x.attempt) p GROUP BY p.policy"""
        )
    ]  # fmt: skip
    return {"by_task": by_task, "by_policy": by_policy}


ALL: tuple[Check, ...] = (unreadable, two_bodies, foreign, order, live, unsealed, unbuilt, outcome, blobs, references)
