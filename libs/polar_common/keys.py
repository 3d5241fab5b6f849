"""Session keys: what a harness shows the proxy as its API key and in the path `/s/<key>`.

`<key id>.<payload>.<mac>` in base64url; the payload is JSON with short names. HMAC-SHA256 under one of the house's
secrets, named by its key id, so that secrets can rotate. No lookup is needed to check one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .task_spec import SamplingSpec

__all__ = ["SessionKey", "sign", "verify"]


class SessionKey(BaseModel):
    """What the proxy knows of a caller. `expires` in Unix seconds: the attempt's deadline plus a grace."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    session: Annotated[str, Field(alias="s")]
    task: Annotated[str, Field(alias="t")]
    run: Annotated[str, Field(alias="r")]
    attempt: Annotated[int, Field(alias="a", ge=1)]
    model: Annotated[str, Field(alias="m")]
    expires: Annotated[int, Field(alias="e")]
    calls: Annotated[int, Field(alias="c")] = 500
    max_tokens_per_call: Annotated[int | None, Field(alias="x")] = None
    total_tokens: Annotated[int | None, Field(alias="y")] = None
    sampling: Annotated[SamplingSpec, Field(alias="p")] = SamplingSpec()


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _mac(secret: bytes, payload: str) -> str:
    return _b64(hmac.digest(secret, payload.encode(), hashlib.sha256)[:20])


def sign(key: SessionKey, secret: bytes, key_id: str = "k1") -> str:
    """The token: `<key id>.<payload>.<mac>`, URL-safe."""
    body = key.model_dump_json(by_alias=True, exclude_defaults=True).encode()
    payload = f"{key_id}.{_b64(body)}"
    return f"{payload}.{_mac(secret, payload)}"


def verify(token: str, secrets: Mapping[str, bytes], now: float | None = None) -> SessionKey | None:
    """The key, or None if it's malformed, signed by nobody we know, or expired."""
    payload, _, mac = token.rpartition(".")
    key_id, _, body = payload.partition(".")
    secret = secrets.get(key_id)
    if secret is None or not hmac.compare_digest(mac, _mac(secret, payload)):
        return None
    try:
        key = SessionKey.model_validate_json(_unb64(body))
    except (ValidationError, binascii.Error, ValueError):
        return None
    return key if key.expires > (time.time() if now is None else now) else None
