"""What an audit may find: a fixed list of checks, each with the rule that was broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from polar_common.errors import ConfigError

__all__ = ["CHECKS", "Finding", "Findings", "Severity"]

Severity = Literal["finding", "note"]

CHECKS: dict[str, str] = {
    "unreadable": "every message can be read, or has a dead letter",
    "misplaced": "every event lies on its own subject",
    "body_hash": "every message still says what its publisher hashed",
    "two_bodies": "a natural key holds one body",
    "gap": "no message is missing between a stream's first and last",
    "foreign": "nothing is on the log that belongs to no accepted task or session",
    "order": "a session's transitions come in order, with one end and numbered attempts",
    "live": "every session is terminal, or live with an owner and within its deadlines",
    "unsealed": "every attempt that is over was sealed",
    "unbuilt": "every terminal session is reconstructed, or failed to be with a reason",
    "conservation": "every completion is trained in one span of a build or excluded with a reason",
    "reference": "every reference resolves to an earlier completion of its attempt",
    "blob": "every blob that is named is there, with its hash",
    "trace": "every trace's content has its recorded hash and counts",
    "manifest": "every build names a manifest that is there, and the manifest its traces",
    "outcome": "every end agrees with its evaluation",
    "group": "every group's closing agrees with its sessions, and its projections with their manifests",
    "rebuild": "every trace rebuilds from the log to its recorded hash",
}

_SHOWN = 200
"""Findings of one check that are told one by one; beyond it they are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or (`note`) worth knowing. `where`: a subject, session, trace or blob."""

    check: str
    where: str
    detail: str
    sequence: int = 0
    severity: Severity = "finding"


@dataclass(slots=True)
class Findings:
    """Collects findings: all are counted, the first of each check are kept."""

    kept: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, finding: Finding) -> None:
        """Raises ConfigError for a check that isn't on the list."""
        if finding.check not in CHECKS:
            raise ConfigError(f"{finding.check!r} is no check", "verify")
        counter = self.counts if finding.severity == "finding" else self.notes
        counter[finding.check] += 1
        if counter[finding.check] <= _SHOWN:
            self.kept.append(finding)
