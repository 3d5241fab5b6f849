"""The bubblewrap command line: which namespaces, which files, and whether this host can do it at all.

Own user, pid, mount, network, ipc, uts and cgroup namespaces; the system read-only and only as much of `/etc` as
programs need; no capabilities, no nested user namespaces. With `root` as the caller the sandbox still sees an ordinary
user.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_runtime.base import Mount

__all__ = ["command", "missing", "prefix", "system_python", "write_etc"]

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "fonts", "inputrc", "java-17-openjdk",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "login.defs", "magic", "mime.types", "nsswitch.conf",
    "perl", "pki", "profile", "profile.d", "protocols", "python3", "python3.11", "python3.12", "python3.13", "services",
    "shells", "skel", "ssl", "terminfo", "timezone", "xdg",
)  # fmt: skip
_SHM_BYTES = 256 << 20


def prefix(uid: int = 1000, gid: int = 1000, *, share_net: bool = False) -> list[str]:
    """Namespaces and the read-only system."""
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(uid), "--gid", str(gid)]
    argv += ["--share-net"] if share_net else []
    argv += ["--hostname", "polar", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in _SYSTEM:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm"]
    argv += [
        "--perms",
        "0755",
        "--size",
        str(16 << 20),
        "--tmpfs",
        "/run",
        "--dir",
        "/var",
        "--symlink",
        "../tmp",
        "/var/tmp",
    ]
    return argv


def write_etc(directory: Path, uid: int, gid: int, home: str) -> list[Mount]:
    """The few files of `/etc` that name the sandbox's own user and host."""
    directory.mkdir()
    files = {
        "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{gid}:agent:{home}:/bin/bash\n",
        "group": f"root:x:0:\nagent:x:{gid}:\n",
        "hosts": "127.0.0.1 localhost polar\n::1 localhost\n",
        "hostname": "polar\n",
        "resolv.conf": "",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    return [Mount(directory / name, f"/etc/{name}") for name in files]


def command(
    base: Sequence[str],
    *,
    read_only: Sequence[Mount],
    writable: Mapping[str, Path],
    status_fd: int,
    argv: Sequence[str],
) -> list[str]:
    """`argv` in the sandbox. `writable` maps inside paths to host directories; `status_fd` gets bubblewrap's JSON."""
    line = list(base)
    for path, source in writable.items():
        line += ["--bind", str(source), path]
    for mount in read_only:
        line += ["--ro-bind", str(mount.source), mount.target]
    return [*line, "--remount-ro", "/", "--json-status-fd", str(status_fd), "--", *argv]


@functools.cache
def missing() -> str:
    """Why bubblewrap can't be used here; empty where it can. Probed once."""
    if shutil.which("bwrap") is None:
        return "bubblewrap isn't installed"
    probe = [*prefix(), "--remount-ro", "/", "--", "/bin/true"]
    done = subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=20)
    return done.stderr.decode(errors="replace").strip()[-300:] if done.returncode else ""


def system_python() -> tuple[str, list[Mount]]:
    """A Python for the relay and the mounts it needs: this one, from outside its virtual environment."""
    executable = os.path.realpath(sys.executable)
    base = Path(os.path.realpath(sys.base_prefix))
    if str(base) == "/usr" or base.is_relative_to("/usr"):
        return executable, []
    return executable, [Mount(base, str(base))]
