"""Pictures in requests, whatever their spelling: bytes in the request, `data:` URLs, addresses.

Bytes are checked and brought into standard base64 here, where the path of the field is still known. Nothing is ever
fetched; an address stays one.
"""

from __future__ import annotations

import base64
import binascii
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
_URL_SAFE = str.maketrans("-_", "+/", " \r\n\t=")
_SCHEMES = ("http://", "https://", "gs://")


def inline(mime: str, data: str, path: str, detail: str = "") -> Image:
    """A picture that came as base64, of either alphabet, padded or not. `path` names the field.

    Raises RequestError where it isn't base64, is empty, or isn't called an image.
    """
    plain = data.translate(_URL_SAFE)
    try:
        content = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise f.bad(path, "isn't valid base64") from None
    return _named(mime, content, path, detail)


def _named(mime: str, content: bytes, path: str, detail: str) -> Image:
    kind = mime.partition(";")[0].strip().lower()
    if not content:
        raise f.bad(path, "holds an empty picture")
    if kind in ("", "application/octet-stream"):
        kind = next((name for begin, name in _MAGIC if content.startswith(begin)), "")
    if not kind.startswith("image/"):
        raise f.bad(path, f"this model takes images, not {mime or 'something without a media type'!r}")
    return Image(mime=kind, data=base64.b64encode(content).decode(), detail=detail)


def located(url: str, path: str, detail: str = "", mime: str = "") -> Image:
    """A picture by its URL; `data:` URLs are taken apart. Raises RequestError for what is no picture's address."""
    if url[:5].lower() == "data:":
        head, comma, data = url[5:].partition(",")
        if not comma:
            raise f.bad(path, "is a data URL without a comma")
        if head.lower().endswith(";base64"):
            return inline(head[:-7], data, path, detail)
        return _named(head, unquote_to_bytes(data), path, detail)
    if not url.lower().startswith(_SCHEMES):
        raise f.bad(path, "must be a data URL or an http address")
    return Image(mime=mime, url=url, detail=detail)
