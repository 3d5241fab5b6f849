"""Dead letters as `polar dlq` sees them, and handing them back to their consumer.

A terminated message is offered again by setting its consumer back to it. Handlers are idempotent by state, so what
comes along changes nothing; but a gateway that is offered a running attempt again would take it for lost, so queues of
work are never set back: their sessions were closed, and are submitted again under another id.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass

import orjson
from nats.js.errors import APIError, NotFoundError

from .bus import Bus
from .bus.read import Stored
from .errors import ConfigError, Poison
from .ids import new_id

__all__ = ["Letter", "is_failure", "is_letter", "read_letter", "read_note", "retry"]


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter. `number`: its sequence among them; `stream` and `sequence`: the message that it is about."""

    number: int
    consumer: str
    stream: str
    sequence: int
    subject: str
    reason: str
    tries: int
    time: str
    body: bytes


def is_letter(subject: str) -> bool:
    """`polar.dlq.<consumer>.<stream>.<sequence>`, and not a note below it of a retry or another failure."""
    return subject.count(".") == 4


def is_failure(subject: str) -> bool:
    """`….failed.<id>` below a letter: its message was offered again and failed again."""
    return ".failed." in subject


def read_letter(stored: Stored) -> Letter:
    """Raises Poison for a message that isn't a dead letter."""
    try:
        told = orjson.loads(stored.body)
        return Letter(
            number=stored.sequence,
            consumer=str(told["consumer"]),
            stream=str(told["stream"]),
            sequence=int(told["sequence"]),
            subject=str(told["subject"]),
            reason=str(told["reason"]),
            tries=int(told["tries"]),
            time=str(told["time"]),
            body=base64.b64decode(told["body"]),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Poison(f"{stored.subject} isn't a dead letter: {error!r}") from error


def read_note(stored: Stored) -> int:
    """The number of the letter that a note of a retry is about. Raises Poison for anything else."""
    try:
        return int(orjson.loads(stored.body)["retried"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Poison(f"{stored.subject} is no note of a retry: {error!r}") from error


async def retry(bus: Bus, letters: Iterable[Letter]) -> None:
    """Set each consumer back to the first of its letters' messages, and note that on the dead-letter stream.

    Raises ConfigError for letters of queues of work and of consumers that are gone.
    """
    first: dict[tuple[str, str], int] = {}
    chosen = list(letters)
    for letter in chosen:
        if letter.consumer.startswith("gateway-") or letter.consumer == "scheduler":
            raise ConfigError(
                f"{letter.consumer}: the session of {letter.subject} was closed; submit its task again", "consumer"
            )
        key = (letter.stream, letter.consumer)
        first[key] = min(letter.sequence, first.get(key, letter.sequence))
    for (stream, consumer), sequence in first.items():
        try:
            await bus.js.reset_consumer(stream, consumer, seq=sequence)
        except NotFoundError as error:
            raise ConfigError(f"there is no consumer {consumer} on {stream}", "consumer") from error
        except APIError as error:
            raise ConfigError(f"{consumer} can't be set back to {sequence}: {error.description}", "consumer") from error
    for letter in chosen:
        note = orjson.dumps({"retried": letter.number, "by": bus.producer})
        subject = f"polar.dlq.{letter.consumer}.{letter.stream}.{letter.sequence}.retried.{new_id()[:12]}"
        await bus.once_raw(subject, note, subject)
