"""Output, specs, registry, process trees and control groups."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polar_common.errors import ConfigError
from polar_common.tasks import cancel_and_wait, spawn
from polar_runtime import Limits, Mount, Runtime, RuntimeSpec, cgroup, kinds, make_runtime, procs
from polar_runtime.local import LocalRuntime
from polar_runtime.output import Output
from polar_runtime.portable import portable_python
from polar_runtime.sampler import Sampler


class Custom(LocalRuntime):
    """What a user's own runtime looks like."""


def spec(kind: str = "local", **changes: object) -> RuntimeSpec:
    return RuntimeSpec(kind, "s.1", Path("/nonexistent"), **changes)  # type: ignore[arg-type]


def test_runtimes_are_found_by_name_or_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_of_mine.py").write_text("raise SystemExit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"local", "docker", "apptainer"} <= set(kinds())
    assert isinstance(make_runtime(spec()), LocalRuntime)
    made = make_runtime(spec(f"{__name__}:Custom"))
    assert type(made).__name__ == "Custom" and isinstance(made, Runtime)
    for kind, text in (
        ("podman", "known: apptainer, docker, local"),
        ("no.such.module:Class", "cannot load"),
        ("pathlib:Nothing", "cannot load"),
        ("pathlib:Path", "isn't a Runtime"),
        (":", "cannot load"),
        ("script_of_mine:Class", "cannot load .*SystemExit"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_runtime(spec(kind))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"workdir": "relative"}, "workdir"),
        ({"workdir": "/a/../b"}, "workdir"),
        ({"env": {"": "x"}}, "env"),
        ({"env": {"A": "\0"}}, "env"),
        ({"user": "root"}, "user"),
    ],
)
def test_specs_that_make_no_sense(changes: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        make_runtime(spec(**changes))


@pytest.mark.parametrize("label", ["", "a/b", "..", "a b", ".hidden", "x" * 200])
def test_labels_are_names_of_directories(label: str) -> None:
    with pytest.raises(ConfigError, match="label"):
        RuntimeSpec("local", label, Path("/nonexistent"))


async def test_a_socket_directory_holds_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text("{}")
    rt = make_runtime(RuntimeSpec("local", "s.1", tmp_path / "root", proxy_socket=tmp_path / "proxy.sock"))
    with pytest.raises(ConfigError, match=r"secrets\.json"):
        await rt.start()
    await rt.stop()
    assert not (tmp_path / "root").exists()


def test_output_is_capped_counted_and_remembered() -> None:
    kept: list[tuple[str, bytes]] = []
    output = Output(lambda s, d: kept.append((s, d)), 10)
    output.feed("stdout", b"12345678")
    output.feed("stderr", b"abcdef")
    output.feed("stdout", b"more")
    assert kept[:2] == [("stdout", b"12345678"), ("stderr", b"ab")]
    assert b"beyond 10 bytes" in kept[2][1] and len(kept) == 3
    assert (output.bytes, output.stdout, output.tail) == (18, b"12345678more", "12345678abcdefmore")
    silent = Output(None, 10)
    for _ in range(100):
        silent.feed("stdout", bytes(100_000))
    assert silent.bytes == 10_000_000
    assert len(silent.stdout) == 1 << 20 and len(silent.tail) == 8192


def test_an_exactly_full_log_says_that_it_is_full() -> None:
    kept: list[bytes] = []
    output = Output(lambda _s, d: kept.append(d), 4)
    output.feed("stdout", b"1234")
    output.feed("stdout", b"5")
    assert kept[0] == b"1234" and len(kept) == 2


def test_process_ids_outlive_no_reuse() -> None:
    process = subprocess.Popen(["sleep", "100"])
    known = procs.ProcessId.of(process.pid)
    assert known is not None and known.alive()
    assert not procs.ProcessId(known.pid, known.started + 1).alive()
    assert procs.usage([process.pid]).procs == 1
    process.kill()
    process.wait()
    assert not known.alive()
    assert procs.ProcessId.of(process.pid) is None
    assert procs.tree(process.pid) == [process.pid]
    procs.kill_tree(known)


def test_kill_tree_takes_all_below() -> None:
    line = ["/bin/sh", "-c", "for i in 1 2 3; do (sleep 100 & sleep 100) & done; echo up; wait"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        known = procs.ProcessId.of(process.pid)
        assert known is not None
        for _ in range(200):
            below = procs.tree(process.pid)
            if len(below) >= 7:
                break
            time.sleep(0.05)
        assert len(below) >= 7
        assert len(procs.tree(process.pid, 2)) < len(below) + 1
        procs.kill_tree(known)
    assert not [pid for pid in below if (p := procs.ProcessId.of(pid)) is not None and p.alive()]


def _hierarchy(tmp_path: Path, v2: bool) -> cgroup.Cgroup:
    parents = {"": tmp_path} if v2 else {c: tmp_path / c for c in ("memory", "pids", "cpuacct", "cpu")}
    for parent in parents.values():
        parent.mkdir(exist_ok=True)
    group = cgroup.Cgroup(cgroup.Hierarchies(parents, v2), "s.1")
    group.create(100, 10, 1.5)
    return group


def test_version_2_groups(tmp_path: Path) -> None:
    group = _hierarchy(tmp_path, v2=True)
    base = tmp_path / "s.1"
    assert (base / "memory.max").read_text() == str(100 << 20)
    assert (base / "pids.max").read_text() == "10"
    assert (base / "cpu.max").read_text() == "150000 100000"
    (base / "memory.peak").write_text("12345\n")
    (base / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (base / "cgroup.procs").write_text("1\n22\n")
    assert (group.peak_memory(), group.cpu_s(), group.pids()) == (12345, 2.5, [1, 22])
    before = group.exhausted()
    assert group.which(before) == ""
    (base / "pids.events").write_text("max 3\n")
    assert group.which(before) == "pids"
    (base / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert group.which(before) == "memory"
    assert group.entry_files() == [str(base / "cgroup.procs")]


def test_version_1_groups(tmp_path: Path) -> None:
    group = _hierarchy(tmp_path, v2=False)
    assert (tmp_path / "memory/s.1/memory.limit_in_bytes").read_text() == str(100 << 20)
    assert (tmp_path / "pids/s.1/pids.max").read_text() == "10"
    assert (tmp_path / "cpu/s.1/cpu.cfs_quota_us").read_text() == "150000"
    (tmp_path / "cpuacct/s.1/cpuacct.usage").write_text("1500000000\n")
    (tmp_path / "memory/s.1/memory.oom_control").write_text("oom_kill_disable 0\noom_kill 2\n")
    assert group.cpu_s() == 1.5
    assert group.exhausted() == (2, 0)
    assert len(group.entry_files()) == 4


def test_without_a_limit_of_cores_nobody_is_scheduled_as_a_group(tmp_path: Path) -> None:
    group = cgroup.Cgroup(cgroup.Hierarchies({"pids": tmp_path, "cpu": tmp_path / "cpu"}, v2=False), "s.1")
    group.create(100, 10, 0)
    assert group.entry_files() == [str(tmp_path / "s.1" / "cgroup.procs")]


def test_the_portable_python_is_cached_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its whole path: it is mounted into containers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLAR_CACHE", "here")
    assert portable_python.__wrapped__().mounts[0].source.parent == tmp_path / "here" / "python"


def test_the_portable_python_needs_nothing_of_the_system() -> None:
    python = portable_python()
    assert python.argv[0].startswith("/polar/python/lib/ld-")
    targets = [m.target for m in python.mounts]
    assert len(set(targets)) == len(targets) and all(m.source.exists() for m in python.mounts)
    loader = next(m.source for m in python.mounts if m.target == "/polar/python") / "lib" / Path(python.argv[0]).name
    assert loader.is_file()
    assert portable_python() is python
    assert f"python{sys.version_info.major}.{sys.version_info.minor}" in python.argv[3]


def test_mounts_are_seen_at_their_targets() -> None:
    mount = Mount(Path("/usr/share"), "/data")
    assert make_runtime(spec(isolation="none", limits=Limits(), mounts=(mount,))).inside(mount) == "/usr/share"


class Over:
    """A command whose last process has ended."""

    def members(self, most: int = 1 << 22) -> list[int]:
        return []

    async def kill(self) -> None:
        return


async def test_a_command_that_is_over_has_no_disk_to_be_looked_at() -> None:
    """A thousand that end at once would start as many `du`, each a fork of the gateway, and its leases would lapse."""
    looks = 0

    async def disk() -> int:
        nonlocal looks
        looks += 1
        return 0

    sampler = Sampler(Over(), Limits(), None, disk)
    sampler._disk_due = 0
    watch = spawn(sampler.run(), name="sampler")
    await asyncio.sleep(0.3)
    await cancel_and_wait(watch)
    assert looks == 0
