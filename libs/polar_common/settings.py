"""Settings that every service shares. Environment: `POLAR_*`; `POLAR_DATA/house.json` is written by `polar up`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from .ids import FIRST_SEGMENT

__all__ = ["HouseSettings", "TlsSettings", "cache_dir", "docker_host", "inherited_environment", "known_settings"]


class TlsSettings(BaseSettings):
    """Certificates of connections to NATS, files in PEM. A server that asks for TLS has the URL scheme `tls`."""

    model_config = SettingsConfigDict(env_prefix="POLAR_", extra="ignore")

    nats_tls_ca: Path | None = None
    """Certificate authority of the server; by default the system's."""
    nats_tls_cert: Path | None = None
    """The client's own certificate, where the server wants one."""
    nats_tls_key: Path | None = None


class HouseSettings(TlsSettings):
    """Where the house is and how to talk to it. Services subclass this with their own fields."""

    model_config = SettingsConfigDict(env_prefix="POLAR_", extra="ignore")

    data: Path = Path(".polar")
    """The house's directory: nats, chdb, secrets, logs, run."""
    nats: str = "nats://127.0.0.1:4222"
    nats_user: str = ""
    nats_password: SecretStr = SecretStr("")
    segment: str = FIRST_SEGMENT
    """The open log segment, into which new tasks go."""
    replicas: int = 1
    """Copies of each stream; 3 on a cluster."""
    work_classes: tuple[str, ...] = ("local", "docker")
    build: str = "live"
    """Name of the build that is made as sessions end."""
    secret: SecretStr = SecretStr("")
    """HMAC key of session keys; made by `polar up`, shared by gateway and proxy."""
    token: SecretStr = SecretStr("")
    """Bearer token of ingest and analytics; empty means none is asked for (loopback only)."""
    instance: str = ""
    """Name of this instance in events and logs; by default host and process id."""
    ready_file: Path | None = None
    """Written (JSON: port, pid) when the service is ready."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port, told in `ready_file`."""
    log_level: str = "info"


class _Cache(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="POLAR_", extra="ignore")

    cache: Path = Field(default_factory=lambda: Path.home() / ".cache" / "polar")


def cache_dir() -> Path:
    """Where models and harness toolchains are kept: `$POLAR_CACHE`, else `~/.cache/polar`."""
    return _Cache().cache.expanduser().absolute()


def inherited_environment() -> dict[str, str]:
    """This process's environment, for children; thread pools of numeric libraries are kept to one thread each."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}


def docker_host() -> str:
    """Address of the Docker daemon: `$DOCKER_HOST`, else the usual socket."""
    found = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    return found.removeprefix("http+")


def known_settings() -> set[str]:
    """The names of all settings in the environment: those of this installation's services, and the house's own."""
    for service in entry_points(group="polar.services"):
        importlib.import_module(f"{service.module.rpartition('.')[0]}.settings")
    return {f"{s.model_config['env_prefix']}{name}".upper() for s in _below(BaseSettings) for name in s.model_fields}


def _below(kind: type[BaseSettings]) -> Iterator[type[BaseSettings]]:
    for one in kind.__subclasses__():
        if one.model_config.get("env_prefix", "").startswith("POLAR_"):
            yield one
        yield from _below(one)
