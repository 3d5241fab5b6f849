"""What remains when a gateway, a container or a daemon dies: found by label, and removed."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from runtime_kit import HEARTBEAT, LIMITS, begun, sh, soon

import runtime_docker
from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_common.tasks import spawn
from polar_runtime import RuntimeSpec, make_runtime, procs, reap
from polar_runtime.base import host_name

# Starts an attempt, says so when its command runs, and waits to be killed.
_GATEWAY = """
import asyncio, json, sys
from pathlib import Path
from typing import Literal
from polar_runtime import RuntimeSpec, make_runtime
async def main():
    spec = RuntimeSpec(root=Path(sys.argv[2]), network="none", **json.loads(sys.argv[1]))
    rt = make_runtime(spec)
    await rt.start()
    def told(stream, data):
        print("running", flush=True)
    script = "trap '' TERM; (setsid sh -c 'trap \\"\\" TERM; sleep 1000' &) ; echo go; sleep 1000"
    await rt.exec(["/bin/sh", "-c", script], on_output=told)
asyncio.run(main())
"""


def killed_gateway(root: Path, **spec: object) -> None:
    """A gateway process that is killed in the middle of an attempt."""
    with subprocess.Popen(
        [sys.executable, "-c", _GATEWAY, json.dumps(spec), str(root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGKILL)


async def dead(_label: str) -> bool:
    return False


async def alive(_label: str) -> bool:
    return True


_KINDS = [("bubblewrap", "on"), ("bubblewrap", "off"), ("none", "on"), ("none", "off")]


@pytest.mark.parametrize(("isolation", "groups"), _KINDS)
async def test_a_killed_gateways_attempt_is_reaped(isolation: str, groups: str, tmp_path: Path) -> None:
    label = f"reap-{isolation}-{groups}.1"
    killed_gateway(tmp_path, kind="local", label=label, isolation=isolation, options={"cgroup": groups})
    variable = f"POLAR_ATTEMPT={host_name(tmp_path, label)}".encode()
    assert await reap(tmp_path, alive) == []
    assert (tmp_path / label / "owner.json").exists()
    owner = json.loads((tmp_path / label / "owner.json").read_text())
    assert await reap(tmp_path, dead) == [label]
    assert list(tmp_path.iterdir()) == []
    assert await soon(lambda: procs.labelled(variable) == [])
    assert not [path for path in owner["groups"] if Path(path).exists()]
    assert await reap(tmp_path, dead) == []


@pytest.mark.parametrize(("isolation", "groups"), _KINDS)
@pytest.mark.parametrize("how", ["stopped", "reaped"])
async def test_another_houses_attempt_of_the_same_name_is_left_alone(
    isolation: Literal["bubblewrap", "none"], groups: str, how: str, tmp_path: Path
) -> None:
    """Two houses on one host, a task of one run's name in each."""
    here, there = tmp_path / "here", tmp_path / "there"

    def spec(root: Path) -> RuntimeSpec:
        return RuntimeSpec("local", "same.1", root, isolation=isolation, options={"cgroup": groups})

    async with make_runtime(spec(there)) as other:
        task = spawn(sh(other, HEARTBEAT.format("beat")), name="exec")
        assert await begun(other, "beat")
        if how == "reaped":
            killed_gateway(here, kind="local", label="same.1", isolation=isolation, options={"cgroup": groups})
            assert await reap(here, dead) == ["same.1"]
        else:
            async with make_runtime(spec(here)) as one:
                await sh(one, "true")
        assert not (await asyncio.wait({task}, timeout=0.5))[0]
        assert await begun(other, "beat")
        await other.cancel()
        await task


@pytest.mark.parametrize("groups", ["on", "off"])
@pytest.mark.parametrize("how", ["stopped", "reaped"])
async def test_what_outlives_its_relay_ends_with_the_attempt(tmp_path: Path, how: str, groups: str) -> None:
    """Where no namespace holds it, and nobody's child is it any more: it is known by its environment."""
    options = {"cgroup": groups}
    rt = make_runtime(RuntimeSpec("local", "s.1", tmp_path, network="none", isolation="none", options=options))
    await rt.start()
    variable = f"POLAR_ATTEMPT={host_name(tmp_path, 's.1')}".encode()
    await sh(rt, "(setsid sleep 1000 >/dev/null 2>&1 </dev/null &) ; sleep 0.3; kill -9 $PPID; sleep 1000")
    assert procs.labelled(variable)
    if how == "stopped":
        await rt.stop()
    else:
        assert await reap(tmp_path, dead) == ["s.1"]
    assert await soon(lambda: procs.labelled(variable) == [], 2)
    assert list(tmp_path.iterdir()) == []
    await rt.stop()


