"""The relay as a program of its own: exit codes, signals, limits, and bytes that pass unchanged."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_common.nats_server import free_port
from polar_runtime import procs, relay

_WAITING = ["--", "/bin/sh", "-c", "echo up; sleep 100"]
_RELAY = [sys.executable, "-I", "-S", relay.__file__]


def run(*args: str, command: str, timeout: float = 20, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    line = [*_RELAY, *args, "--", "/bin/sh", "-c", command]
    return subprocess.run(line, capture_output=True, timeout=timeout, check=False, **kwargs)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("kill -INT $$", 130), ("nosuch", 127)]
)
def test_exit_codes_pass_through(command: str, code: int) -> None:
    assert run(command=command).returncode == code
    assert run("--own-pipes", command=command).returncode == code


def test_programs_that_cannot_start(tmp_path: Path) -> None:
    for argv, code in (["/no/such"], 127), ([str(tmp_path)], 126):
        done = subprocess.run([*_RELAY, "--", *argv], capture_output=True, check=False)
        assert done.returncode == code
        assert argv[0].encode() in done.stderr
    assert run("--chdir", "/no/such", command="echo ran").returncode == 127


def test_directory_and_limits(tmp_path: Path) -> None:
    done = run(
        "--chdir", str(tmp_path), "--limit", "fsize=1024", "--limit", "nofile=32", command="pwd; echo $PWD; ulimit -n"
    )
    assert done.stdout.decode().split() == [str(tmp_path), str(tmp_path), "32"]
    big = run("--chdir", str(tmp_path), "--limit", "fsize=1024", command="head -c 5000 /dev/zero > big")
    assert big.returncode != 0
    assert (tmp_path / "big").stat().st_size == 1024


def test_a_signal_reaches_the_whole_group_and_the_grace_ends() -> None:
    line = [*_RELAY, "--grace", "0.3", "--", "/bin/sh", "-c", "trap '' TERM; sleep 100 & echo up; wait; sleep 100"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        below = [procs.ProcessId.of(pid) for pid in procs.tree(process.pid)[1:]]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 137
    assert len(below) >= 2
    assert not [p for p in below if p is not None and p.alive()]


def test_orphans_are_adopted_and_end_with_the_command(tmp_path: Path) -> None:
    beat = "while :; do echo x >> beat; sleep 0.02; done"
    command = f"(setsid sh -c '{beat}' >/dev/null 2>&1 &); while ! [ -s beat ]; do sleep 0.02; done"
    assert run("--adopt", "--chdir", str(tmp_path), command=command).returncode == 0
    size = (tmp_path / "beat").stat().st_size
    time.sleep(0.3)
    assert (tmp_path / "beat").stat().st_size == size


def test_own_pipes_end_with_the_command_and_lose_nothing() -> None:
    began = time.monotonic()
    command = "(setsid sleep 5 &); head -c 300000 /dev/zero; echo end; echo err >&2"
    done = run("--own-pipes", command=command)
    assert time.monotonic() - began < 4
    assert done.stdout == bytes(300000) + b"end\n"
    assert done.stderr == b"err\n"


class Echo:
    """Answers each connection on a Unix socket with what it got, once the client has ended its side."""

    def __init__(self, path: Path) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(64)
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        data = b""
        while piece := client.recv(65536):
            data += piece
        self.ended.set()
        with client, contextlib.suppress(OSError):
            client.sendall(data[::-1])


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[tuple[Echo, int]]:
    server, port = Echo(tmp_path / "s"), free_port()
    line = [
        *_RELAY,
        "--listen",
        str(port),
        "--socket",
        str(tmp_path / "s"),
        "--",
        "/bin/sh",
        "-c",
        "echo up; sleep 100",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield server, port
        process.terminate()
        assert process.wait(10) == 143
    server.server.close()


def exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        got = b""
        while piece := client.recv(65536):
            got += piece
    return got


def test_bytes_pass_unchanged_and_in_parallel(echo: tuple[Echo, int]) -> None:
    _, port = echo
    big = os.urandom(3_000_000)
    assert exchange(port, big) == big[::-1]
    results: list[bool] = []
    bodies = [os.urandom(20_000) for _ in range(20)]
    threads = [threading.Thread(target=lambda b=b: results.append(exchange(port, b) == b[::-1])) for b in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


def test_a_client_that_leaves_is_noticed(echo: tuple[Echo, int]) -> None:
    server, port = echo
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"x")
    client.close()
    assert server.ended.wait(5)


def test_without_a_proxy_the_harness_gets_an_http_error(tmp_path: Path) -> None:
    port = free_port()
    line = [
        *_RELAY,
        "--listen",
        str(port),
        "--socket",
        str(tmp_path / "none"),
        "--",
        "/bin/sh",
        "-c",
        "echo up; sleep 100",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        answer = exchange(port, b"")
        process.terminate()
    assert answer.startswith(b"HTTP/1.1 503 ") and b"proxy_unreachable" in answer


def test_a_proxy_that_is_being_started_again_is_waited_for(tmp_path: Path) -> None:
    """Programs give up after a few quick tries; a proxy that was killed takes some seconds."""
    path, port, dead = tmp_path / "s", free_port(), socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    dead.close()
    line = [*_RELAY, "--listen", str(port), "--socket", str(path), *_WAITING]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"hello")
            time.sleep(1)
            path.unlink()
            again = Echo(path)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b"olleh"
        again.server.close()
        process.terminate()


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("--listen", port, "--socket", "/x", command="echo ran")
    assert done.returncode == 125
    assert done.stdout == b"" and port.encode() in done.stderr
