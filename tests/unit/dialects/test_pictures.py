"""Pictures in every spelling a dialect has: bytes come out in one form, addresses stay, rubbish is refused by path."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from polar_common.errors import RequestError
from polar_proxy.dialects import BY_NAME
from polar_render.messages import Image

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n\xfb\xff\xbe").decode()
"""Its base64 has `+` and `/`, which the URL-safe alphabet spells otherwise."""
ADDRESS = "https://example.org/x.png"
KEPT = Image(mime="image/png", data=PNG)


def _data(mime: str, data: str) -> str:
    return f"data:{mime};base64,{data}"


def _chat(mime: str, data: str, url: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url or _data(mime, data)}}
    return "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": [part]}]}


def _anthropic(mime: str, data: str, url: str) -> tuple[str, dict[str, Any]]:
    source = {"type": "url", "url": url} if url else {"type": "base64", "media_type": mime, "data": data}
    content = [{"type": "image", "source": source}]
    return "/v1/messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}


def _responses(mime: str, data: str, url: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "input_image", "image_url": url or _data(mime, data)}
    return "/v1/responses", {"model": "m", "input": [{"type": "message", "role": "user", "content": [part]}]}


def _google(mime: str, data: str, url: str) -> tuple[str, dict[str, Any]]:
    media = {"fileData": {"fileUri": url}} if url else {"inlineData": {"mimeType": mime, "data": data}}
    return "/v1beta/models/g:generateContent", {"contents": [{"role": "user", "parts": [media]}]}


BODIES: dict[str, Callable[[str, str, str], tuple[str, dict[str, Any]]]] = {
    "openai_chat": _chat, "anthropic": _anthropic, "openai_responses": _responses, "google": _google,
}  # fmt: skip


def picture(name: str, mime: str = "image/png", data: str = PNG, url: str = "") -> Image:
    """The one picture of a request in this dialect."""
    path, body = BODIES[name](mime, data, url)
    dialect = BY_NAME[name]
    route = dialect.route("POST", path, {}, {})
    assert route is not None
    (message,) = dialect.parse(route, {}, orjson.dumps(body)).messages
    (part,) = message.parts
    assert isinstance(part, Image)
    return part


@pytest.mark.parametrize("name", BODIES)
def test_bytes_are_one_picture_however_they_are_spelt(name: str) -> None:
    url_safe = PNG.replace("+", "-").replace("/", "_")
    assert url_safe != PNG
    for data in (PNG, PNG.rstrip("="), url_safe):
        assert picture(name, data=data) == KEPT
    assert picture(name, mime="IMAGE/PNG; x=y" if name != "google" else "image/png") == KEPT


@pytest.mark.parametrize("name", BODIES)
def test_bytes_are_checked_without_being_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large picture is decoded once, where it is stored."""
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(30_000)).decode()
    lengths: list[int] = []
    decode = base64.b64decode
    monkeypatch.setattr(base64, "b64decode", lambda *a, **k: (lengths.append(len(a[0])), decode(*a, **k))[1])
    monkeypatch.setattr(base64, "b64encode", lambda *_: pytest.fail("encoded again"))
    assert picture(name, data=data) == Image(mime="image/png", data=data)
    assert max(lengths, default=0) < 100


@pytest.mark.parametrize("name", BODIES)
def test_an_address_stays_an_address(name: str) -> None:
    assert picture(name, url=ADDRESS) == Image(url=ADDRESS)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("data", ["", "no base64!", "a"])
def test_what_is_no_base64_is_refused_by_its_path(name: str, data: str) -> None:
    with pytest.raises(RequestError) as caught:
        picture(name, data=data)
    assert caught.value.status == 400 and caught.value.path


@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_picture_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="takes images"):
        picture(name, mime="text/html")


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.org/x.png", "/etc/passwd"])
def test_what_is_no_web_address_is_refused(name: str, url: str) -> None:
    with pytest.raises(RequestError, match="must be a data URL or an http address"):
        picture(name, url=url)


def test_a_media_type_that_is_missing_is_read_from_the_bytes() -> None:
    assert picture("google", mime="") == KEPT
    with pytest.raises(RequestError):
        picture("google", mime="", data=base64.b64encode(b"hello").decode())
