"""Docker attempts on a disk of their own: what they write can't outgrow it, and the disk goes with them."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from runtime_kit import LIMITS, sh, soon
from test_runtime_leftovers import alive, dead, docker_spec, killed_gateway

import runtime_docker
from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_runtime import RuntimeSpec, loopdisk, make_runtime, reap
from polar_runtime.loopdisk import LoopDisk

pytestmark = pytest.mark.docker

# As fast as it can, in files small enough for any limit on one file.
_FILL = "i=0; while dd if=/dev/zero of=f$i bs=1M count=8 2>/dev/null; do i=$((i+1)); done; echo full"


@pytest.fixture(scope="module")
def docker_host() -> Iterator[str]:
    with runtime_docker.own_daemon() as host:
        yield host


def spec(host: str, root: Path, label: str = "s.1", **changes: object) -> RuntimeSpec:
    options = {"docker_host": host, "pull": "never", "disk": "loop"}
    return docker_spec(host, root, label, **{"options": options, **changes})


def on_disk(root: Path) -> list[str]:
    """Mounts and loop devices of attempts below `root`."""
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(root) in line]
    loops = Path("/sys/block").glob("loop*/loop/backing_file")
    return mounts + [str(p) for p in loops if str(root) in p.read_text()]


@pytest.mark.parametrize("place", [".", "$HOME", "/tmp"])
async def test_what_is_written_cant_outgrow_the_disk(docker_host: str, tmp_path: Path, place: str) -> None:
    async with make_runtime(spec(docker_host, tmp_path)) as rt:
        result = await sh(rt, f"cd {place} && {_FILL}", timeout=60)
        assert (result.stdout, result.exhausted) == (b"full\n", "disk")
        written = sum(p.stat().st_blocks * 512 for p in (tmp_path / "s.1").glob("disk.img"))
        assert (LIMITS.disk_mb // 2) << 20 < written <= LIMITS.disk_mb << 20
        assert (await sh(rt, f"cd {place} && rm f* && echo works > g && cat g")).stdout == b"works\n"
    assert await soon(lambda: on_disk(tmp_path) == []), on_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_files_last_and_the_images_own_are_there(docker_host: str, tmp_path: Path) -> None:
    image = "polar-test/worked:1"
    client = docker.DockerClient(base_url=docker_host)
    root = io.BytesIO(runtime_docker._root_filesystem())
    with tarfile.open(fileobj=root, mode="a") as tar:
        for name, content in (("testbed/own.txt", b"of the image"), ("testbed/sub/deep.txt", b"deep")):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o640
            tar.addfile(info, io.BytesIO(content))
    client.api.import_image_from_data(root.getvalue(), repository="polar-test/worked", tag="1")
    client.close()
    async with make_runtime(spec(docker_host, tmp_path, image=image, workdir="/testbed")) as rt:
        assert (await sh(rt, "cat own.txt sub/deep.txt; stat -c %a own.txt")).stdout == b"of the imagedeep640\n"
        await rt.upload({"given.txt": b"given"})
        await rt.snapshot()
        await sh(rt, "echo more >> own.txt; echo h > ~/h; echo t > /tmp/t")
        assert b"more" in await rt.diff()
        await rt.cancel()
        assert (await sh(rt, "cat given.txt ~/h /tmp/t")).stdout == b"givenh\nt\n"
        assert (await sh(rt, "ls -a . ~ /tmp | grep lost")).stdout == b""
    assert await soon(lambda: on_disk(tmp_path) == [])


async def test_a_dead_gateways_disk_is_reaped(docker_host: str, tmp_path: Path) -> None:
    image = runtime_docker.busybox_image(docker_host)
    options = {"docker_host": docker_host, "disk": "loop"}
    killed_gateway(tmp_path, kind="docker", label="s.1", image=image, options=options)
    assert on_disk(tmp_path)
    assert await reap(tmp_path, alive) == []
    assert await reap(tmp_path, dead) == ["s.1"]
    assert await soon(lambda: on_disk(tmp_path) == [])
    assert list(tmp_path.iterdir()) == []
    assert runtime_docker.containers(docker_host, tmp_path) == []


@pytest.mark.parametrize("mb", [40, 31], ids=["larger", "full"])
async def test_an_image_that_doesnt_fit_onto_the_disk_is_told(docker_host: str, tmp_path: Path, mb: int) -> None:
    """By name, at the start, and no fault of the daemon's."""
    large = runtime_docker.image_with(docker_host, "workspace/large", os.urandom(mb << 20))
    limits = replace(LIMITS, disk_mb=32)
    with pytest.raises(ConfigError, match="doesn't fit"):
        await make_runtime(spec(docker_host, tmp_path, image=large, limits=limits)).start()
    assert runtime_docker.containers(docker_host, tmp_path) == []
    assert on_disk(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


async def test_the_images_own_directory_isnt_held_in_memory(docker_host: str, tmp_path: Path) -> None:
    large = runtime_docker.image_with(docker_host, "workspace/large", bytes(100 << 20))
    limits = replace(LIMITS, disk_mb=200)
    tracemalloc.start()
    try:
        async with make_runtime(spec(docker_host, tmp_path, image=large, limits=limits)) as rt:
            assert (await sh(rt, "stat -c %s large")).stdout == b"104857600\n"
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


async def test_a_failed_start_leaves_no_disk(docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeUnavailable, match="no image"):
        await make_runtime(spec(docker_host, tmp_path, image="polar-test/nowhere:1")).start()
    with pytest.raises(ConfigError, match="s390x"):
        await make_runtime(spec(docker_host, tmp_path, image=runtime_docker.foreign_image(docker_host))).start()
    monkeypatch.setattr(loopdisk, "_FEATURES", ("-O", "no-such-feature"))
    with pytest.raises(RuntimeUnavailable, match="no disk of its own"):
        await make_runtime(spec(docker_host, tmp_path)).start()
    assert on_disk(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_says_how_full_it_is(tmp_path: Path) -> None:
    disk = LoopDisk(tmp_path, 64)
    disk.make()
    try:
        assert disk.used() < 4 << 20 and not disk.full()
        with pytest.raises(OSError, match="No space"):
            (disk.directory("work") / "big").write_bytes(bytes(80 << 20))
        assert disk.full()
    finally:
        disk.remove()
    assert on_disk(tmp_path) == []
    disk.remove()


@pytest.mark.parametrize("held_s", [0.3, 60.0])
def test_a_disk_that_somebody_still_looks_into_is_waited_for_but_not_for_ever(tmp_path: Path, held_s: float) -> None:
    disk = LoopDisk(tmp_path, 64)
    disk.make()
    looker = subprocess.Popen(["sleep", str(held_s)], cwd=disk.directory("work"))
    try:
        if held_s > 1:
            with pytest.raises(RuntimeFault, match="busy"):
                disk.remove()
        else:
            disk.remove()
    finally:
        looker.kill()
        looker.wait()
        disk.remove()
    assert on_disk(tmp_path) == []
