"""Errors on their way to a harness: by status, or inside a stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import orjson
import pytest

from polar_common.errors import EngineBusy, EngineDown, EngineOverflow, PolarError
from polar_proxy.dialects import BY_NAME
from polar_proxy.dialects.base import ChatRequest, Dialect, Hints, Minted, Usage
from polar_proxy.exchange import Exchange
from polar_proxy.headers import stream_headers, whole_headers
from polar_proxy.refusal import tell
from polar_render.base import TextDelta
from polar_render.messages import Message, Text

RESPONSES: Dialect = BY_NAME["openai_responses"]
REQUEST = ChatRequest("openai_responses", "m", (Message("user", (Text("Go"),)),), stream=True)
CODEX = replace(REQUEST, hints=Hints(errors_in_stream=True))


class Wire:
    """An exchange that keeps what it is given."""

    def __init__(self, *, started: bool = False) -> None:
        self.started = started
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.started, self.status, self.headers = True, status, headers

    async def send(self, data: bytes, *, more: bool = True) -> None:
        assert not self.ended
        self.body += data
        self.ended = not more

    async def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        await self.start(status, headers)
        await self.send(body, more=False)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        blocks = [b.split("\n") for b in self.body.decode().split("\n\n") if b]
        return [(name[7:], orjson.loads(data[6:])) for name, data in blocks]


async def told(error: PolarError, request: ChatRequest | None, wire: Wire | None = None, **extra: Any) -> Wire:
    wire = wire or Wire()
    await tell(cast(Exchange, wire), RESPONSES, error, request, **extra)
    assert wire.ended
    return wire


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineBusy("busy", 429, 3.0), "rate_limit_exceeded"),
        (EngineOverflow("8192 tokens allowed, 9000 asked for", 400), "context_length_exceeded"),
    ],
)
async def test_a_client_that_gives_up_on_a_status_is_told_in_a_stream(error: PolarError, code: str) -> None:
    wire = await told(error, CODEX)
    assert (wire.status, wire.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert [name for name, _ in wire.events()] == ["response.created", "response.in_progress", "response.failed"]
    assert wire.events()[-1][1]["response"]["error"]["code"] == code


@pytest.mark.parametrize(
    ("error", "request_", "status"),
    [
        (EngineBusy("busy", 429, 3.0), REQUEST, 429),
        (EngineBusy("busy", 429, 3.0), replace(CODEX, stream=False), 429),
        (EngineBusy("busy", 429, 3.0), None, 429),
        (EngineDown("gone", 500), CODEX, 500),
    ],
)
async def test_else_the_status_says_it(error: PolarError, request_: ChatRequest | None, status: int) -> None:
    wire = await told(error, request_)
    assert wire.status == status
    assert orjson.loads(wire.body)["error"]["message"]
    assert wire.headers.get("retry-after") == ("3" if status == 429 else None)


async def test_an_error_in_a_stream_goes_on_with_its_numbers() -> None:
    encoder = RESPONSES.encoder(REQUEST, [Minted("c1", 1)])
    wire = Wire(started=True)
    wire.body = b"".join(f.data for f in [*encoder.start(Usage(1)), *encoder.feed(TextDelta("half"))])
    await told(EngineDown("gone"), REQUEST, wire, begun=encoder)
    numbers = [data["sequence_number"] for _, data in wire.events()]
    assert numbers == list(range(len(numbers)))
    assert wire.events()[-1][0] == "response.failed"


async def test_a_whole_answer_that_has_begun_is_only_ended() -> None:
    assert (await told(EngineDown("gone"), REQUEST, Wire(started=True))).body == b""


def test_a_stream_without_events_is_json_and_answers_are_named() -> None:
    assert stream_headers(replace(REQUEST, sse=False), "c1")["content-type"] == "application/json"
    streamed = stream_headers(REQUEST, "c1")
    assert streamed["content-type"].startswith("text/event-stream")
    # Qwen Code tries a broken stream again only where the answer had a request id.
    assert streamed["x-request-id"] == streamed["request-id"] == whole_headers("c1")["x-request-id"] == "c1"
