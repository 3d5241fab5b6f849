"""Runs one command inside a sandbox and, if asked, carries its HTTP to the model proxy.

    python3 relay.py [--listen PORT --socket PATH] [--limit NAME=VALUE]... [--grace S] [--chdir DIR] [--adopt]
        [--own-pipes] -- COMMAND [ARG]...
    python3 relay.py --idle
    python3 relay.py --signal-all NUMBER

Listens on 127.0.0.1:PORT and joins every connection with the proxy's Unix socket; starts the command as a child in a
session of its own; passes SIGTERM, SIGINT and SIGHUP on to the child's process group; kills what is left below it when
the command has ended; and ends with the command's exit code (128 + n after signal n, 127 when there is no such program,
126 when it can't be executed). Where no process namespace holds the command's orphans, `--adopt` does: a daemonised
process becomes a child of this one, and all end with whoever started it. With `--own-pipes` the command writes into
pipes of the relay's, so that this one's output ends with it even where a daemonised process keeps them open.

`--idle` is a container's first process: it reaps and waits. `--signal-all` signals every other process there.

Standard library only and no import of anything of Polar's: the file is mounted into sandboxes and run with whatever
Python 3.8 or newer is there. The other half is the Unix listener of `polar_proxy`.
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import select
import signal
import socket
import sys
import threading
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE_S = 15.0
_LIMITS = {
    "nproc": resource.RLIMIT_NPROC,
    "fsize": resource.RLIMIT_FSIZE,
    "data": resource.RLIMIT_DATA,
    "nofile": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
}


def listen(port: int) -> socket.socket:
    """A listening socket on 127.0.0.1:port. OSError where the port is taken."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen(256)
    return server


def serve(server: socket.socket, path: str) -> None:
    """Join every connection of `server` with the Unix socket `path`, in daemon threads."""
    threading.Thread(target=_accept, args=(server, path), daemon=True).start()


def _accept(server: socket.socket, path: str) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):
                return
            time.sleep(0.05)  # out of descriptors for a moment
            continue
        threading.Thread(target=_join, args=(client, path), daemon=True).start()


