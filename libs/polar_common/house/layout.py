"""The directory of a house (`$POLAR_DATA`, default `./.polar`) and the file that tells clients where it is."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from polar_common.connection import with_user
from polar_common.errors import ConfigError
from polar_common.permissions import TOOLS

__all__ = ["Endpoint", "House", "HouseFile", "find_house", "nats_secret", "process_started"]


class HouseFile(BaseModel):
    """`house.json`: written when everything is ready, removed at the end. URLs without a trailing slash."""

    model_config = ConfigDict(extra="ignore")

    pid: int
    started: int
    """Start time of that process in clock ticks since boot: pid and start time together name a process."""
    nats: str
    nats_users: bool = False
    """The log knows users; their passwords are among the secrets."""
    ingest: str
    proxy: str
    analytics: str = ""
    engine: str = ""
    model: str = ""
    segment: str = "s1"
    build: str = "live"


class _ClientSettings(BaseSettings):
    """How a client finds its house: `POLAR_URL` and `POLAR_NATS` for a remote one, else the data directory's file."""

    model_config = SettingsConfigDict(env_prefix="POLAR_", extra="ignore")

    data: Path = Path(".polar")
    url: str = ""
    nats: str = ""
    nats_user: str = ""
    nats_password: SecretStr = SecretStr("")
    analytics_url: str = ""
    proxy_url: str = ""
    token: SecretStr = SecretStr("")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where clients talk to."""

    ingest: str
    analytics: str
    proxy: str
    nats: str
    """With user and password, where the log wants them: show it to nobody."""
    token: str
    data: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def nats_secret(user: str) -> str:
    """The secret that holds a NATS user's password."""
    return f"nats-{user}"


def process_started(pid: int) -> int:
    """Start time of a live process in clock ticks; 0 if there is none (or it is a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])


class House:
    """Paths of a house."""

    def __init__(self, data: Path) -> None:
        self.data = data.absolute()
        self.nats = self.data / "nats"
        self.chdb = self.data / "chdb"
        self.secrets = self.data / "secrets"
        self.logs = self.data / "logs"
        self.run = self.data / "run"
        self.file = self.data / "house.json"
        self.lock = self.data / "lock"

    def make(self) -> None:
        """Create the directories. Raises ConfigError if that's not allowed."""
        try:
            for path in (self.data, self.nats, self.chdb, self.secrets, self.logs, self.run):
                path.mkdir(parents=True, exist_ok=True)
            self.secrets.chmod(0o700)
            probe = self.run / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"{self.data} can't be written ({error.strerror}): choose another --data", "data"
            ) from error

    def secret(self, name: str) -> str:
        """A random secret of the house, made at its first use; mode 0600."""
        path = self.secrets / name
        if not path.exists():
            draft = path.with_suffix(".new")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32))
            draft.rename(path)
        return path.read_text().strip()

    def read(self) -> HouseFile | None:
        """The house file if its process lives, else None."""
        try:
            found = HouseFile.model_validate(orjson.loads(self.file.read_bytes()))
        except (OSError, orjson.JSONDecodeError, ValidationError):
            return None
        return found if process_started(found.pid) == found.started else None

    def write(self, content: HouseFile) -> None:
        draft = self.file.with_suffix(".tmp")
        draft.write_bytes(orjson.dumps(content.model_dump(), option=orjson.OPT_INDENT_2))
        draft.rename(self.file)

    def forget(self) -> None:
        with suppress(FileNotFoundError):
            self.file.unlink()


def find_house(data: Path | None = None, user: str = TOOLS) -> Endpoint:
    """The house to talk to, its log as NATS user `user`. Raises ConfigError with what to do if there is none."""
    settings = _ClientSettings()
    token = settings.token.get_secret_value()
    house = House(data or settings.data)
    if (settings.url or settings.nats) and data is None:
        return Endpoint(
            settings.url.rstrip("/"),
            settings.analytics_url.rstrip("/"),
            settings.proxy_url.rstrip("/"),
            with_user(settings.nats, settings.nats_user, settings.nats_password.get_secret_value()),
            token,
            house.data,
        )
    found = house.read()
    if found is None:
        raise ConfigError(f"no house runs on {house.data}: start one with `polar up`, or set POLAR_URL", "house")
    with suppress(OSError):
        token = token or (house.secrets / "token").read_text().strip()
    log = with_user(found.nats, user, house.secret(nats_secret(user))) if found.nats_users else found.nats
    return Endpoint(found.ingest, found.analytics, found.proxy, log, token, house.data)
