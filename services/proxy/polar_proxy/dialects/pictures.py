"""Pictures in requests, whatever their spelling: bytes in the request, `data:` URLs, addresses.

Bytes are checked and brought into standard base64 here, where the path of the field is still known; they are decoded
where they are stored. Nothing is ever fetched; an address stays one.
"""

from __future__ import annotations

import base64
from urllib.parse import unquote_to_bytes

from polar_proxy.dialects import fields as f
from polar_render.messages import Image

__all__ = ["inline", "located"]

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"BM", "image/bmp"),
)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BLANK = b" \r\n\t="
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BEGINNING = 24
"""Characters of base64 that hold all of `_MAGIC`."""
_SCHEMES = ("http://", "https://", "gs://")


def inline(mime: str, data: str, path: str, detail: str = "") -> Image:
    """A picture that came as base64, of either alphabet, padded or not. `path` names the field.

    Raises RequestError where it isn't base64, is empty, or isn't called an image.
    """
    plain = data.encode("ascii", "replace").translate(_URL_SAFE, _BLANK)
    if len(plain) % 4 == 1 or plain.translate(None, _ALPHABET):
        raise f.bad(path, "isn't valid base64")
    plain += b"=" * (-len(plain) % 4)
    kind = _kind(mime, base64.b64decode(plain[:_BEGINNING]), path)
    return Image(mime=kind, data=plain.decode(), detail=detail)


def _kind(mime: str, begin: bytes, path: str) -> str:
    """The media type of a picture whose bytes begin so."""
    kind = mime.partition(";")[0].strip().lower()
    if not begin:
        raise f.bad(path, "holds an empty picture")
    if kind in ("", "application/octet-stream"):
        kind = next((name for magic, name in _MAGIC if begin.startswith(magic)), "")
    if not kind.startswith("image/"):
        raise f.bad(path, f"this model takes images, not {mime or 'something without a media type'!r}")
    return kind


def located(url: str, path: str, detail: str = "", mime: str = "") -> Image:
    """A picture by its URL; `data:` URLs are taken apart. Raises RequestError for what is no picture's address."""
    if url[:5].lower() == "data:":
        head, comma, data = url[5:].partition(",")
        if not comma:
            raise f.bad(path, "is a data URL without a comma")
        if head.lower().endswith(";base64"):
            return inline(head[:-7], data, path, detail)
        content = unquote_to_bytes(data)
        return Image(mime=_kind(head, content, path), data=base64.b64encode(content).decode(), detail=detail)
    if not url.lower().startswith(_SCHEMES):
        raise f.bad(path, "must be a data URL or an http address")
    return Image(mime=mime, url=url, detail=detail)
