"""What images bring along: their user, their working directory, their volumes."""

from __future__ import annotations

import asyncio
import io
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from docker.models.containers import ContainerCollection
from runtime_kit import LIMITS, sh
from test_runtime_leftovers import docker_spec

import runtime_docker
from polar_common.errors import ConfigError, RuntimeFault, RuntimeUnavailable
from polar_common.tasks import spawn
from polar_runtime import RuntimeSpec, make_runtime

pytestmark = pytest.mark.docker

_USERS = b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/:/bin/sh\n"
# The broad combinations are the longer suite's.
LOOP_TOO = pytest.param("loop", marks=pytest.mark.slow)
# A start's requests to the daemon: with a watched disk the eighth starts the container, with its own the thirteenth.
REQUESTS = [("watch", n) for n in (0, 2, 8)]
MORE_REQUESTS = [*(("watch", n) for n in (1, 3, 4, 5, 6, 7)), *(("loop", n) for n in range(14))]


@pytest.fixture(scope="module")
def docker_host() -> Iterator[str]:
    with runtime_docker.own_daemon() as host:
        yield host


def directory(path: str, uid: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.mode, info.uid = tarfile.DIRTYPE, 0o755, uid
    return info


def link(path: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def file(path: str, uid: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.mode, info.uid = 0o644, uid
    return info


def image(host: str, name: str, changes: Sequence[str], more: Sequence[tarfile.TarInfo] = ()) -> str:
    """The busybox image with a user `agent`, more files, and a configuration."""
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
        for info in more:
            new.addfile(info)
    client = docker.DockerClient(base_url=host)
    try:
        client.api.import_image_from_data(
            out.getvalue(), repository=f"polar-test/{name}", tag="1", changes=list(changes)
        )
    finally:
        client.close()
    return f"polar-test/{name}:1"


def spec(host: str, root: Path, made: str, disk: str = "watch") -> RuntimeSpec:
    options = {"docker_host": host, "pull": "never", "disk": disk}
    return docker_spec(host, root, "s.1", image=made, options=options)


@pytest.mark.parametrize("user", ["agent", *(pytest.param(u, marks=pytest.mark.slow) for u in ("1000", "1000:1000"))])
@pytest.mark.parametrize("there", [False, True], ids=["none", "of root's"])
@pytest.mark.parametrize("disk", ["watch", "loop"])
async def test_commands_run_as_the_images_user_who_can_write(
    docker_host: str, tmp_path: Path, user: str, there: bool, disk: str
) -> None:
    made = image(docker_host, "user", [f"USER {user}"], [directory("workspace")] if there else [])
    async with make_runtime(spec(docker_host, tmp_path, made, disk)) as rt:
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


_ODD = {
    "a link to a directory": [directory("elsewhere"), link("{}", "/elsewhere")],
    "a link to nothing": [link("{}", "/nowhere")],
    "a file": [file("{}")],
}


@pytest.mark.parametrize("place", ["workspace", "home/agent", "tmp"])
@pytest.mark.parametrize("odd", list(_ODD))
@pytest.mark.parametrize("disk", ["watch", LOOP_TOO])
@pytest.mark.parametrize("user", ["root", pytest.param("1000", marks=pytest.mark.slow)])
async def test_what_an_image_has_in_a_directorys_place_is_told_at_the_start(
    docker_host: str, tmp_path: Path, place: str, odd: str, disk: str, user: str
) -> None:
    """Not an infrastructure fault, which would be tried again."""
    more = [copy(member) for member in _ODD[odd]]
    more[-1].name = place
    made = image(docker_host, "odd", [f"USER {user}"], [directory("home"), *more])
    with pytest.raises(ConfigError, match=f"/{place} isn't a directory"):
        await make_runtime(spec(docker_host, tmp_path, made, disk)).start()
    assert runtime_docker.containers(docker_host, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("disk", ["watch", "loop"])
async def test_a_working_directory_of_anothers_is_given_to_root_who_has_no_capabilities(
    docker_host: str, tmp_path: Path, disk: str
) -> None:
    others = [
        directory("workspace", 1000), directory("workspace/sub", 1000), file("workspace/sub/f", 1000),
        link("workspace/link", "/etc/passwd"), file("outside", 1000),
    ]  # fmt: skip
    made = image(docker_host, "others", [], others)
    async with make_runtime(spec(docker_host, tmp_path, made, disk)) as rt:
        await rt.upload({"a/b": b"1", "sub/g": b"2"})
        await rt.snapshot()
        told = await sh(rt, "echo 3 > new; echo 4 >> sub/f; echo 5 > sub/n; stat -c %u . sub sub/f link /outside")
        assert told.stdout.decode().split() == ["0", "0", "0", "0", "1000"], told.output_tail
        assert b"+4" in await rt.diff()
        caps = await sh(rt, "grep CapEff /proc/self/status")
        assert caps.stdout.split()[1] == b"0" * 16


@pytest.mark.parametrize(
    ("disk", "number"), [*REQUESTS, *(pytest.param(*found, marks=pytest.mark.slow) for found in MORE_REQUESTS)]
)
@pytest.mark.parametrize("how", ["stopped", "cancelled"])
async def test_a_start_that_is_broken_off_leaves_nothing(
    docker_host: str, tmp_path: Path, how: str, disk: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once (0), or during one of its requests to the daemon."""
    made = image(docker_host, "user", ["USER 1000"], [directory("workspace")])
    runtime = make_runtime(spec(docker_host, tmp_path, made, disk))
    reached, loop, asked = asyncio.Event(), asyncio.get_running_loop(), itertools.count(1)
    send = requests.Session.send

    def counted(session: requests.Session, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        connecting = str(request.url).endswith("/version")
        if not connecting and next(asked) == number:
            loop.call_soon_threadsafe(reached.set)
        return send(session, request, **options)

    monkeypatch.setattr(requests.Session, "send", counted)
    start = spawn(runtime.start(), name="start")
    await (asyncio.wait_for(reached.wait(), 20) if number else asyncio.sleep(0))
    if how == "stopped":
        await runtime.stop()
    else:
        start.cancel()
    await asyncio.wait({start}, timeout=20)
    await asyncio.sleep(1)
    assert runtime_docker.containers(docker_host, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeFault if how == "stopped" else asyncio.CancelledError):
        start.result()
    with pytest.raises(RuntimeFault):
        await runtime.exec(["/bin/true"])


@pytest.mark.parametrize("disk", ["watch", "loop"])
async def test_a_container_whose_making_wasnt_answered_is_removed(
    docker_host: str, tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that dies has perhaps made it."""
    create = ContainerCollection.create

    def unanswered(self: ContainerCollection, *args: object, **options: object) -> None:
        create(self, *args, **options)
        raise requests.ConnectionError("no answer")

    monkeypatch.setattr(ContainerCollection, "create", unanswered)
    made = image(docker_host, "user", [], [directory("workspace")])
    with pytest.raises(RuntimeUnavailable, match="no answer"):
        await make_runtime(spec(docker_host, tmp_path, made, disk)).start()
    assert runtime_docker.containers(docker_host, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
