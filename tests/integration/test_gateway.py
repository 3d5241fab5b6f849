"""The gateway with a real log and the real local runtime: from `queued` to `artifacts`, and how attempts end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.keys import verify
from polar_common.packing import BlobRef
import gateway_kit as kit

pytestmark = pytest.mark.nats


async def body(bus: Bus, ref: BlobRef | None) -> str:
    assert ref is not None
    return (await Blobs(bus, "s1").get(ref)).decode()


async def test_a_session_runs_from_queued_to_artifacts(bus: Bus, tmp_path: Path) -> None:
    spec = kit.script(
        'printf "%s" "$POLAR_INSTRUCTION"; echo noise >&2; echo "$OPENAI_API_KEY" > key.txt; echo more >> given.txt',
        files={"given.txt": "given\n"},
        runtime={"prepare": [{"exec": "echo ready > prepared.txt"}]},
    )
    made = kit.settings(tmp_path)
    async with kit.gateway(bus, made) as gateway:
        session = await kit.release(bus, spec)
        state = await kit.over(bus, session)
    assert kit.names(state) == [
        "queued", "claimed", "initialized", "ready", "running", "sealed", "exited", "artifacts",
    ]  # fmt: skip
    attempt = state.attempts[1]
    assert attempt.exited is not None and attempt.artifacts is not None and attempt.claimed is not None
    assert (attempt.exited.exit_code, attempt.exited.fault, attempt.exited.timed_out) == (0, "none", False)
    assert (attempt.claimed.gateway, attempt.claimed.task) == ("g1", session.rpartition("-")[0])
    assert await body(bus, attempt.artifacts.answer) == "do it"
    assert "noise" in await body(bus, attempt.artifacts.log)
    patch = await body(bus, attempt.artifacts.patch)
    assert "+more" in patch and "prepared.txt" not in patch
    assert "[session key removed]" in patch
    assert gateway.live == {}
    assert os.listdir(made.root) == []


async def test_the_session_key_says_who_calls_and_for_how_long(bus: Bus, tmp_path: Path) -> None:
    out = tmp_path / "seen"
    out.mkdir()
    spec = kit.script(f"echo $OPENAI_API_KEY > {out}/key; echo $OPENAI_BASE_URL > {out}/url")
    async with kit.gateway(bus, kit.settings(tmp_path, gateway_isolation="none")):
        session = await kit.release(bus, spec)
        state = await kit.over(bus, session)
    key = verify((out / "key").read_text().strip(), {"k1": kit.SECRET.encode()})
    assert key is not None
    assert (key.session, key.attempt, key.run, key.model) == (session, 1, "run", "policy")
    claimed = state.attempts[1].claimed
    assert claimed is not None
    assert 0 <= key.expires - claimed.attempt_deadline.timestamp() <= 62
    assert (out / "url").read_text().strip().endswith(f"/s/{(out / 'key').read_text().strip()}/v1")
