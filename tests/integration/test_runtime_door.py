"""A container's first process answers for its files until the first command, and to nobody afterwards."""

from __future__ import annotations

import io
import os
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from runtime_kit import LIMITS, sh, soon

import runtime_docker
from polar_common.errors import ResourceExhausted, RuntimeFault, RuntimeUnavailable
from polar_runtime import archive, courier, make_runtime
from polar_runtime.base import RuntimeSpec
from polar_runtime.container import Container
from polar_runtime.docker import DockerRuntime
from polar_runtime.door import Door


@asynccontextmanager
async def first_process(base: Path, home: Path | None = None) -> AsyncIterator[tuple[Door, subprocess.Popen[bytes]]]:
    """A door, and `courier.py door` at it; its working directory is `base/work`, and `base/after` comes after it."""
    door = Door(base / "door")
    await door.listen()
    places = [str(door.directory / "s"), str(home or base / "home"), str(base / "work")]
    command = [
        sys.executable,
        str(courier.__file__),
        "door",
        *places,
        "--",
        "/bin/sh",
        "-c",
        f"> {base}/after; sleep 60",
    ]
    process = subprocess.Popen(command)
    try:
        yield door, process
    finally:
        await door.close()
        process.kill()
        process.wait()


def tar(**files: bytes) -> bytes:
    return archive.to_tar([archive.Entry(name, 0o644, data) for name, data in files.items()])


async def ask(door: Door, action: str, root: Path, stdin: bytes = b"") -> tuple[int, str, bytes]:
    out = io.BytesIO()
    code, error = await door.ask([action, str(root)], stdin, lambda data: void(out.write(data)))
    return code, error, out.getvalue()


def by_itself(action: str, root: Path, stdin: bytes) -> bytes:
    command = [sys.executable, str(courier.__file__), action, str(root)]
    return subprocess.run(command, input=stdin, capture_output=True, check=True, timeout=20).stdout


def void(_: object) -> None:
    return None


async def test_it_answers_as_the_courier_does(tmp_path: Path) -> None:
    async with first_process(tmp_path) as (door, _):
        assert await door.answered()
        work, large = tmp_path / "work", os.urandom(3 << 20)
        assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
        assert await ask(door, "put", work, tar(a=b"A", b=large)) == (0, "", b"")
        code, _, listed = await ask(door, "list", work, b".")
        assert code == 0 and [r.split(b" ")[3] for r in listed.split(b"\0") if r] == [b"a", b"b"]
        assert await ask(door, "read", work, b"b\0a") == (0, "", by_itself("read", work, b"b\0a"))
        assert (await ask(door, "remove", work, b"a"))[0] == 0 and not (work / "a").exists()


async def test_a_refusal_doesnt_end_it_and_what_was_not_read_is_skipped(tmp_path: Path) -> None:
    async with first_process(tmp_path) as (door, _):
        assert await door.answered()
        code, said, _ = await ask(door, "list", tmp_path / "work", b"../outside")
        assert code == 3 and "outside" in said
        (tmp_path / "work" / "one").write_bytes(b"1")
        code, _, listed = await ask(door, "list", tmp_path / "work", b".\0../outside")
        assert code == 3 and listed.endswith(b" one\0")
        assert (await ask(door, "list", tmp_path / "work", b"."))[2] == listed
        (tmp_path / "work" / "file").write_bytes(b"in the way")
        assert (await ask(door, "put", tmp_path / "work" / "file", tar(a=b"x" * (2 << 20))))[0] == 5
        assert await ask(door, "list", tmp_path / "work", b".") != (0, "", b"")


async def test_it_is_shut_to_everybody_else_and_becomes_the_command_when_closed(tmp_path: Path) -> None:
    async with first_process(tmp_path) as (door, process):
        assert await door.answered()
        assert os.listdir(door.directory) == []
        assert not (tmp_path / "after").exists()
        await door.close()
        assert await soon((tmp_path / "after").exists)
        assert process.poll() is None and not door.is_open
        with pytest.raises(RuntimeFault, match="doesn't answer"):
            await ask(door, "list", tmp_path / "work", b".")


async def test_a_killed_process_is_told_as_killed(tmp_path: Path) -> None:
    async with first_process(tmp_path) as (door, process):
        assert await door.answered()
        process.kill()
        assert (await ask(door, "list", tmp_path / "work", b"."))[0] == 137
        assert not door.is_open


async def test_a_question_given_up_shuts_the_door(tmp_path: Path) -> None:
    """The next answer would be the last question's."""
    async with first_process(tmp_path) as (door, _):
        assert await door.answered()
        await ask(door, "put", tmp_path / "work", tar(a=b"A"))

        def full(_: bytes) -> None:
            raise OSError("full")

        with pytest.raises(OSError, match="full"):
            await door.ask(["read", str(tmp_path / "work")], b"a", full)
        assert not door.is_open


async def test_places_that_cant_be_made_are_left_to_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with first_process(tmp_path, home=tmp_path / "file" / "home") as (door, _):
        assert not await door.answered()
        assert not door.is_open and os.listdir(door.directory) == []
        assert await soon((tmp_path / "after").exists)


async def test_a_process_that_never_comes_isnt_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar_runtime.door._ANSWER_S", 0.1)
    door = Door(tmp_path / ("long" * 40))
    await door.listen()
    assert not await door.answered()


@pytest.fixture(scope="module")
def docker_host() -> Iterator[str]:
    with runtime_docker.own_daemon() as host:
        yield host


def spec(host: str, root: Path, **changes: object) -> RuntimeSpec:
    options = {"docker_host": host, "pull": "never"}
    image = runtime_docker.busybox_image(host)
    about = {"image": image, "limits": LIMITS, "network": "none", "options": options, **changes}
    return RuntimeSpec("docker", "s.1", root, **about)  # type: ignore[arg-type]


