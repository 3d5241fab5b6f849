"""HTTP to an engine: one connection pool per replica, errors by boundary, server-sent events parsed in bytes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson

from polar_common.errors import EngineBusy, EngineDown, EngineError, EngineOverflow, EngineRefused

__all__ = ["Wire", "error_from", "events"]

_OVERFLOW = re.compile(
    r"maximum context length|max_model_len|context window|longer than the model|exceeds? the (?:model'?s )?context"
    r"|input is too long|too many tokens|maximum allowed length",
    re.IGNORECASE,
)
_JSON = {"content-type": "application/json"}


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


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """The data of server-sent events, all that one read completed at a time; `[DONE]` ends it.

    Lines may be cut anywhere. Raises EngineDown if the stream ends without `[DONE]`.
    """
    rest = b""
    try:
        async for block in response.content.iter_any():
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
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineDown(f"the engine's stream broke: {error!r}") from error
    raise EngineDown("the engine's stream ended before its end")


class Wire:
    """One engine replica's base URL."""

    def __init__(self, url: str, *, connect_s: float = 5.0, idle_s: float = 300.0, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_read=idle_s)
        self._headers = {**_JSON, **({"authorization": f"Bearer {token}"} if token else {})}
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Made on first use: it belongs to the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=300)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                auto_decompress=False,
                skip_auto_headers=("user-agent", "accept-encoding", "accept"),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=1 << 20,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        """The response, its body unread. Raises EngineError unless the status is 200."""
        try:
            response = await self.session.post(self.url + path, data=body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineDown(f"the engine can't be reached: {error!r}") from error
        if response.status == 200:
            return response
        try:
            raise error_from(response.status, await response.read(), response.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineDown(f"the engine's answer broke off: {error!r}") from error
        finally:
            response.release()

    async def ask(self, path: str, body: bytes) -> Any:
        """The JSON of an answer. Raises EngineError."""
        response = await self.post(path, body)
        try:
            return orjson.loads(await response.read())
        except orjson.JSONDecodeError as error:
            raise EngineDown(f"the engine's answer isn't JSON: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineDown(f"the engine's answer broke off: {error!r}") from error
        finally:
            response.release()

    async def get(self, path: str, timeout: float = 5.0) -> tuple[int, Any]:
        """Status and JSON (None if it isn't JSON). Raises EngineDown if there is no answer."""
        try:
            async with self.session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
                body = await response.read()
                try:
                    return response.status, orjson.loads(body)
                except orjson.JSONDecodeError:
                    return response.status, None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineDown(f"the engine can't be reached: {error!r}") from error
