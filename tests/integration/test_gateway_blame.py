"""On whose side an end was where something else happens at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gateway_kit as kit
import pytest

from polar_common.bus import Bus
from polar_common.errors import RuntimeFault, RuntimeUnavailable
from polar_common.events import CompletionRejected, SessionCancelled, SessionLost, SessionReady
from polar_common.session_state import SessionState
from polar_common.task_spec import HarnessSpec
from polar_gateway import attempt
from polar_gateway.house import House
from polar_gateway.ledger import SessionLedger, Superseded
from polar_runtime import Runtime
from polar_runtime.local import LocalRuntime

pytestmark = pytest.mark.nats


class NoUpload(LocalRuntime):
    """Its daemon dies under the task's files."""

    async def upload(self, data: bytes | Mapping[str, bytes], dest: str | None = None) -> None:
        if isinstance(data, bytes):
            raise RuntimeUnavailable("gone")
        await super().upload(data, dest)


class NoDownload(LocalRuntime):
    """It dies under the harness's folders."""

    async def download(self, paths: Sequence[str], *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        raise RuntimeUnavailable("gone")


class Damaged(LocalRuntime):
    """The sandbox itself fails under the harness."""

    error: RuntimeFault = RuntimeFault("damaged")

    async def exec(self, argv: Sequence[str], **options: object) -> object:  # type: ignore[override]
        raise self.error


class Away(Damaged):
    error = RuntimeUnavailable("gone")


class NeverKilled(LocalRuntime):
    """Nothing is ended by a cancel."""

    async def cancel(self) -> None:
        return


async def ended(bus: Bus, tmp_path: Path, made: type[Runtime]) -> SessionState:
    def adapt(house: House) -> None:
        house.make_runtime = made

    skilled = HarnessSpec(name="tests.integration.gateway_kit:Skilled", args={"skills": ["skill"]})
    task = kit.script("true", files={"skill/SKILL.md": "read it\n"}).model_copy(update={"harness": skilled})
    async with kit.gateway(bus, kit.settings(tmp_path), adapt=adapt):
        return await kit.over(bus, await kit.release(bus, task))


@pytest.mark.parametrize("made", [NoUpload, NoDownload, Away])
async def test_a_host_that_breaks_off_is_never_the_tasks_fault(bus: Bus, tmp_path: Path, made: type[Runtime]) -> None:
    exited = (await ended(bus, tmp_path, made)).attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause, exited.detail) == ("infra", "daemon", "gone")


async def test_a_sandbox_that_breaks_under_the_harness_isnt_the_hosts(bus: Bus, tmp_path: Path) -> None:
    exited = (await ended(bus, tmp_path, Damaged)).attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause, exited.detail) == ("harness", "environment_broken", "damaged")


async def test_what_cant_be_killed_is_let_go_of(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_KILL_S", 0.6)

    def adapt(house: House) -> None:
        house.make_runtime = NeverKilled

    async with kit.gateway(bus, kit.settings(tmp_path), adapt=adapt) as gateway:
        session = await kit.release(bus, kit.script("sleep 300"))
        await kit.phase(bus, session, "running")
        await kit.cancel(bus, session)
        state = await kit.over(bus, session)
        assert await kit.idle(gateway)
    exited = state.attempts[1].exited
    assert exited is not None and (exited.cancelled, exited.exit_code) == (True, None)


async def test_a_limit_that_was_reached_counts_though_another_call_ended_later(bus: Bus, tmp_path: Path) -> None:
    async with kit.gateway(bus, kit.settings(tmp_path)):
        session = await kit.release(bus, kit.script("while ! test -e go; do sleep 0.05; done; exit 1"))
        await kit.phase(bus, session, "running")
        refused = CompletionRejected(
            session=session, attempt=1, completion="c1", dialect="openai-chat", status=403, reason="calls_limit",
            detail="this session's limit of 3 calls is used up",
        )  # fmt: skip
        await bus.once(refused)
        await kit.completion(bus, session, name="c2")
        (tmp_path / "run" / "attempts" / f"{session}.1" / "work" / "go").touch()
        exited = (await kit.over(bus, session)).attempts[1].exited
    assert exited is not None
    assert (exited.fault, exited.cause, exited.detail) == ("agent", "limit", refused.detail)


@pytest.mark.parametrize("how", ["ended", "lost"])
async def test_nothing_is_written_to_what_somebody_else_ended(bus: Bus, how: str) -> None:
    session = await kit.release(bus, kit.script("true"))
    ledger = SessionLedger(bus, session, 1)
    at = (await ledger.load()).last_seq
    lost = SessionLost(session=session, attempt=1)
    cancelled = SessionCancelled(session=session, attempt=0, last_attempt=1)
    await bus.transition(lost if how == "lost" else cancelled, at)
    with pytest.raises(Superseded):
        await ledger.publish(SessionReady(session=session, attempt=1))
    assert (await kit.load(bus, session)).attempts[1].ready is None
