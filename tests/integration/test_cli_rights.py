"""Commands of a user who lacks the rights for them: they say so at once, and not after waiting for an answer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_kit import lived
from tests.conftest import own_nats

from polar_common.bus import Bus, client
from polar_common.connection import with_user
from polar_common.errors import Unavailable
from polar_common.events import SessionAccepted
from polar_common.nats_server import NatsServer
from polar_common.permissions import ADMIN, TOOLS, USERS, authorization, users
from polar_common.topology import Topology, apply

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]
PASSWORDS = {user: f"pw-{user}" for user in USERS}


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    """A log with users, in which a few sessions lived."""
    with own_nats(authorization=authorization(users(Topology()), PASSWORDS)) as server:
        asyncio.run(_lived(server))
        yield server


async def _lived(server: NatsServer) -> None:
    bus = await Bus.connect(with_user(server.url, ADMIN, PASSWORDS[ADMIN]), "test/admin")
    await apply(bus.js, Topology())
    await lived(bus, 1)
    await bus.close()


def said(server: NatsServer, user: str, *arguments: str, code: int) -> tuple[str, float]:
    """Standard error, on one line, and the seconds that the command took."""
    argv = [sys.executable, "-m", "polar_common.cli", *arguments]
    env = os.environ | {"POLAR_NATS": server.url, "POLAR_NATS_USER": user, "POLAR_NATS_PASSWORD": PASSWORDS[user]}
    began = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=100, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return " ".join(done.stderr.split()), time.monotonic() - began


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("build drop live", "$js.api.stream.purge.polar_traces"),
        ("log roll", "$js.api.stream.info.polar_events_s2"),
    ],
)
def test_who_may_not_is_told_at_once(guarded: NatsServer, command: str, what: str) -> None:
    plain = said(guarded, TOOLS, "build", "list", code=0)[1]
    text, seconds = said(guarded, TOOLS, *command.split(), code=2)
    assert "nats_user: the log forbids it to this user: " in text and what in text and "Traceback" not in text
    assert seconds < plain + 4, "that is less than any request waits for"


def test_who_may_is_not_hindered(guarded: NatsServer, tmp_path: Path) -> None:
    """Every command as the user that `polar up` gives it."""
    for command in (
        "verify", "dlq list", "ledger", "log segments", f"log export {tmp_path / 's1'}", "build list",
        "replay --build again --processes 0", "replay --build more --processes 1 --rules per_request",
        "build show again", "build diff live again", f"export {tmp_path / 't.jsonl'}",
    ):  # fmt: skip
        assert "forbids" not in said(guarded, TOOLS, *command.split(), code=0)[0]
    assert "forbids" not in said(guarded, ADMIN, "build", "drop", "nothing", code=2)[0]
    said(guarded, ADMIN, "build", "drop", "again", code=0)


async def test_a_publish_that_is_forbidden_is_told_as_that(
    guarded: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that are answered beside it spoke of a full disk."""
    monkeypatch.setattr(client, "_TRIES", 1)
    bus = await Bus.connect(with_user(guarded.url, TOOLS, PASSWORDS[TOOLS]), "test/tools")
    with pytest.raises(Unavailable, match=r"no answer to a publish on .*: permissions violation for publish"):
        await bus.once(SessionAccepted(session="s1-aaaaaaaaaaaaaaaaaaaa-9", attempt=0, index=0, work_class="local"))
    await bus.close()
