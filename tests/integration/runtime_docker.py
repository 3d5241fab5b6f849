"""A daemon of the tests' own and an image made from a static busybox: nothing is pulled."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker

IMAGE = "polar-test/busybox:1"
_SCRIPT = Path(__file__).parents[1] / "docker_up.sh"


@contextmanager
def own_daemon() -> Iterator[str]:
    """The daemon's address; one that wasn't running before is stopped afterwards."""
    was_running = subprocess.run([_SCRIPT, "status"], check=False).returncode == 0
    done = subprocess.run([_SCRIPT, "start"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    host = done.stdout.strip()
    try:
        yield host
    finally:
        if not was_running:
            subprocess.run([_SCRIPT, "stop"], check=True, timeout=60)


def busybox_image(host: str) -> str:
    """Make the image unless the daemon has it."""
    client = docker.DockerClient(base_url=host)
    try:
        if not client.images.list(IMAGE):
            repository, tag = IMAGE.split(":")
            client.api.import_image_from_data(_root_filesystem(), repository=repository, tag=tag)
    finally:
        client.close()
    return IMAGE


def _root_filesystem() -> bytes:
    busybox = shutil.which("busybox")
    assert busybox, "busybox isn't installed (Debian: apt-get install busybox-static)"
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("bin", "etc", "usr", "usr/bin", "root"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        program = Path(busybox).read_bytes()
        info = tarfile.TarInfo("bin/busybox")
        info.mode, info.size = 0o755, len(program)
        tar.addfile(info, io.BytesIO(program))
        for applet in {*applets} - {"busybox"}:
            info = tarfile.TarInfo(f"bin/{applet}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(info)
        users = b"root:x:0:0:root:/root:/bin/sh\n"
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(users)
        tar.addfile(info, io.BytesIO(users))
    return out.getvalue()


def unpack_root(directory: Path) -> None:
    """The same root file system as a directory."""
    with tarfile.open(fileobj=io.BytesIO(_root_filesystem())) as tar:
        tar.extractall(directory, filter="fully_trusted")


def containers(host: str, root: Path) -> list[str]:
    """Ids of the containers that attempts below `root` have left."""
    client = docker.DockerClient(base_url=host)
    try:
        return [c.id for c in client.containers.list(all=True, filters={"label": f"polar.root={root.absolute()}"})]
    finally:
        client.close()