def _connect(client: socket.socket, path: str) -> socket.socket:
    """A proxy that is being started again is waited for: harnesses give up after a few quick tries."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        upstream = socket.socket(socket.AF_UNIX)
        try:
            upstream.connect(path)
            return upstream
        except OSError as error:
            upstream.close()
            away = error.errno in (errno.ECONNREFUSED, errno.ENOENT, errno.EAGAIN)
            if not away or time.monotonic() > deadline or _left(client):
                raise
        time.sleep(0.1)


def _left(client: socket.socket) -> bool:
    """Whether a client has ended its side and has said nothing."""
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _join(client: socket.socket, path: str) -> None:
    upstream = None
    try:
        upstream = _connect(client, path)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pump, args=(upstream, client), daemon=True)
        back.start()
        _pump(client, upstream)
        back.join()
    except OSError as error:
        _refuse(client, error)
    finally:
        client.close()
        if upstream is not None:
            upstream.close()


def _refuse(client: socket.socket, error: OSError) -> None:
    """A harness is better served by an HTTP error it can retry on than by a connection that breaks off."""
    body = f'{{"error":{{"type":"proxy_unreachable","message":"model proxy: {error.strerror}"}}}}'.encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    try:
        client.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        client.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until the source ends, then end the sink. When the sink is gone, end the source: the proxy must learn that
    its client left, and the client that the proxy did."""
    try:
        while True:
            data = source.recv(65536)
            if not data:
                break
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for side in (source, sink):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def start(argv: list[str], limits: dict[str, int], directory: str = "", output: tuple[int, int] = (1, 2)) -> int:
    """Fork and execute; returns the child's pid. Exits 127 or 126 in the child where that fails."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number, fd in enumerate(output, 1):
            if fd != number:
                os.dup2(fd, number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for name, value in limits.items():
            _limit(_LIMITS[name], value)
        what = directory
        if directory:
            os.chdir(directory)
            os.putenv("PWD", directory)  # some programs trust it more than the kernel
        what = argv[0]
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"polar: cannot start, {what}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126)
    os._exit(126)


class Copier:
    """The command's standard output and error, copied through pipes of our own."""

    def __init__(self) -> None:
        self._pairs = [os.pipe(), os.pipe()]
        self._threads: list[threading.Thread] = []
        self.child_ends = (self._pairs[0][1], self._pairs[1][1])

    def begin(self) -> None:
        """After the fork: give up the child's ends and copy."""
        for number, (source, sink) in enumerate(self._pairs, 1):
            os.close(sink)
            thread = threading.Thread(target=self._copy, args=(source, number), daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        """After the command's end: what it wrote is passed on; whoever else holds the pipe is not waited for."""
        for thread, (source, _) in zip(self._threads, self._pairs):  # noqa: B905 - Python 3.8
            while thread.is_alive() and select.select([source], [], [], 0)[0]:
                thread.join(0.02)
            thread.join(0.05)

    @staticmethod
    def _copy(source: int, sink: int) -> None:
        try:
            while True:
                data = os.read(source, 65536)
                if not data:
                    return
                while data:
                    data = data[os.write(sink, data) :]
        except OSError:
            return


def idle() -> None:
    """Reap for ever. As a container's first process it can't be killed from inside, having no handlers."""
    signal.set_wakeup_fd(_wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _n, _frame: None)
    while True:
        _reap()
        _ended.clear()
        _sleep(60)


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def wait(child: int, grace: float, wanted: list[int]) -> int:
    """Reap until the child has ended; then end what it left. `wanted` collects the signals that came in."""
    deadline: float | None = None
    while True:
        while wanted:
            number = wanted.pop(0)
            _kill_group(child, number)
            deadline = deadline or time.monotonic() + grace
        if deadline and time.monotonic() > deadline:
            kill_all()
            deadline = time.monotonic() + 1
        _reap()
        if child in _ended:
            status = _ended[child]
            kill_all()
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        _sleep(0.2 if deadline else 5.0)


_ended: dict[int, int] = {}


def _reap() -> None:
    """Wait for all that has ended; how goes into `_ended`."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _ended[pid] = status


_wake_r, _wake_w = os.pipe()
os.set_blocking(_wake_w, False)
os.set_blocking(_wake_r, False)


def _sleep(seconds: float) -> None:
    """Until a signal arrives: its number is written to the pipe, so none is missed between check and sleep."""
    select.select([_wake_r], [], [], seconds)
    try:
        os.read(_wake_r, 4096)
    except BlockingIOError:
        return


def _kill_group(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except (ProcessLookupError, PermissionError):
        return


def descendants(root: int) -> list[int]:
    """Pids below `root`, by one pass over /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill_all() -> None:
    """Kill everything below this process, and again until nothing is left: forks race with the killing."""
    for _ in range(100):
        pids = descendants(os.getpid())
        if not pids:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
        time.sleep(0.01)
        _reap()


def adopt_orphans() -> None:
    """Become the parent of every orphan below, and get SIGTERM when the process that started this one ends."""
    import ctypes  # slow to load, and not in every Python

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="relay.py", description="run a command next to the model proxy")
    parser.add_argument("--listen", type=int, default=0, metavar="PORT")
    parser.add_argument("--socket", default="", metavar="PATH")
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--grace", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--chdir", default="", metavar="DIR")
    parser.add_argument("--adopt", action="store_true")
    parser.add_argument("--own-pipes", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--signal-all", type=int, default=0, metavar="NUMBER")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(args)
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    limits = {name: int(value) for name, value in (item.split("=", 1) for item in options.limit)}
    if options.idle:
        idle()
    if options.signal_all:
        os.kill(-1, options.signal_all)
        return 0
    return run(argv, limits, options)


def run(argv: list[str], limits: dict[str, int], options: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 125 where the port is taken."""
    parent = os.getppid()
    wanted: list[int] = []
    signal.set_wakeup_fd(_wake_w, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: wanted.append(n))
    signal.signal(signal.SIGCHLD, lambda _n, _frame: None)
    if options.adopt:
        adopt_orphans()
        if os.getppid() != parent:
            return 143
    server = None
    if options.listen:
        try:
            server = listen(options.listen)
        except OSError as error:
            sys.stderr.write(f"polar: cannot listen on 127.0.0.1:{options.listen}: {error.strerror}\n")
            return 125
    copier = Copier() if options.own_pipes else None
    child = start(argv, limits, options.chdir, copier.child_ends if copier else (1, 2))
    if copier:
        copier.begin()
    if server:
        serve(server, options.socket)
    code = wait(child, options.grace, wanted)
    if copier:
        copier.finish()
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
