"""The contract of `polar_runtime.base.Runtime`, run against every variant."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_kit import HEARTBEAT, LIMITS, Case, Unix, begun, sh, soon, stands_still

import runtime_docker
from polar_common.errors import CommandFailed, ConfigError, ResourceExhausted, RuntimeFault
from polar_common.nats_server import free_port
from polar_common.tasks import cancel_and_wait, spawn
from polar_runtime import Limits, Runtime, bwrap, make_runtime, pack_files
from polar_runtime.portable import portable_python

_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=3).read().decode(), end='')"


def _python_get(url: str) -> list[str]:
    return [bwrap.system_python()[0], "-I", "-c", _GET, url]


def _portable_get(url: str) -> list[str]:
    return [*portable_python().argv, "-c", _GET, url]


_LOCAL = {
    "bubblewrap": ("bubblewrap", "on", True),
    "bubblewrap-rlimits": ("bubblewrap", "off", True),
    "none": ("none", "on", False),
    "none-rlimits": ("none", "off", False),
}


@pytest.fixture(scope="module")
def docker_host() -> Iterator[str]:
    with runtime_docker.own_daemon() as host:
        yield host


@pytest.fixture(scope="module")
def root_filesystem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rootfs")
    runtime_docker.unpack_root(directory)
    return directory


@pytest.fixture(params=[*_LOCAL, "apptainer", pytest.param("docker", marks=pytest.mark.docker)])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    root = tmp_path / "attempts"
    if request.param == "docker":
        host = request.getfixturevalue("docker_host")
        image = runtime_docker.busybox_image(host)
        yield Case("docker", "docker", root, _portable_get, image=image, options={"docker_host": host})
        assert not root.exists() or not list(root.iterdir())
        assert runtime_docker.containers(host, root) == []
        return
    if request.param == "apptainer":
        image = str(request.getfixturevalue("root_filesystem"))
        binary = tmp_path / "apptainer"
        binary.symlink_to(Path(__file__).with_name("fake_apptainer.py"))
        yield Case("apptainer", "apptainer", root, _portable_get, image=image, options={"binary": str(binary)})
        assert not root.exists() or not list(root.iterdir())
        return
    isolation, groups, isolated = _LOCAL[request.param]
    yield Case(request.param, "local", root, _python_get, isolation, options={"cgroup": groups}, isolated=isolated)
    assert not root.exists() or not list(root.iterdir())


async def test_exit_codes_are_the_commands_own(case: Case) -> None:
    async with case.runtime() as rt:
        assert (await sh(rt, "exit 0")).exit_code == 0
        assert (await sh(rt, "exit 7")).exit_code == 7
        assert (await sh(rt, "kill -9 $$")).exit_code == 137
        assert (await sh(rt, "kill -TERM $$")).exit_code == 143
        missing = await rt.exec(["/no/such/program"])
        assert missing.exit_code == 127
        assert "/no/such/program" in missing.output_tail
        await rt.upload({"data.txt": b"not a program"})
        assert (await rt.exec([f"{rt.workdir}/data.txt"])).exit_code == 126
        with pytest.raises(CommandFailed, match="broken step") as caught:
            await rt.check(["/bin/sh", "-c", "echo broken step; exit 3"])
        assert caught.value.exit_code == 3


async def test_output_streams_while_the_command_runs(case: Case) -> None:
    pieces: list[tuple[float, str, bytes]] = []
    async with case.runtime() as rt:
        began = time.monotonic()
        script = "echo first; sleep 1; echo second >&2; echo third; exit 5"
        result = await sh(rt, script, on_output=lambda s, d: pieces.append((time.monotonic() - began, s, d)))
    assert result.exit_code == 5
    assert pieces[0][1:] == ("stdout", b"first\n")
    assert pieces[-1][0] - pieces[0][0] > 0.7
    assert b"".join(d for _, s, d in pieces if s == "stdout") == b"first\nthird\n" == result.stdout
    assert b"".join(d for _, s, d in pieces if s == "stderr") == b"second\n"
    assert result.output_bytes == len("first\nsecond\nthird\n")
    assert "second" in result.output_tail
    assert 1.0 <= result.duration_s < 10


async def test_arguments_environment_and_input_arrive_unchanged(case: Case, tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    nasty = f"; touch {bait} && $(touch {bait}) `touch {bait}` | > {bait} ' \" \\ \n é \t *"
    async with case.runtime(env={"FROM_SPEC": nasty}) as rt:
        result = await rt.exec(["/bin/sh", "-c", 'printf %s "$1$2$FROM_SPEC"; cat', "sh", nasty, ""], stdin=b"in\0put")
        assert result.stdout == (nasty + nasty).encode() + b"in\0put"
        for name in (nasty, "../x;touch bait", "-rf"):
            assert (await rt.exec([name])).exit_code == 127
        inside = (await sh(rt, "env", env={"EXTRA": "1"})).stdout.decode()
    assert "EXTRA=1\n" in inside and f"HOME={rt.home}\n" in inside
    assert "POLAR_ATTEMPT=" in inside
    assert os.environ["PATH"] not in inside or case.name.startswith("none")
    assert not bait.exists()


@pytest.mark.parametrize("size", [200_000, 20_000_000])
async def test_a_command_that_doesnt_read_its_input_ends(case: Case, size: int) -> None:
    async with case.runtime() as rt:
        result = await asyncio.wait_for(sh(rt, "head -c 1 >/dev/null; echo done; exit 3", stdin=bytes(size)), 20)
        assert (result.exit_code, result.stdout) == (3, b"done\n")


async def test_what_no_command_line_can_carry_is_refused(case: Case) -> None:
    async with case.runtime() as rt:
        for argv in ([], [""], ["/bin/sh", "-c", "touch ran\0"], ["/bin/echo", "x" * 200_000]):
            with pytest.raises(ConfigError, match="argv"):
                await rt.exec(argv)
        with pytest.raises(ConfigError, match="env"):
            await rt.exec(["/bin/true"], env={"A=B": "x"})
        with pytest.raises(ConfigError, match="env"):
            await rt.exec(["/bin/true"], env={"A": "x\0"})
        assert await rt.download(["ran"]) == {}
    with pytest.raises(ConfigError, match="label"):
        case.spec(label="../../etc")


async def test_directories_are_writable_and_last_between_commands(case: Case) -> None:
    async with case.runtime() as rt:
        assert (await sh(rt, "pwd")).stdout.decode().strip() == rt.workdir
        await sh(rt, 'echo a > "$HOME/h"; echo b > w; mkdir -p sub; echo c > "$TMPDIR/t"')
        again = await sh(rt, 'pwd; cat "$HOME/h" ../w "$TMPDIR/t"', cwd=f"{rt.workdir}/sub")
        assert again.stdout.decode() == f"{rt.workdir}/sub\na\nb\nc\n"
        assert (await sh(rt, "pwd", cwd="/no/such/place")).exit_code == 127


async def test_timeout_ends_the_whole_tree(case: Case) -> None:
    beat = HEARTBEAT.format
    script = f"""
    trap '' TERM INT HUP
    setsid sh -c 'trap "" TERM; {beat("a")}' &
    (setsid sh -c '{beat("b")}' >/dev/null 2>&1 &) &
    (sh -c '({beat("c")}) &' >/dev/null 2>&1 &)
    {beat("d")}
    """
    async with case.runtime() as rt:
        result = await sh(rt, script, timeout=4.0)
        assert result.timed_out
        assert result.exit_code in (137, 143)
        assert 4.0 <= result.duration_s < 12
        for name in "abcd":
            assert await stands_still(rt, name), name
        assert (await sh(rt, "echo still usable")).stdout == b"still usable\n"


async def test_a_command_that_heeds_sigterm_may_finish(case: Case) -> None:
    async with case.runtime() as rt:
        result = await sh(rt, "trap 'echo bye; exit 9' TERM; echo go; while :; do sleep 0.05; done", timeout=3)
    assert (result.exit_code, result.timed_out, result.stdout) == (9, True, b"go\nbye\n")


async def test_cancelling_the_caller_ends_the_command(case: Case) -> None:
    async with case.runtime() as rt:
        task = spawn(sh(rt, f"trap '' TERM; {HEARTBEAT.format('beat')}"), name="exec")
        assert await begun(rt, "beat")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await stands_still(rt, "beat")


async def test_cancel_ends_commands_and_keeps_files(case: Case) -> None:
    async with case.runtime() as rt:
        task = spawn(sh(rt, HEARTBEAT.format("beat")), name="exec")
        assert await begun(rt, "beat")
        await rt.cancel()
        assert (await asyncio.wait_for(task, 5)).exit_code == 137
        assert await stands_still(rt, "beat")


async def test_stop_ends_everything_and_may_be_repeated(case: Case) -> None:
    async with case.runtime() as rt:
        task = spawn(sh(rt, "trap '' TERM; echo x > beat; sleep 100"), name="exec")
        assert await begun(rt, "beat")
        began = time.monotonic()
        await asyncio.gather(rt.stop(), rt.stop())
        assert time.monotonic() - began < 5
        assert (await asyncio.wait_for(task, 5)).exit_code in (137, 143)
        await rt.stop()
        with pytest.raises(RuntimeFault):
            await rt.exec(["/bin/true"])


async def test_a_failing_callback_ends_the_command(case: Case) -> None:
    def fail(_stream: str, _data: bytes) -> None:
        raise ValueError("the log is gone")

    async with case.runtime() as rt:
        with pytest.raises(ValueError, match="the log is gone"):
            await sh(rt, f"echo x; {HEARTBEAT.format('beat')}", on_output=fail)
        await sh(rt, "echo x >> beat")
        assert await stands_still(rt, "beat")


async def test_commands_may_overlap(case: Case) -> None:
    async with case.runtime() as rt:
        # Each waits for the file that the next one writes.
        wait = "while ! [ -e f$1 ]; do sleep 0.05; done; touch f$(($1 - 1)); exit $1"
        results = await asyncio.gather(sh(rt, "touch f3"), *(sh(rt, wait, str(i), timeout=60) for i in (1, 2, 3)))
        assert [(r.exit_code, r.timed_out) for r in results] == [(0, False), (1, False), (2, False), (3, False)]


async def test_fork_bomb_is_bounded(case: Case) -> None:
    async with case.runtime() as rt:
        result = await sh(rt, "f() { f | f & f; }; f; while :; do sleep 0.1; done", timeout=4)
        assert result.exit_code or result.timed_out
        assert result.exhausted == "pids"
        assert (await sh(rt, "echo alive")).stdout == b"alive\n"
    assert 1 <= (await rt.stats()).peak_procs < 5000


async def test_memory_hog_is_bounded(case: Case) -> None:
    async with case.runtime() as rt:
        # tail keeps everything, for it never sees a line's end.
        result = await sh(rt, "head -c 3000000000 /dev/zero | tail", timeout=30)
        assert result.exhausted == "memory", result
        assert not result.timed_out
        assert (await sh(rt, "echo alive")).stdout == b"alive\n"
        assert (await rt.stats()).peak_rss > 100 << 20


async def test_disk_filler_is_bounded(case: Case) -> None:
    async with case.runtime() as rt:
        one = await sh(rt, "head -c 200000000 /dev/zero > one", timeout=20)
        assert one.exit_code or one.exhausted == "disk"
        fill = "i=0; while :; do head -c 8000000 /dev/zero > f$i || exit 9; i=$((i+1)); sleep 0.1; done"
        many = await sh(rt, fill, timeout=30)
        assert not many.timed_out
        assert many.exhausted == "disk" or many.exit_code == 9


async def test_a_huge_log_is_counted_and_capped(case: Case) -> None:
    kept = 0

    def keep(_stream: str, data: bytes) -> None:
        nonlocal kept
        kept += len(data)

    async with case.runtime() as rt:
        result = await sh(
            rt, "dd if=/dev/zero bs=1000000 count=1000 2>/dev/null; echo end", timeout=110, on_output=keep
        )
    assert result.exit_code == 0
    assert result.output_bytes == 1_000_000_004
    assert 1 << 20 <= kept < (1 << 20) + 200
    assert result.output_tail.endswith("end\n")
    assert len(result.output_tail) <= 8192 and len(result.stdout) == 1 << 20


def _tar(*members: tarfile.TarInfo | tuple[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
            else:
                tar.addfile(member)
    return out.getvalue()


def _special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


async def test_upload_and_download(case: Case) -> None:
    script = tarfile.TarInfo("bin/run")
    script.mode, script.size = 0o4755, 0
    async with case.runtime() as rt:
        await rt.upload({"a.txt": b"one", "deep/er/b.bin": bytes(range(256)), f"{rt.home}/.conf/c": b"three"})
        await rt.upload(_tar(script, ("t.txt", b"tar"), _special("link", tarfile.SYMTYPE, "t.txt"), mode="w:gz"))
        await rt.upload(pack_files({"x/y": b"z"}), f"{rt.home}/sub")
        listed = await sh(rt, 'cat a.txt link "$HOME/.conf/c" "$HOME/sub/x/y"; test -x bin/run && ! test -u bin/run')
        assert (listed.exit_code, listed.stdout) == (0, b"onetarthreez")
        await sh(
            rt, "rm -f link; ln -s /etc/passwd link; ln -s /etc dir; mkfifo pipe; mkdir empty; chmod 000 a.txt deep"
        )
        got = await rt.download(
            ["a.txt", "deep", "link", "dir/passwd", "pipe", "empty", "nosuch", f"{rt.home}/.conf/c"]
        )
        assert got == {"a.txt": b"one", "deep/er/b.bin": bytes(range(256)), f"{rt.home}/.conf/c": b"three"}
        await rt.upload({"dir/passwd": b"mine"})
        assert (await rt.download(["dir"])) == {"dir/passwd": b"mine"}
        assert b"root:" in (await sh(rt, "cat /etc/passwd")).stdout
        for path in ("/etc/shadow", "../outside", "/proc/self/environ"):
            with pytest.raises(RuntimeFault):
                await rt.download([path])
        with pytest.raises(ResourceExhausted):
            await rt.download(["deep"], max_bytes=100)


_EVIL = {
    "traversal": _tar(("ok", b"ok"), ("../evil", b"x")),
    "deep traversal": _tar(("ok", b"ok"), ("a/../../evil", b"x")),
    "absolute": _tar(("ok", b"ok"), ("/tmp/evil", b"x")),
    "link out": _tar(("ok", b"ok"), _special("l", tarfile.SYMTYPE, "../../etc/passwd")),
    "absolute link": _tar(("ok", b"ok"), _special("l", tarfile.SYMTYPE, "/etc/passwd")),
    "behind a link": _tar(("ok", b"ok"), _special("l", tarfile.SYMTYPE, "sub"), ("l/f", b"x")),
    "hard link out": _tar(("ok", b"ok"), _special("h", tarfile.LNKTYPE, "../../etc/passwd")),
    "device": _tar(("ok", b"ok"), _special("d", tarfile.BLKTYPE)),
    "pipe": _tar(("ok", b"ok"), _special("p", tarfile.FIFOTYPE)),
    "bomb": _tar(("ok", b"ok"), ("zeros", bytes(LIMITS.disk_mb * 1_100_000)), mode="w:gz"),
    "garbage": b"this is no archive",
    "cut": _tar(("zeros", bytes(100_000)))[:50_000],
}


@pytest.mark.parametrize("evil", list(_EVIL))
async def test_malicious_archives_are_refused_whole(case: Case, evil: str) -> None:
    async with case.runtime() as rt:
        with pytest.raises(RuntimeFault):
            await rt.upload(_EVIL[evil])
        assert await rt.download(["."]) == {}


_CHANGES = """
git init -q . && git config user.email a@b && git config user.name n && git add -A && git commit -qm first
echo changed > text.txt; rm gone.txt; mv old.txt 'new name.txt'; chmod +x tool; printf '\\000\\001\\377' > data.bin
printf '*.log\\n*\\n' > .gitignore; echo hidden > hidden.log; mkdir -p nested
cd nested && git init -q . && echo in > f
git add -A; git -c user.email=a@b -c user.name=n commit -qm nested; cd ..
printf '* text eol=crlf\\n*.txt filter=evil\\n' > .gitattributes
printf 'a\\r\\nb\\n' > mixed.txt; ln -s /etc/passwd link; git add -A -f; git commit -qm second
mkdir -p caf; echo u > caf/é.txt
mkdir .GIT sub sub/.gitmodules; echo x > .GIT/x; echo x > sub/.Git; ln -s x sub/.gitmodules/link; ln -s x .GitModules
"""


async def test_patch_carries_every_change_to_another_runtime(case: Case) -> None:
    start = {"text.txt": b"was\n", "gone.txt": b"x\n", "old.txt": b"same\n" * 50, "tool": b"#!/bin/sh\n", "keep": b"k"}
    start["data.bin"] = bytes(range(256))
    async with case.runtime() as one, case.runtime() as two:
        for rt in (one, two):
            await rt.upload(start)
        first = await one.snapshot()
        assert await one.diff() == b""
        await self_contained_changes(one)
        patch = await one.diff()
        assert b"GIT binary patch" in patch
        await two.apply_patch(patch)
        assert await two.snapshot() == await one.snapshot() != first
        got = await two.download(["."])
        assert got["./data.bin"] == b"\0\1\xff" and got["./mixed.txt"] == b"a\r\nb\n"
        assert got["./nested/f"] == b"in\n" and got["./hidden.log"] == b"hidden\n"
        assert "./gone.txt" not in got and got["./new name.txt"] == start["old.txt"]
        assert not {".git", ".gitmodules"} & {part.lower() for name in got for part in name.split("/")}
        with pytest.raises(CommandFailed):
            await two.apply_patch(patch)
        assert await two.download(["."]) == got


async def self_contained_changes(rt: Runtime) -> None:
    """git itself where the runtime has it, so that commits are real; else the same files without the repositories."""
    has_git = (await sh(rt, "git --version")).exit_code == 0
    lines = _CHANGES if has_git else _CHANGES.replace("git ", ": ")
    result = await sh(rt, lines)
    assert result.exit_code == 0, result.output_tail


async def test_files_that_no_patch_can_carry_are_told(case: Case) -> None:
    async with case.runtime(limits=Limits(disk_mb=4096)) as rt:
        await rt.snapshot()
        assert (await sh(rt, "truncate -s 300M one; truncate -s 300M two")).exit_code == 0
        with pytest.raises(ResourceExhausted, match="more than 512 MiB of changed files"):
            await rt.diff()


async def test_patches_cannot_leave_the_working_directory(case: Case) -> None:
    head = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"
    async with case.runtime() as rt:
        await rt.snapshot()
        for path in ("../evil", "/tmp/evil", ".git/hooks/post-checkout", "a/.git/config"):
            with pytest.raises(CommandFailed):
                await rt.apply_patch(head.format(path).encode())
        await sh(rt, 'ln -s "$HOME" out')
        link = head.format("out/evil")
        with pytest.raises(CommandFailed):
            await rt.apply_patch(link.encode())
        assert (await sh(rt, 'ls "$HOME"')).stdout == b""
        with pytest.raises(CommandFailed):
            await rt.apply_patch(b"not a patch")


async def test_stats(case: Case) -> None:
    async with case.runtime() as rt:
        await sh(rt, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 0.3")
        inside = await rt.stats()
        assert inside.cpu_s > 0.02 and inside.peak_rss > 100_000 and inside.peak_procs >= 1
    after = await rt.stats()
    assert after.cpu_s >= inside.cpu_s and after.peak_rss >= inside.peak_rss


async def test_only_the_proxy_is_reachable(case: Case, tmp_path: Path) -> None:
    other = free_port()
    proxy = Unix(tmp_path / "sock" / "proxy.sock")
    server = await proxy.serve()
    host = await asyncio.start_server(proxy.answer, "127.0.0.1", other)
    try:
        async with case.runtime(network="proxy", proxy_socket=proxy.path) as rt:
            url = f"{rt.base_url('KEY')}/v1/models"
            assert url.startswith("http://127.0.0.1:") and url.endswith("/s/KEY/v1/models")
            result = await rt.exec(case.fetch(url), proxy=True)
            assert (result.exit_code, result.stdout) == (0, b"proxy"), result.output_tail
            assert proxy.seen[0].startswith(b"GET /s/KEY/v1/models ")
            assert (await rt.exec(case.fetch(url))).exit_code != 0, "the relay runs only where it was asked for"
            assert len(proxy.seen) == 1
            if case.isolated:
                for away in (f"http://127.0.0.1:{other}/", "http://192.0.2.1/", "http://example.org/"):
                    assert (await rt.exec(case.fetch(away), proxy=True, timeout=30)).exit_code != 0
                assert len(proxy.seen) == 1
            else:
                assert rt.isolation == "none"
            await client_that_leaves_is_noticed(case, rt, proxy)
            server.close()
            server = await proxy.serve()
            again = await rt.exec(case.fetch(url), proxy=True)
            assert (again.exit_code, again.stdout) == (0, b"proxy"), "a restarted proxy is reached again"
        async with case.runtime() as rt:
            assert rt.proxy_base == ""
    finally:
        server.close()
        host.close()


async def client_that_leaves_is_noticed(case: Case, rt: Runtime, proxy: Unix) -> None:
    hanging = spawn(rt.exec(case.fetch(f"{rt.base_url('KEY')}/hang"), proxy=True), name="hanging")
    assert await soon(lambda: any(b"/hang" in seen for seen in proxy.seen), 20)
    hanging.cancel()
    assert await soon(proxy.closed.is_set, 20)
    await asyncio.wait([hanging])


@pytest.mark.timeout(400)
async def test_fifty_attempts_leave_nothing(case: Case) -> None:
    def traces() -> tuple[int, int, int]:
        mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        # Others on this machine mount and unmount meanwhile.
        places = [str(case.root), case.options.get("docker_host", str(case.root)).removeprefix("unix://")]
        ours = [m for m in mounts if any(str(Path(p).parent) in m for p in places)]
        return len(os.listdir("/proc/self/fd")), len(mine), len(ours)

    async def once() -> None:
        async with case.runtime(limits=Limits(memory_mb=256, pids=64, grace_s=0.2)) as rt:
            await rt.upload({"f": b"x"})
            await rt.snapshot()
            await sh(rt, "(setsid sleep 100 &) ; echo y > g; exit 3")
            assert b"+y" in await rt.diff()

    # The first attempts fill pools of threads and connections, which are bounded and stay.
    for _ in range(4):
        await asyncio.gather(*(once() for _ in range(5)))
    before = traces()
    for _ in range(6):
        await asyncio.gather(*(once() for _ in range(5)))
    # Fewer is no leak: what somebody else had mounted may have gone meanwhile.
    assert await soon(lambda: all(a <= b for a, b in zip(traces(), before, strict=True))), (before, traces())


@pytest.mark.parametrize("how", ["stopped", "cancelled"])
@pytest.mark.parametrize("after_s", [0, 0.002, 0.01])
async def test_a_start_that_is_broken_off_leaves_nothing(case: Case, how: str, after_s: float) -> None:
    rt = make_runtime(case.spec())
    start = spawn(rt.start(), name="start")
    await asyncio.sleep(after_s)
    was_over = start.done()
    await (rt.stop() if how == "stopped" or was_over else cancel_and_wait(start))
    await asyncio.wait({start}, timeout=20)
    if not was_over:
        with pytest.raises(RuntimeFault if how == "stopped" else asyncio.CancelledError):
            start.result()
    with pytest.raises(RuntimeFault):
        await rt.exec(["/bin/true"])
