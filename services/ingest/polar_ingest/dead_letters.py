"""Dead letters as the scheduler sees them: what they say about a session, and its own for what it couldn't read."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import orjson
import structlog

from polar_common import subjects
from polar_common.bus import Bus, Stored
from polar_common.errors import Poison
from polar_common.events import now
from polar_common.ids import token

from .state import World

__all__ = ["Verdict", "bury", "verdict"]

_CONSUMER = "scheduler"
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A session whose message a service gave up on. `build`: only its reconstruction is concerned."""

    session: str
    reason: str
    build: bool = False
    attempt: int | None = None


def verdict(body: bytes, build: str) -> Verdict | None:
    """What a dead letter means for a session; None if nothing (callbacks, analytics, other builds, foreign text)."""
    try:
        letter = orjson.loads(body)
        consumer, parts, reason = str(letter["consumer"]), str(letter["subject"]).split("."), str(letter["reason"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    if len(parts) < 7 or parts[3] != "session":
        return None
    said = f"{consumer}: {reason}"[:500]
    if consumer == f"reconstructor-{token(build)}":
        return Verdict(parts[4], said, build=True)
    if (consumer == "evaluator" or consumer.startswith("gateway-")) and parts[5].isdecimal():
        return Verdict(parts[4], said, attempt=int(parts[5]))
    return None


async def bury(bus: Bus, stream: str, stored: Stored, error: Poison, world: World) -> None:
    """Dead-letter a message that the fold couldn't read. Nothing if it's about a session that has ended since."""
    parts = stored.subject.split(".")
    about = parts[5] if parts[3] == "build" else parts[4]
    session = world.sessions.get(about)
    if parts[3] != "task" and (session is None or session.end is not None):
        return
    _log.error("dead letter", consumer=_CONSUMER, subject=stored.subject, error=str(error))
    body = {
        "consumer": _CONSUMER,
        "stream": stream,
        "sequence": stored.sequence,
        "subject": stored.subject,
        "reason": f"{type(error).__name__}: {error}",
        "tries": 1,
        "time": now().isoformat(),
        "headers": {},
        "body": base64.b64encode(stored.body).decode(),
    }
    subject = subjects.dead_letter(_CONSUMER, stream, stored.sequence)
    await bus.once_raw(subject, orjson.dumps(body), body_hash=f"{stream}/{stored.sequence}")
