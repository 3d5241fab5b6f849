"""What becomes of a message whose handling failed: tried again with growing delays, parked, or dead-lettered.

* `Poison`: no version of this code can read it. To the dead letter at once.
* `FromTheFuture`: a newer service wrote it. Parked (offered again every minute) and alerted, so rolling upgrades work.
* `Unavailable`: the log is full, stalled or has no leader. No message is to blame, so it is offered until that ends.
* Anything else: backoffs, then the dead letter.
The dead letter is acknowledged before the message is terminated; so nothing disappears in between.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Literal

import orjson
import structlog
from nats.aio.msg import Msg
from prometheus_client import Counter

from polar_common import subjects
from polar_common.errors import FromTheFuture, Poison, Unavailable
from polar_common.ids import new_id

from .client import Bus
from .read import Stored, from_delivery

__all__ = ["BACKOFFS_S", "Failure", "bury", "settle"]

Failure = Literal["retried", "parked", "dead"]
BACKOFFS_S = (0.5, 2.0, 8.0, 30.0)
_PARKED_S = 60.0
_log = structlog.get_logger(__name__)
_failures = Counter("polar_handler_failures", "Messages whose handling failed", ["consumer", "fate"])


async def settle(bus: Bus, consumer: str, msg: Msg, error: BaseException) -> Failure:
    """Decide and tell the server. Returns what became of the message."""
    meta = msg.metadata
    tries = meta.num_delivered
    where = {"consumer": consumer, "subject": msg.subject, "sequence": meta.sequence.stream, "error": repr(error)}
    if isinstance(error, FromTheFuture):
        _log.error("parked: a newer version wrote this; upgrade this service", **where)
        await bus.reply(msg, _nak(_PARKED_S))
        return _count(consumer, "parked")
    if isinstance(error, Unavailable) or (tries <= len(BACKOFFS_S) and not isinstance(error, Poison)):
        _log.warning("handling failed, trying again", tries=tries, **where)
        await bus.reply(msg, _nak(BACKOFFS_S[min(tries, len(BACKOFFS_S)) - 1]))
        return _count(consumer, "retried")
    _log.error("dead letter", tries=tries, **where)
    await bury(bus, consumer, meta.stream, from_delivery(msg), error, tries)
    await bus.reply(msg, b"+TERM")
    return _count(consumer, "dead")


def _nak(delay_s: float) -> bytes:
    return b"-NAK " + orjson.dumps({"delay": int(delay_s * 1e9)})


def _count(consumer: str, fate: Failure) -> Failure:
    _failures.labels(consumer, fate).inc()
    return fate


async def bury(bus: Bus, consumer: str, stream: str, stored: Stored, error: BaseException, tries: int = 1) -> None:
    """Publish a message to the dead letter, with its reason, and wait for the acknowledgement.

    Where it was buried before (and offered again since), a note below that letter says how it failed this time.
    """
    body = orjson.dumps(
        {
            "consumer": consumer,
            "stream": stream,
            "sequence": stored.sequence,
            "subject": stored.subject,
            "reason": f"{type(error).__name__}: {error}",
            "tries": tries,
            "time": datetime.now(UTC).isoformat(),
            "body": base64.b64encode(stored.body).decode(),
        }
    )
    subject = subjects.dead_letter(consumer, stream, stored.sequence)
    # The natural key says it all: a second burial of the same message is the same letter.
    buried = await bus.once_raw(subject, body, body_hash=f"{stream}/{stored.sequence}")
    if buried.duplicate:
        note = f"{subject}.failed.{new_id()[:12]}"
        await bus.once_raw(note, body, body_hash=note)
