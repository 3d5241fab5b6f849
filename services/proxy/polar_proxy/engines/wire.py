"""HTTP to an engine replica: errors by boundary, JSON answers, server-sent events parsed in bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson

from polar_common.errors import EngineBusy, EngineDown, EngineError, EngineOverflow, EngineRefused

from .http import Connections, Response

__all__ = ["Wire", "error_from", "events", "load", "logprobs_of", "token_ids"]

_REST_S = 5.0
"""How long a stream may stay open once the sample in it has ended."""
_LARGEST = 2**31 - 1

_OVERFLOW = re.compile(
    r"maximum context length|max_model_len|context window|longer than the model|exceeds? the (?:model'?s )?context"
    r"|input is too long|too many tokens|maximum allowed length",
    re.IGNORECASE,
)


def _message(body: bytes) -> str:
    """The engine's own words."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        inner = value.get(key) if isinstance(value, dict) else None
        if isinstance(inner, dict):
            inner = inner.get("message")
        if inner:
            return str(inner)[:2000]
    return body[:500].decode("utf-8", "replace")


def error_from(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> EngineError:
    """The error that an answer with this status means."""
    text = _message(body)
    after = (headers or {}).get("retry-after", "")
    seconds = float(after) if after.replace(".", "", 1).isdigit() else None
    if status in (429, 503):
        return EngineBusy(text or "the engine is busy", status, 1.0 if seconds is None else seconds)
    if 400 <= status < 500:
        return (EngineOverflow if _OVERFLOW.search(text) else EngineRefused)(text, status)
    return EngineDown(text or f"the engine answered {status}", status)


def load(body: bytes) -> Any:
    """JSON, with NaN and infinities where an engine writes them. Raises EngineDown for anything else."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EngineDown(f"the engine's answer isn't JSON: {error}") from error


def token_ids(told: Any) -> list[int]:
    """Ids as they are recorded: int32, none below 0. Raises ValueError for anything else."""
    if type(told) is not list:
        raise ValueError(f"ids that are {type(told).__name__}")
    if told and (set(map(type, told)) != {int} or min(told) < 0 or max(told) > _LARGEST):
        raise ValueError("ids that are none")
    return told


def logprobs_of(entries: list[Any], key: str | int) -> list[float | None]:
    """The log-probs in an answer's entries, None where an entry has none."""
    try:
        return [entry[key] for entry in entries]
    except (KeyError, TypeError, IndexError):
        return [_or_none(entry, key) for entry in entries]


def _or_none(entry: Any, key: str | int) -> Any:
    try:
        return entry[key]
    except (KeyError, TypeError, IndexError):
        return None


async def _within(response: Response, until: float) -> bytes:
    """More of a stream whose sample has ended; b"" where nothing comes any more."""
    try:
        async with asyncio.timeout_at(until):
            return await response.block()
    except TimeoutError:
        response.close()
        return b""


async def events(response: Response) -> AsyncIterator[list[bytes]]:
    """The data of server-sent events, all that one read completed at a time; `[DONE]` ends it.

    Lines may be cut anywhere. Raises EngineDown if the stream ends without `[DONE]`. Once the sample
    is over, what still comes isn't waited for much longer.
    """
    rest, until = b"", 0.0
    while block := await (_within(response, until) if until else response.block()):
        data = rest + block if rest else block
        cut = data.rfind(b"\n") + 1
        if not cut:
            rest = data
            continue
        rest = data[cut:]
        found = [line[5:].strip() for line in data[:cut].split(b"\n") if line.startswith(b"data:")]
        if found and found[-1] == b"[DONE]":
            if len(found) > 1:
                yield found[:-1]
            return
        if found:
            yield found
            if not until and response.over:
                until = asyncio.get_running_loop().time() + _REST_S
    if not (until and response.closed and asyncio.get_running_loop().time() >= until):
        raise EngineDown("the engine's stream ended before its end")


class Wire:
    """One engine replica's base URL."""

    def __init__(self, url: str, *, connect_s: float = 5.0, idle_s: float = 300.0, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._options: dict[str, Any] = {"connect_s": connect_s, "idle_s": idle_s, "token": token}
        self._made: Connections | None = None

    @property
    def _connections(self) -> Connections:
        if self._made is None:
            self._made = Connections(self.url, **self._options)
        return self._made

    async def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def release(self, response: Response, *, ending: bool = False) -> None:
        """Done with a response; one that isn't read to its end is aborted, unless it is `ending` by itself."""
        self._connections.release(response, ending=ending)

    async def post(self, path: str, body: bytes, headers: str = "") -> Response:
        """The response, its body unread. `headers`: further lines. Raises EngineError unless the status is 200."""
        response = await self._connections.request("POST", path, body, headers)
        if response.status == 200:
            return response
        try:
            raise error_from(response.status, await response.read(), response.headers)
        finally:
            self.release(response)

    async def ask(self, path: str, body: bytes, headers: str = "") -> Any:
        """The JSON of an answer. Raises EngineError."""
        response = await self.post(path, body, headers)
        try:
            return load(await response.read())
        finally:
            self.release(response)

    async def get(self, path: str, timeout: float = 5.0) -> tuple[int, Any]:
        """Status and JSON (None if it isn't JSON). Raises EngineDown if there is no answer."""
        try:
            async with asyncio.timeout(timeout):
                response = await self._connections.request("GET", path)
                try:
                    body = await response.read()
                finally:
                    self.release(response)
        except TimeoutError as error:
            raise EngineDown(f"no answer to {path} within {timeout} s") from error
        try:
            return response.status, orjson.loads(body)
        except orjson.JSONDecodeError:
            return response.status, None
