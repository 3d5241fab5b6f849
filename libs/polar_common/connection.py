"""How a client of the log connects: its user, the inbox that only it may hear, and TLS. Used by `Bus` and `Service`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from .errors import ConfigError
from .permissions import inbox_prefix
from .settings import TlsSettings

__all__ = ["Connection", "connection", "with_user"]


@dataclass(frozen=True, slots=True)
class Connection:
    """`servers` are free of secrets. `tls`: None for a plain connection."""

    servers: tuple[str, ...]
    user: str
    password: str
    tls: ssl.SSLContext | None

    @property
    def url(self) -> str:
        """For people."""
        return ",".join(self.servers)

    @property
    def inbox(self) -> str:
        """Prefix of reply subjects."""
        return inbox_prefix(self.user)

    def options(self) -> dict[str, Any]:
        """For `nats.connect`."""
        found: dict[str, Any] = {"servers": list(self.servers), "inbox_prefix": self.inbox.encode()}
        if self.user:
            found |= {"user": self.user, "password": self.password}
        if self.tls is not None:
            found["tls"] = self.tls
        return found


def connection(url: str, user: str = "", password: str = "", tls: TlsSettings | None = None) -> Connection:
    """From a URL (of a cluster: several, with commas), which may hold user and password; explicit ones go before.

    `tls://` asks for an encrypted connection; so does a certificate authority in the settings. Raises ConfigError for
    files that can't be read.
    """
    parts = [urlsplit(one.strip()) for one in url.split(",") if one.strip()]
    if not parts:
        raise ConfigError("no server is named", "nats")
    servers = tuple(urlunsplit((p.scheme, p.netloc.rpartition("@")[2], p.path, p.query, "")) for p in parts)
    settings = tls or TlsSettings()
    wanted = any(p.scheme == "tls" for p in parts) or settings.nats_tls_ca is not None
    return Connection(
        servers,
        user or unquote(parts[0].username or ""),
        password or unquote(parts[0].password or ""),
        _context(settings) if wanted else None,
    )


def with_user(url: str, user: str, password: str) -> str:
    """A URL that says who connects: what commands get from the house's directory."""
    if not user:
        return url
    first, *others = url.split(",")
    scheme, _, host = first.partition("://")
    return ",".join((f"{scheme}://{quote(user)}:{quote(password, safe='')}@{host}", *others))


def _context(settings: TlsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(settings.nats_tls_ca) if settings.nats_tls_ca else None)
        if settings.nats_tls_cert is not None:
            context.load_cert_chain(settings.nats_tls_cert, settings.nats_tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"a certificate can't be used: {error}", "nats_tls") from error
    return context