async def test_leftovers_of_a_house_that_has_moved_are_found(tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    killed_gateway(before, kind="local", label="s.1", isolation="none")
    groups = json.loads((before / "s.1" / "owner.json").read_text())["groups"]
    before.rename(now)
    assert await reap(now, dead) == ["s.1"]
    assert await soon(lambda: procs.labelled(f"POLAR_ATTEMPT={host_name(before, 's.1')}".encode()) == [])
    assert not [path for path in groups if Path(path).exists()]


@pytest.mark.parametrize(("earlier", "boot"), [(1, ""), (0, "another boot")])
async def test_a_reused_pid_is_left_alone(tmp_path: Path, earlier: int, boot: str) -> None:
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        started = procs.ProcessId.of(bystander.pid)
        assert started is not None
        base = tmp_path / "s.1"
        (base / "pids").mkdir(parents=True)
        (base / "pids" / f"{bystander.pid}-{started.started - earlier}").touch()
        owner = {"label": "s.1", "kind": "local", "boot": boot or procs.boot_id(), "groups": []}
        (base / "owner.json").write_text(json.dumps(owner))
        assert await reap(tmp_path, dead) == ["s.1"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_broken_records_are_removed_too(tmp_path: Path) -> None:
    (tmp_path / "half.1").mkdir()
    (tmp_path / "torn.1").mkdir()
    (tmp_path / "torn.1" / "owner.json").write_text("{")
    (tmp_path / "a-file").write_text("not an attempt")
    (tmp_path / "link.1").symlink_to("/etc")
    assert await reap(tmp_path, dead) == ["half.1", "torn.1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-file", "link.1"]
    assert Path("/etc/passwd").exists()
    assert await reap(tmp_path / "nowhere", dead) == []


async def test_a_sandbox_gives_no_privileges_and_no_place_but_its_own(tmp_path: Path) -> None:
    spec = RuntimeSpec("local", "s.1", tmp_path, network="none", isolation="bubblewrap")
    async with make_runtime(spec) as rt:
        told = (await sh(rt, "cat /proc/self/status")).stdout.decode()
        assert {line.split()[1] for line in told.splitlines() if line.startswith("Cap")} == {"0" * 16}
        assert "NoNewPrivs:\t1" in told
        assert (await sh(rt, "unshare --user true")).exit_code != 0
        for place in ("/x", "/usr/x", "/etc/x", "/polar/x"):
            assert (await sh(rt, f"touch {place}")).exit_code != 0, place


async def test_an_attempt_isnt_started_twice(tmp_path: Path) -> None:
    spec = RuntimeSpec("local", "s.1", tmp_path, network="none")
    async with make_runtime(spec) as first:
        with pytest.raises(RuntimeFault, match="ran before"):
            await make_runtime(spec).start()
        with pytest.raises(RuntimeFault, match="already started"):
            await first.start()
        assert (await sh(first, "echo fine")).stdout == b"fine\n"


async def test_deep_and_forbidden_directories_are_removed(tmp_path: Path) -> None:
    async with make_runtime(RuntimeSpec("local", "s.1", tmp_path, network="none")) as rt:
        deep = "i=0; while [ $i -lt 400 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done"
        assert (await sh(rt, deep)).exit_code == 0
        assert (await sh(rt, "mkdir shut; touch shut/f; chmod 000 shut; touch -- -rf '*' 'a\nb'")).exit_code == 0
        with pytest.raises(RuntimeFault, match="deep"):
            await rt.snapshot()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def docker_host() -> Iterator[str]:
    with runtime_docker.own_daemon() as host:
        yield host


def docker_spec(host: str, root: Path, label: str, **changes: object) -> RuntimeSpec:
    image = runtime_docker.busybox_image(host)
    options = {"docker_host": host, "pull": "never"}
    more = {"image": image, "network": "none", "limits": LIMITS, "options": options, **changes}
    return RuntimeSpec("docker", label, root, **more)  # type: ignore[arg-type]


@pytest.mark.docker
async def test_a_killed_gateways_container_is_reaped(docker_host: str, tmp_path: Path) -> None:
    image = runtime_docker.busybox_image(docker_host)
    killed_gateway(tmp_path, kind="docker", label="s.1", image=image, options={"docker_host": docker_host})
    other = tmp_path / "of another house"
    async with make_runtime(docker_spec(docker_host, other, "s.1")) as bystander:
        assert len(runtime_docker.containers(docker_host, tmp_path)) == 1
        assert await reap(tmp_path, lambda label: dead(label) if label == "s.1" else alive(label)) == ["s.1"]
        assert runtime_docker.containers(docker_host, tmp_path) == []
        assert (await sh(bystander, "echo fine")).stdout == b"fine\n"


@pytest.mark.docker
async def test_containers_of_a_house_that_has_moved_are_found(docker_host: str, tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    image = runtime_docker.busybox_image(docker_host)
    killed_gateway(before, kind="docker", label="s.1", image=image, options={"docker_host": docker_host})
    before.rename(now)
    assert await reap(now, dead) == ["s.1"]
    assert runtime_docker.containers(docker_host, before) == []


@pytest.mark.docker
async def test_missing_and_unusable_images(docker_host: str, tmp_path: Path) -> None:
    for image, error, text in (
        ("polar-test/nowhere:1", RuntimeUnavailable, "no image 'polar-test/nowhere:1'"),
        ("", ConfigError, "needs an image"),
        ("Not A Name", RuntimeFault, "Not A Name"),
    ):
        with pytest.raises(error, match=text):
            await make_runtime(docker_spec(docker_host, tmp_path, "s.1", image=image)).start()
        assert list(tmp_path.iterdir()) == []
    other = runtime_docker.foreign_image(docker_host)
    with pytest.raises(ConfigError, match="s390x"):
        await make_runtime(docker_spec(docker_host, tmp_path, "s.1", image=other)).start()
    assert runtime_docker.containers(docker_host, tmp_path) == []
    away = RuntimeSpec("docker", "s.1", tmp_path, image="x", options={"docker_host": f"unix://{tmp_path}/no.sock"})
    with pytest.raises(RuntimeUnavailable, match="doesn't answer"):
        await make_runtime(away).start()
    with pytest.raises(ConfigError, match="this host's"):
        make_runtime(RuntimeSpec("docker", "s.1", tmp_path, image="x", options={"docker_host": "tcp://192.0.2.1:1"}))


@pytest.mark.docker
async def test_a_container_that_dies_ends_its_command_and_starts_again(docker_host: str, tmp_path: Path) -> None:
    async with make_runtime(docker_spec(docker_host, tmp_path, "s.1")) as rt:
        task = spawn(sh(rt, HEARTBEAT.format("beat")), name="exec")
        assert await begun(rt, "beat")
        (container,) = runtime_docker.containers(docker_host, tmp_path)
        runtime_docker.kill_container(docker_host, container)
        result = await asyncio.wait_for(task, 10)
        assert (result.exit_code, result.timed_out) == (137, False)
        assert (await sh(rt, "test -s beat && echo files stay")).stdout == b"files stay\n"


@pytest.mark.docker
async def test_a_container_is_what_it_says(docker_host: str, tmp_path: Path) -> None:
    async with make_runtime(docker_spec(docker_host, tmp_path, "s.1", user="1234:1234")) as rt:
        probe = "id -u; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; ls /sys/class/net; touch /polar/x /bin/x"
        result = await sh(rt, f"{probe}; echo own > mine; cat mine")
        lines = result.stdout.decode().split()
        assert lines == ["1234", "CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1", "lo", "own"]
        assert result.output_tail.count("denied") + result.output_tail.count("Read-only") == 2


@pytest.mark.docker
@pytest.mark.slow
async def test_a_daemon_restart_is_nobodys_fault_and_the_next_attempt_works(tmp_path: Path) -> None:
    # A short path, for the daemon makes Unix sockets far below it.
    directory = Path(tempfile.mkdtemp(prefix="polar-dk-"))
    with runtime_docker.own_daemon(directory) as host:
        spec = docker_spec(host, tmp_path / "attempts", "s.1")
        rt = make_runtime(spec)
        await rt.start()
        task = spawn(sh(rt, HEARTBEAT.format("beat")), name="exec")
        assert await begun(rt, "beat")
        runtime_docker.stop_daemon(directory)
        with pytest.raises(RuntimeUnavailable):
            await asyncio.wait_for(task, 60)
        with pytest.raises(RuntimeUnavailable):
            await rt.stop()
        runtime_docker.start_daemon(directory)
        assert await reap(tmp_path / "attempts", dead) == ["s.1"]
        assert runtime_docker.containers(host, tmp_path / "attempts") == []
        async with make_runtime(docker_spec(host, tmp_path / "attempts", "s.2")) as after:
            assert (await sh(after, "echo works")).stdout == b"works\n"
    shutil.rmtree(directory)
