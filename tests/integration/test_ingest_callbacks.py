"""Callbacks to a receiver of our own: at least once, with a key, and a dead letter where nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest
from ingest_fakes import Edge, FakeHouse, start_edge, task, until

from polar_common import subjects
from polar_common.bus import Bus, Worker
from polar_common.events import CallbackDelivered
from polar_common.nats_server import NatsServer
from polar_common.tasks import cancel_and_wait, spawn
from polar_common.topology import Topology, consumers
from polar_ingest.handlers import CONSUMER, Callbacks
from polar_ingest.settings import IngestSettings
from polar_ingest.specs import Specs

pytestmark = pytest.mark.nats
SPEC = next(c for c in consumers(Topology()) if c.durable == CONSUMER)


@dataclass
class Receiver:
    """A server that answers with the given responses in turn, the last one for ever."""

    answers: list[bytes]
    url: str = ""
    heard: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.heard.append((headers, orjson.loads(body)))
        answer = self.answers[min(len(self.heard), len(self.answers)) - 1]
        writer.write(answer + b"content-length: 0\r\nconnection: close\r\n\r\n" if answer else b"")
        await writer.drain()
        writer.close()


def http(status: str, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "")).encode()


@asynccontextmanager
async def receiving(*answers: bytes) -> AsyncIterator[Receiver]:
    receiver = Receiver(list(answers))
    server = await asyncio.start_server(receiver._serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/done"
    async with server:
        yield receiver


@asynccontextmanager
async def delivering(bus: Bus, **options: Any) -> AsyncIterator[None]:
    settings = IngestSettings(**options)
    stop = asyncio.Event()
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        worker = Worker(bus, SPEC, Callbacks(bus, Specs(bus), settings, client).handle, slots=4)
        running = spawn(worker.run(stop), name="callbacks")
        try:
            yield
        finally:
            stop.set()
            await worker.abandon()
            await cancel_and_wait(running)


@pytest.fixture
async def edge(nats_server: NatsServer, bus: Bus) -> AsyncIterator[Edge]:
    started = await start_edge(nats_server.url)
    yield started
    await started.kill()


async def run_one(edge: Edge, bus: Bus, url: str) -> str:
    """A closed group whose submitter wants to be called."""
    answer = await edge.client.post("/v1/tasks", json=task(samples=2, callback=url))
    assert answer.status_code == 202, answer.text
    made = str(answer.json()["tasks"][0]["task"])
    async with FakeHouse(bus).open():
        await until(lambda: bus.last(subjects.group(made)))
    return made


def told(bus: Bus, made: str) -> Callable[[], Any]:
    async def ask() -> CallbackDelivered | None:
        stored = await bus.last(subjects.task(made, "callback_delivered"))
        event = stored.event if stored is not None else None
        return event if isinstance(event, CallbackDelivered) else None

    return ask


async def test_a_closed_group_is_told_with_its_rewards_and_a_key(edge: Edge, bus: Bus) -> None:
    async with receiving(http("204 No Content")) as receiver, delivering(bus):
        made = await run_one(edge, bus, receiver.url)
        event = await until(told(bus, made))
        await asyncio.sleep(0.3)
    assert (event.ok, event.status, event.tries, event.key) == (True, 204, 1, f"{made}.closed")
    [(headers, body)] = receiver.heard
    assert headers["idempotency-key"] == f"{made}.closed"
    assert (body["event"], body["id"], body["task"], body["trainable"]) == ("group.closed", "t", made, 2)
    assert [m["reward"] for m in body["members"]] == [1.0, 1.0]


async def test_a_receiver_in_trouble_is_tried_again_under_the_same_key(edge: Edge, bus: Bus) -> None:
    answers = (http("503 Busy", "retry-after: 1"), b"", http("500 Oh"), http("200 OK"))
    async with receiving(*answers) as receiver, delivering(bus):
        made = await run_one(edge, bus, receiver.url)
        event = await until(told(bus, made))
    assert (event.ok, event.tries, len(receiver.heard)) == (True, 4, 4)
    assert len({h["idempotency-key"] for h, _ in receiver.heard}) == 1
    assert len({orjson.dumps(b) for _, b in receiver.heard}) == 1


@pytest.mark.parametrize(
    ("answer", "tries"),
    [
        (http("404 Not Found"), 1),
        (http("302 Found", "location: http://127.0.0.1:1/elsewhere"), 1),
        (http("500 Oh"), 2),
    ],
    ids=["refused", "redirect", "always down"],
)
async def test_what_cant_be_delivered_is_told_and_kept(edge: Edge, bus: Bus, answer: bytes, tries: int) -> None:
    async with receiving(answer) as receiver, delivering(bus, ingest_callback_for_s=2.0):
        made = await run_one(edge, bus, receiver.url)
        event = await until(told(bus, made))
        letter = await until(lambda: bus.last("polar.dlq.callbacks.>", "POLAR_DLQ"))
    assert (event.ok, event.status) == (False, int(answer.split()[1]))
    assert event.tries >= tries
    assert "given up" in orjson.loads(letter.body)["reason"]


async def test_metadata_addresses_arent_called(edge: Edge, bus: Bus) -> None:
    async with delivering(bus):
        made = await run_one(edge, bus, "http://169.254.169.254/latest/meta-data")
        event = await until(told(bus, made))
    assert (event.ok, event.status, event.tries) == (False, 0, 1)


@pytest.mark.parametrize("dies", ["before it is recorded", "before it is acknowledged"])
async def test_a_callback_cut_off_by_a_crash_is_made_again_unless_recorded(edge: Edge, bus: Bus, dies: str) -> None:
    """The process dies after the receiver has heard it: unrecorded, it is made again, and the key tells the repeat."""
    async with receiving(http("200 OK")) as receiver:
        made = await run_one(edge, bus, receiver.url)
        settings = IngestSettings()
        async with httpx.AsyncClient(trust_env=False) as client:
            from polar_common.bus import Lease

            stop = asyncio.Event()
            cut = Callbacks(bus, Specs(bus), settings, client)

            async def killed(*_: object) -> None:
                raise RuntimeError("killed")

            if dies == "before it is recorded":
                cut._record = killed  # type: ignore[method-assign]

            async def dying(lease: Lease) -> None:
                await cut.handle(lease)
                await killed()

            running = spawn(Worker(bus, SPEC, dying, slots=1).run(stop), name="dying")
            await until(lambda: receiver.heard)
            stop.set()
            await running
        async with delivering(bus):
            await until(lambda: len(receiver.heard) >= 2 or dies == "before it is acknowledged")

            async def settled() -> bool:
                told = await bus.js.consumer_info(SPEC.stream, SPEC.durable)
                return told.num_ack_pending == 0 and told.num_pending == 0

            await until(settled)
            await asyncio.sleep(0.3)
    assert {h["idempotency-key"] for h, _ in receiver.heard} == {f"{made}.closed"}
    assert len(receiver.heard) == (2 if dies == "before it is recorded" else 1)
    info = await bus.js.consumer_info(SPEC.stream, SPEC.durable)
    assert (info.num_ack_pending, info.num_pending) == (0, 0)


async def test_tasks_without_a_callback_call_nobody(edge: Edge, bus: Bus) -> None:
    async with delivering(bus):
        made = await run_one(edge, bus, "")

        async def handled() -> bool:
            info = await bus.js.consumer_info(SPEC.stream, SPEC.durable)
            return info.num_pending == 0 and info.num_ack_pending == 0

        await until(handled)
    assert await told(bus, made)() is None
