"""A daemon of the tests' own and an image made from a static busybox: nothing is pulled."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker

IMAGE = "polar-test/busybox:1"
_SCRIPT = Path(__file__).parent / "docker_up.sh"


def _script(action: str, directory: Path | None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"POLAR_TEST_DOCKER": str(directory)} if directory else {})}
    return subprocess.run([_SCRIPT, action], env=env, capture_output=True, text=True, timeout=120, check=False)


def start_daemon(directory: Path | None = None) -> str:
    """The address of a daemon that is running now."""
    done = _script("start", directory)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def stop_daemon(directory: Path | None = None) -> None:
    assert _script("stop", directory).returncode == 0


@contextmanager
def own_daemon(directory: Path | None = None) -> Iterator[str]:
    """The daemon's address; one that wasn't running before is stopped afterwards."""
    was_running = _script("status", directory).returncode == 0
    try:
        yield start_daemon(directory)
    finally:
        if not was_running:
            stop_daemon(directory)


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


GLIBC_IMAGE = "polar-test/glibc:1"
_GLIBC = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libresolv.so.2")


def glibc_image(host: str) -> str:
    """busybox, bash and this machine's C library, and nothing else: no node, no Python, no libstdc++."""
    client = docker.DockerClient(base_url=host)
    try:
        if not client.images.list(GLIBC_IMAGE):
            repository, tag = GLIBC_IMAGE.split(":")
            client.api.import_image_from_data(_with_glibc(_root_filesystem()), repository=repository, tag=tag)
    finally:
        client.close()
    return GLIBC_IMAGE


def _with_glibc(root: bytes) -> bytes:
    listed = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
    paths = set(re.findall(r"(/\S+) \(0x", listed))
    directory = next(Path(p).parent for p in paths if p.endswith("/libc.so.6"))
    paths |= {str(directory / name) for name in _GLIBC if (directory / name).exists()} | {"/bin/bash"}
    out = io.BytesIO(root)
    with tarfile.open(fileobj=out, mode="a") as tar:
        for path in sorted(paths):
            data = Path(path).read_bytes()
            info = tarfile.TarInfo(path.lstrip("/"))
            info.mode, info.size = 0o755, len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def foreign_image(host: str) -> str:
    """An image for a machine that this one is not."""
    name = "polar-test/foreign:1"
    client = docker.DockerClient(base_url=host)
    try:
        if not client.images.list(name):
            client.images.load(_saved_image(name, "s390x"))
    finally:
        client.close()
    return name


def _saved_image(name: str, architecture: str) -> bytes:
    layer = _tar({"file": b"x"})
    digest = hashlib.sha256(layer).hexdigest()
    root = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    config = json.dumps({"architecture": architecture, "os": "linux", "config": {}, "rootfs": root}).encode()
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    return _tar({"config.json": config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()})


def _tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


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


def with_directory(root: bytes, path: str, uid: int) -> bytes:
    """A root file system and one more directory, which is `uid`'s."""
    out = io.BytesIO(root)
    with tarfile.open(fileobj=out, mode="a") as tar:
        info = tarfile.TarInfo(path)
        info.type, info.mode, info.uid = tarfile.DIRTYPE, 0o755, uid
        tar.addfile(info)
    return out.getvalue()


def image_with(host: str, path: str, data: bytes) -> str:
    """The busybox image and one more file."""
    out = io.BytesIO(_root_filesystem())
    with tarfile.open(fileobj=out, mode="a") as tar:
        info = tarfile.TarInfo(path)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    client = docker.DockerClient(base_url=host)
    try:
        client.api.import_image_from_data(out.getvalue(), repository="polar-test/with-file", tag="1")
    finally:
        client.close()
    return "polar-test/with-file:1"


def unpack_root(directory: Path) -> None:
    """The same root file system as a directory."""
    with tarfile.open(fileobj=io.BytesIO(_root_filesystem())) as tar:
        tar.extractall(directory, filter="fully_trusted")


def containers(host: str, root: Path | None = None) -> list[str]:
    """Ids of the containers that attempts, below `root` if one is given, have left."""
    label = f"polar.root={root.absolute()}" if root else "polar.attempt"
    client = docker.DockerClient(base_url=host)
    try:
        return [c["Id"] for c in client.api.containers(all=True, filters={"label": label})]
    finally:
        client.close()


def kill_container(host: str, container: str) -> None:
    """As the kernel or an administrator might."""
    client = docker.DockerClient(base_url=host)
    try:
        client.api.kill(container)
    finally:
        client.close()


def processes(host: str, container: str) -> list[str]:
    """Command lines of what runs in a container; none where it is gone."""
    client = docker.DockerClient(base_url=host)
    try:
        return [" ".join(row) for row in client.api.top(container)["Processes"] or []]
    except docker.errors.APIError:
        return []
    finally:
        client.close()
