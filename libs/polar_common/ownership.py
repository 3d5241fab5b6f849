"""Who may write what: the owner and the subject pattern of every event kind. NATS permissions are made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OWNERS", "Ownership", "Writer"]

Writer = Literal["ingest", "gateway", "proxy", "reconstructor", "evaluator", "trainer"]


@dataclass(frozen=True, slots=True)
class Ownership:
    """One kind of event: its writer, and the pattern of the subjects on which it may appear."""

    owner: Writer
    pattern: str


def _session(event: str, owner: Writer, attempt: str = "*", tail: str = "") -> Ownership:
    return Ownership(owner, f"polar.events.*.session.*.{attempt}.{event}{tail}")


def _completion(event: str) -> Ownership:
    return Ownership("proxy", f"polar.events.*.completion.*.*.*.{event}")


OWNERS: dict[str, Ownership] = {
    "task.accepted": Ownership("ingest", "polar.events.*.task.*.accepted"),
    "callback.delivered": Ownership("ingest", "polar.events.*.task.*.callback_delivered"),
    "session.accepted": _session("accepted", "ingest", "0"),
    "session.cancel_requested": _session("cancel_requested", "ingest", "0"),
    "session.queued": _session("queued", "ingest", "*", ".*"),
    "session.claimed": _session("claimed", "gateway"),
    "session.initialized": _session("initialized", "gateway"),
    "session.ready": _session("ready", "gateway"),
    "session.running": _session("running", "gateway"),
    "session.sealed": _session("sealed", "gateway"),
    "session.exited": _session("exited", "gateway"),
    "session.artifacts": _session("artifacts", "gateway"),
    "session.lost": _session("lost", "gateway"),
    "session.completed": _session("completed", "ingest", "0"),
    "session.failed": _session("failed", "ingest", "0"),
    "session.cancelled": _session("cancelled", "ingest", "0"),
    "completion.captured": _completion("captured"),
    "completion.aborted": _completion("aborted"),
    "completion.undelivered": _completion("undelivered"),
    "completion.rejected": _completion("rejected"),
    "evaluation.evaluated": Ownership("evaluator", "polar.events.*.evaluation.*.*.*.evaluated"),
    "build.reconstructed": Ownership("reconstructor", "polar.events.*.build.*.*.reconstructed"),
    "build.failed": Ownership("reconstructor", "polar.events.*.build.*.*.failed"),
    "group.closed": Ownership("ingest", "polar.events.*.group.*.closed"),
    "policy.published": Ownership("trainer", "polar.events.*.policy.*.published"),
    "policy.activated": Ownership("proxy", "polar.events.*.policy.*.*.activated"),
    "trainer.consumed": Ownership("trainer", "polar.events.*.trainer.*.*.*.consumed"),
    "trainer.demanded": Ownership("trainer", "polar.events.*.trainer.*.*.*.demanded"),
}
