"""A whole house whose gateway puts attempts into Docker containers, on a daemon of the tests' own."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from house_kit import Live, running_house

import runtime_docker
from polar_common.ids import new_id

__all__ = ["HELLO", "Dock", "dock_house", "ended", "held", "settled"]

# One model call with what busybox has.
ASK = """ask() {
    wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \\
        --post-data '{"model": "policy", "messages": [{"role": "user", "content": "Say it"}]}' \\
        "$OPENAI_BASE_URL/chat/completions" || exit 9
}
ask
"""
HELLO = 'test "$(cat hello.txt)" = hi'


@dataclass(frozen=True)
class Dock:
    """A house, its daemon and the daemon's directory and images."""

    live: Live
    host: str
    directory: Path
    busybox: str
    glibc: str

    @property
    def tmp(self) -> Path:
        return self.directory / "tmp"

    def run(self, *tasks: dict[str, Any], timeout: float = 400, code: int = 0) -> dict[str, dict[str, Any]]:
        """Summary rows by task, `shown` holding the first session; nothing of them may be left with the daemon."""
        run = f"run-{new_id()[:8]}"
        path = self.live.data.parent / f"{run}.yaml"
        path.write_text(yaml.safe_dump({"tasks": list(tasks)}))
        argv = ["run", str(path), "--run", run, "--timeout", str(timeout)]
        rows = {r["id"]: r for r in self.live.polar(*argv, code=code, timeout=timeout + 50)}
        for row in rows.values():
            row["shown"] = self.live.polar("session", "show", row["session_ids"][0])[0]
        assert self.left() == []
        return rows

    def left(self) -> list[str]:
        """Containers, once evaluations and removals had their time."""
        deadline = time.monotonic() + 30
        while self.containers() and time.monotonic() < deadline:
            time.sleep(0.2)
        return self.containers()

    def containers(self) -> list[str]:
        """All with an attempt's label; the daemon has no other user."""
        return runtime_docker.containers(self.host)

    def task(self, name: str, script: str, **fields: Any) -> dict[str, Any]:
        """A script in the busybox image that has called the model once."""
        runtime = {"kind": "docker", "image": self.busybox} | fields.pop("runtime", {})
        limits = {"attempt_s": 120, "session_s": 300} | fields.pop("limits", {})
        return {
            "id": name, "instruction": "x", "harness": {"name": "command", "args": {"script": ASK + script}},
            "runtime": runtime, "evaluator": {"kind": "command", "command": HELLO}, "limits": limits, **fields,
        }  # fmt: skip

    def works(self) -> None:
        """The next session finds nothing broken."""
        row = self.run(self.task("next", "echo hi > hello.txt"))["next"]
        assert row["outcomes"] == {"passed": 1}
        assert len(row["shown"]["attempts"]) == 1


@contextmanager
def dock_house(*settings: str) -> Iterator[Dock]:
    """The house, with more settings, and its daemon; temporary files of the house's processes go to `Dock.tmp`."""
    directory = Path(tempfile.mkdtemp(prefix="polar-dock-"))
    try:
        with runtime_docker.own_daemon(directory) as host, pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", host)
            (directory / "tmp").mkdir()
            patch.setenv("TMPDIR", str(directory / "tmp"))
            busybox, glibc = runtime_docker.busybox_image(host), runtime_docker.glibc_image(host)
            options = ["--model", "tiny"]
            for setting in ("POLAR_ENGINE_SCRIPT=file", *settings):
                options += ["--setting", setting]
            with running_house(directory / "house", *options) as live:
                yield Dock(live, host, directory, busybox, glibc)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def ended(row: dict[str, Any]) -> dict[str, Any]:
    """The only attempt of a row's session, whose one call is in a trace."""
    (attempt,) = row["shown"]["attempts"]
    assert (row["completions"], row["traces"], row["exact_share"]) == (1, 1, 1.0)
    return attempt


def held(dock: Dock) -> dict[str, Any]:
    """Everything that a session might leave."""
    client = docker.DockerClient(base_url=dock.host)
    try:
        api = client.api
        with_daemon = {
            "containers": len(api.containers(all=True)),
            "networks": len(api.networks()),
            "volumes": len(api.volumes()["Volumes"] or []),
        }
    finally:
        client.close()
    places = [dock.live.data / "run" / "attempts", dock.live.data / "run" / "evaluations"]
    left = [f"{place.name}/{name}" for place in places if place.is_dir() for name in os.listdir(place)]
    loops = [p for p in Path("/sys/block").glob("loop*/loop/backing_file") if str(dock.directory) in p.read_text()]
    mounts = [x for x in Path("/proc/self/mounts").read_text().splitlines() if str(dock.directory) in x]
    return {**with_daemon, "mounts": len(mounts), "loops": len(loops), "attempts": left, "files": _files(dock)}


def _files(dock: Dock) -> list[str]:
    return sorted(str(p.relative_to(dock.tmp)) for p in dock.tmp.rglob("*"))


def settled(dock: Dock, before: dict[str, Any]) -> dict[str, Any]:
    """What is held once removals had their time."""
    deadline = time.monotonic() + 60
    while (now := held(dock)) != before and time.monotonic() < deadline:
        time.sleep(1)
    return now
