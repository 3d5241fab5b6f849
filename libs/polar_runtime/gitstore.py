"""Trees and binary patches of a working directory, kept in a git directory that the agent never sees.

git is given contents, never a work tree: attributes, filters, ignore rules, nested repositories and hooks of the
agent's making have nothing to act on. Contents are hashed here and streamed into `git fast-import`; a file whose size,
inode and change time are those of an earlier walk isn't read again.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from polar_common.errors import CommandFailed, ResourceExhausted, RuntimeFault, RuntimeUnavailable
from polar_runtime.beneath import Found

__all__ = ["Change", "GitStore", "Node"]

# `-c` settings beat every file; the files are switched off by the environment.
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "polar",
    "GIT_AUTHOR_EMAIL": "polar@localhost",
    "GIT_COMMITTER_NAME": "polar",
    "GIT_COMMITTER_EMAIL": "polar@localhost",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
}


# Of what git itself is given. The empty tree is known to every git without being stored.
_CONFIG = ("-c", "core.protectNTFS=false", "-c", "gc.auto=0")
_EMPTY = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
# How much a binary part of a patch writes; lines of text parts begin with a sign of their own.
_INFLATED = re.compile(rb"^GIT binary patch\nliteral (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Node:
    """One file or link. `mode` is git's (`100644`, `100755`, `120000`); `size` in bytes; `read` yields the content (a
    link's target) and may raise OSError where it vanished meanwhile. `stamp` identifies an unchanged content, None
    where that can't be told."""

    path: bytes
    mode: str
    size: int
    read: Callable[[], bytes]
    stamp: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What to write: `read` yields the content, None removes the path."""

    path: bytes
    mode: str
    read: Callable[[], bytes] | None


class GitStore:
    """Blocking; use it from a thread. Not for concurrent use. `max_bytes` bounds the files of a tree, `max_patch` a
    patch, and `max_changed` the files in it: git holds them in memory, and of zeros a patch may hold a thousand times
    its size."""

    def __init__(
        self, git_dir: Path, *, max_bytes: int = 4 << 30, max_patch: int = 256 << 20, max_changed: int = 512 << 20
    ) -> None:
        self.git_dir = git_dir
        self.max_bytes = max_bytes
        self.max_patch = max_patch
        self.max_changed = max_changed
        self._known: dict[bytes, tuple[tuple[int, ...], str]] = {}
        self._serial = 0

    def unread(self, path: bytes, stamp: tuple[int, ...] | None) -> bool:
        """Whether `write` would read this file: it is new or may have changed."""
        seen = self._known.get(path)
        return seen is None or stamp is None or seen[0] != stamp

    def check_changed(self, nodes: Iterable[Node | Found]) -> None:
        """`ResourceExhausted` where the files that `write` would read are too much for a patch."""
        self._check(sum(node.size for node in nodes if self.unread(node.path, node.stamp)))

    def _check(self, size: int) -> None:
        if size > self.max_changed:
            raise ResourceExhausted(f"more than {self.max_changed >> 20} MiB of changed files", "patch")

    def write(self, nodes: Iterable[Node]) -> str:
        """Store a tree; returns its id. `ResourceExhausted` where the files exceed `max_bytes`."""
        nodes = list(nodes)
        if not nodes:
            self._known = {}
            return _EMPTY
        self._ready()
        known: dict[bytes, tuple[tuple[int, ...], str]] = {}
        total = 0
        self._serial += 1
        ref = f"refs/polar/{self._serial}"
        with self._popen("fast-import", "--quiet", "--done", stdin=subprocess.PIPE) as process:
            pipe = process.stdin
            assert pipe is not None
            try:
                pipe.write(b"commit %s\ncommitter polar <polar@localhost> 0 +0000\ndata 0\ndeleteall\n" % ref.encode())
                for node in nodes:
                    total += node.size
                    if total > self.max_bytes:
                        raise ResourceExhausted(
                            f"more than {self.max_bytes >> 20} MiB in the working directory", "disk"
                        )
                    self._put(pipe, node, known)
                pipe.write(b"done\n")
            except BrokenPipeError:
                pass
            except BaseException:
                process.kill()
                raise
            finally:
                with suppress(BrokenPipeError):
                    pipe.close()
            error = process.stderr.read() if process.stderr else b""
        if process.returncode:
            raise RuntimeFault(f"git fast-import: {error.decode(errors='replace')[-500:]}")
        self._known = known
        return self._run("rev-parse", f"{ref}^{{tree}}").decode().strip()

    def _put(self, pipe: IO[bytes], node: Node, known: dict[bytes, tuple[tuple[int, ...], str]]) -> None:
        if not self.unread(node.path, node.stamp):
            seen = known[node.path] = self._known[node.path]
            pipe.write(b"M %s %s %s\n" % (node.mode.encode(), seen[1].encode(), _quoted(node.path)))
            return
        try:
            data = node.read()
        except OSError:
            return
        if node.stamp is not None:
            sha = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            known[node.path] = (node.stamp, sha)
        pipe.write(b"M %s inline %s\ndata %d\n" % (node.mode.encode(), _quoted(node.path), len(data)))
        pipe.write(data)
        pipe.write(b"\n")

    def diff(self, before: str, after: str) -> bytes:
        """Binary patch between two trees, with full object names. `ResourceExhausted` above `max_patch` bytes."""
        if before == after:
            return b""
        # Renames are written as removal and addition: such a patch applies to any tree that has the old file.
        args = ("diff-tree", "-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv")
        with self._popen(*args, "--no-color", "--src-prefix=a/", "--dst-prefix=b/", before, after) as process:
            assert process.stdout is not None
            patch = process.stdout.read(self.max_patch + 1)
            if len(patch) > self.max_patch:
                process.kill()
                raise ResourceExhausted(f"the patch is larger than {self.max_patch >> 20} MiB", "patch")
            error = process.stderr.read() if process.stderr else b""
        if process.returncode:
            raise RuntimeFault(f"git diff-tree: {error.decode(errors='replace')[-500:]}")
        return patch

    def apply(self, tree: str, patch: bytes) -> list[Change]:
        """What `patch` changes in `tree`. `CommandFailed` where it doesn't apply or names a path outside,
        `ResourceExhausted` where it writes more than `max_changed` bytes."""
        self._check(sum(map(int, _INFLATED.findall(patch))))
        self._ready()
        index = self.git_dir / "apply.index"
        index.unlink(missing_ok=True)
        env = {"GIT_INDEX_FILE": str(index)}
        try:
            self._run("read-tree", tree, env=env)
            self._run("apply", "--cached", "--binary", "--whitespace=nowarn", "-", env=env, stdin=patch)
            after = self._run("write-tree", env=env).decode().strip()
        finally:
            index.unlink(missing_ok=True)
        return self._changes(tree, after)

    def _changes(self, before: str, after: str) -> list[Change]:
        fields = self._run("diff-tree", "-r", "-z", "--no-renames", "--raw", before, after).split(b"\0")
        changed = [(meta.split(b" "), path) for meta, path in zip(fields[0::2], fields[1::2], strict=False)]
        removed = [Change(path, "", None) for (*_, status), path in changed if status == b"D"]
        written = [(path, mode, sha) for (_, mode, _, sha, status), path in changed if status != b"D"]
        asked = b"".join(sha + b"\n" for _, _, sha in written)
        sizes = self._run("cat-file", "--batch-check=%(objectsize)", stdin=asked)
        self._check(sum(map(int, sizes.split())))
        return removed + [Change(path, mode.decode(), partial(self._blob, sha.decode())) for path, mode, sha in written]

    def _blob(self, sha: str) -> bytes:
        return self._run("cat-file", "blob", sha)

    def _ready(self) -> None:
        if not (self.git_dir / "HEAD").exists():
            self.git_dir.mkdir(parents=True, exist_ok=True)
            self._run("init", "-q", "--bare", "--template=")

    def _popen(self, *args: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        command = ["git", *_CONFIG, "-c", "core.quotePath=false", f"--git-dir={self.git_dir}", *args]
        try:
            return subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_ENV, cwd=self.git_dir
            )
        except FileNotFoundError as error:
            raise RuntimeUnavailable("git isn't installed; patches need it") from error

    def _run(self, *args: str, env: dict[str, str] | None = None, stdin: bytes = b"") -> bytes:
        command: Sequence[str] = ["git", *_CONFIG, f"--git-dir={self.git_dir}", *args]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, env={**_ENV, **(env or {})}, cwd=self.git_dir, check=False
            )
        except FileNotFoundError as error:
            raise RuntimeUnavailable("git isn't installed; patches need it") from error
        if done.returncode:
            raise CommandFailed(f"git {args[0]}", done.returncode, done.stderr.decode(errors="replace")[-2000:])
        return done.stdout


def _quoted(path: bytes) -> bytes:
    """C-style quoting as fast-import reads it."""
    out = bytearray(b'"')
    for byte in path:
        if byte in b'"\\':
            out += b"\\" + bytes([byte])
        elif byte < 0x20 or byte >= 0x7F:
            out += b"\\%03o" % byte
        else:
            out.append(byte)
    return bytes(out + b'"')
