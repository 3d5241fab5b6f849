"""Ids and subject tokens. Task and session ids carry their log segment: `<seg>-<hash20>`, `<seg>-<hash20>-<i>`."""

from __future__ import annotations

import base64
import hashlib
import os
import re

from .errors import ConfigError

__all__ = ["FIRST_SEGMENT", "new_id", "segment_of", "session_id", "sessions_of", "task_id", "task_of", "token"]

FIRST_SEGMENT = "s1"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def _short(text: str, length: int) -> str:
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()[:length]


def token(user_id: str) -> str:
    """A subject token for any user-given id: itself where it fits, else 26 characters of base32(sha256)."""
    return user_id if _TOKEN.match(user_id) else _short(user_id, 26)


def new_id() -> str:
    """A fresh random id, 32 hex characters; never derived from time, so clocks may jump."""
    return os.urandom(16).hex()


def task_id(segment: str, run: str, user_id: str) -> str:
    """The task's id: the same run and user id always give the same one."""
    key = "\0".join((run, user_id))
    return f"{segment}-{_short(key, 20)}"


def session_id(task: str, index: int) -> str:
    """Id of the `index`-th sample (from 0) of a task."""
    return f"{task}-{index}"


def sessions_of(task: str, samples: int) -> list[str]:
    return [session_id(task, i) for i in range(samples)]


def task_of(session: str) -> str:
    """The task a session belongs to."""
    return session.rpartition("-")[0]


def segment_of(identifier: str) -> str:
    """The log segment of a task or session id."""
    segment, dash, rest = identifier.partition("-")
    if not dash or not rest or not _TOKEN.match(identifier):
        raise ConfigError(f"{identifier!r} is no task or session id", "id")
    return segment