@pytest.mark.docker
async def test_nothing_is_run_in_a_container_before_the_first_command(
    docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execs: list[list[str]] = []
    prepare = Container.prepare

    async def counted(self: Container, argv: list[str], env: dict[str, str], *, stdin: bool) -> str:
        execs.append(argv)
        return await prepare(self, argv, env, stdin=stdin)

    monkeypatch.setattr(Container, "prepare", counted)
    async with make_runtime(spec(docker_host, tmp_path)) as rt:
        await rt.upload({"a/b": b"1"})
        await rt.upload({"/home/agent/.x": b"2"})
        await rt.snapshot()
        assert await rt.download(["a"]) == {"a/b": b"1"} and execs == []
        told = await sh(rt, "stat -c '%U %a %n' /home/agent /tmp . a/b; ls -A /polar/door; echo 3 > a/b")
        assert told.stdout.decode().splitlines()[:3] == ["root 700 /home/agent", "root 1777 /tmp", "root 755 ."]
        assert told.stdout.decode().splitlines()[4:] == [] and len(execs) == 1
        assert await rt.download(["a"]) == {"a/b": b"3\n"} and len(execs) > 1
        assert b"+3" in await rt.diff()


@pytest.mark.docker
async def test_a_kill_before_the_first_command_leaves_files_and_a_container_that_wakes(
    docker_host: str, tmp_path: Path
) -> None:
    async with make_runtime(spec(docker_host, tmp_path)) as rt:
        await rt.upload({"kept": b"1"})
        await rt.cancel()
        with pytest.raises(RuntimeUnavailable, match="137"):
            await rt.upload({"other": b"2"})
        await rt.upload({"other": b"2"})
        assert await rt.download(["kept", "other"]) == {"kept": b"1", "other": b"2"}


@pytest.mark.docker
async def test_files_that_take_all_the_memory_are_told_as_that(docker_host: str, tmp_path: Path) -> None:
    limits = replace(LIMITS, memory_mb=24, disk_mb=512)
    async with make_runtime(spec(docker_host, tmp_path, limits=limits)) as rt:
        await rt.upload({f"{'x' * 200}{i}": b"" for i in range(60_000)})
        with pytest.raises(ResourceExhausted, match="memory"):
            await rt.snapshot()


@pytest.mark.docker
@pytest.mark.parametrize("by", ["the first process", "another"])
async def test_a_file_larger_than_the_memory_comes_in_and_goes_out(docker_host: str, tmp_path: Path, by: str) -> None:
    limits = replace(LIMITS, memory_mb=48, disk_mb=512)
    large = os.urandom(1 << 20) * 160
    async with make_runtime(spec(docker_host, tmp_path, limits=limits)) as rt:
        if by == "another":
            await sh(rt, "true")
        await rt.upload({"large": large, "small": b"s"})
        got = await rt.download(["large", "small"], max_bytes=len(large) + 1)
        assert got["small"] == b"s" and got["large"] == large
        await rt.snapshot()


def test_a_file_that_is_cut_while_it_is_read_doesnt_harm_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 1_000_000)
    (tmp_path / "b").write_bytes(b"b")

    class Cutting(io.BytesIO):
        def write(self, data: object) -> int:
            os.truncate(tmp_path / "a", 200_000)
            return super().write(data)  # type: ignore[arg-type]

    out = Cutting()
    assert courier.perform("read", str(tmp_path), io.BytesIO(b"a\0gone\0b"), out) == (0, "")
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as told:
        read = {m.name: told.extractfile(m).read() for m in told}  # type: ignore[union-attr]
    assert read == {"a": b"a" * 200_000 + bytes(800_000), "b": b"b"}


@pytest.mark.docker
@pytest.mark.parametrize("user", ["1000:1000", "0:7"])
async def test_a_user_who_isnt_root_has_the_daemons_help(docker_host: str, tmp_path: Path, user: str) -> None:
    made = make_runtime(spec(docker_host, tmp_path, user=user))
    assert isinstance(made, DockerRuntime)
    async with made as rt:
        await rt.upload({"/home/agent/mine": b"1", "here": b"2"})
        told = await sh(rt, "stat -c %u:%g /home/agent /home/agent/mine . here")
        assert set(told.stdout.decode().split()) == {user}


@pytest.mark.docker
async def test_an_image_whose_home_is_anothers_has_the_daemons_help(docker_host: str, tmp_path: Path) -> None:
    client = docker.DockerClient(base_url=docker_host)
    root = io.BytesIO(runtime_docker._root_filesystem())
    try:
        whole = runtime_docker.with_directory(root.getvalue(), "home/agent", 1000)
        client.api.import_image_from_data(whole, repository="polar-test/home", tag="1")
    finally:
        client.close()
    async with make_runtime(spec(docker_host, tmp_path, image="polar-test/home:1")) as rt:
        await rt.upload({"/home/agent/.x": b"1"})
        assert (await sh(rt, "stat -c '%U %a' /home/agent; cat /home/agent/.x")).stdout == b"root 700\n1"


def test_a_socket_of_no_use_is_not_waited_at(tmp_path: Path) -> None:
    """A container started again: nobody listens any more."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    command = ["door", str(path), str(tmp_path / "h"), str(tmp_path / "w"), "--", "/bin/echo", "idle"]
    done = subprocess.run(
        [sys.executable, str(courier.__file__), *command], capture_output=True, timeout=20, check=True
    )
    assert done.stdout == b"idle\n" and not (tmp_path / "w").exists()
