"""What images bring along: their user, their working directory, their volumes."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import docker
import pytest
from runtime_kit import LIMITS, sh
from test_runtime_leftovers import docker_spec

import runtime_docker
from polar_common.tasks import spawn
from polar_runtime import make_runtime

pytestmark = pytest.mark.docker

_USERS = b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/:/bin/sh\n"


@pytest.fixture(scope="module")
def docker_host() -> Iterator[str]:
    with runtime_docker.own_daemon() as host:
        yield host


def image(host: str, name: str, changes: Sequence[str], directories: Sequence[str] = ()) -> str:
    """The busybox image with a user `agent`, further directories of root's, and a configuration."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(runtime_docker._root_filesystem())) as old,
        tarfile.open(fileobj=out, mode="w") as new,
    ):
        for member in old:
            if member.name != "etc/passwd":
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
        users = tarfile.TarInfo("etc/passwd")
        users.size = len(_USERS)
        new.addfile(users, io.BytesIO(_USERS))
        for path in directories:
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            new.addfile(info)
    client = docker.DockerClient(base_url=host)
    try:
        client.api.import_image_from_data(
            out.getvalue(), repository=f"polar-test/{name}", tag="1", changes=list(changes)
        )
    finally:
        client.close()
    return f"polar-test/{name}:1"


@pytest.mark.parametrize("user", ["agent", "1000", "1000:1000"])
@pytest.mark.parametrize("directories", [(), ("workspace",)], ids=["none", "of root's"])
async def test_commands_run_as_the_images_user_who_can_write(
    docker_host: str, tmp_path: Path, user: str, directories: tuple[str, ...]
) -> None:
    made = image(docker_host, "user", [f"USER {user}"], directories)
    async with make_runtime(docker_spec(docker_host, tmp_path, "s.1", image=made)) as rt:
        await rt.upload({"a/b": b"1", "/home/agent/.x": b"2"})
        await rt.snapshot()
        told = await sh(rt, "id -u; echo 2 > a/b; echo n > new; echo h > ~/h; stat -c %u . ~ a/b new")
        assert told.stdout.decode().split() == ["1000"] * 5, told.output_tail
        assert b"+++ b/new" in await rt.diff()


async def test_what_is_written_to_an_images_volume_counts(docker_host: str, tmp_path: Path) -> None:
    made = image(docker_host, "volume", ["VOLUME /data"])
    fill = "i=0; while [ $i -lt 60 ]; do dd if=/dev/zero of=/data/f$i bs=1M count=8 2>/dev/null; i=$((i+1)); done"
    async with make_runtime(docker_spec(docker_host, tmp_path, "s.1", image=made, limits=LIMITS)) as rt:
        result = await sh(rt, f"{fill}; sleep 30", timeout=60)
        assert result.exhausted == "disk" and not result.timed_out


@pytest.mark.parametrize("after_s", [0.05, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("how", ["stopped", "cancelled"])
async def test_a_start_that_is_broken_off_leaves_no_container(
    docker_host: str, tmp_path: Path, how: str, after_s: float
) -> None:
    made = image(docker_host, "user", ["USER 1000"])
    runtime = make_runtime(docker_spec(docker_host, tmp_path, "s.1", image=made))
    start = spawn(runtime.start(), name="start")
    await asyncio.sleep(after_s)
    if how == "stopped":
        await runtime.stop()
    else:
        start.cancel()
    await asyncio.wait({start}, timeout=20)
    await asyncio.sleep(1)
    assert runtime_docker.containers(docker_host, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
