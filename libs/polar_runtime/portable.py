"""A Python that runs in any Linux image of this host's architecture: this one, with its own loader and libraries.

The relay and the courier need a Python, and a task's image may have none, nor even the C library. So the interpreter is
started by name of its own dynamic loader, with a directory of the few libraries it needs; nothing of the image is used.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from polar_common.errors import RuntimeUnavailable
from polar_common.settings import cache_dir
from polar_runtime.base import Mount
from polar_runtime.beneath import remove_tree

__all__ = ["PortablePython", "portable_python"]

_INSIDE = "/polar/python"
_HERE = Path(__file__).parent
_MODULES = ("_socket", "select", "resource", "_struct", "zlib", "fcntl", "array", "math", "grp")


@dataclass(frozen=True, slots=True)
class PortablePython:
    """`argv` starts it inside, given the mounts; `relay` and `courier` are the scripts' places there."""

    argv: tuple[str, ...]
    mounts: tuple[Mount, ...]
    relay: str = "/polar/bin/relay.py"
    courier: str = "/polar/bin/courier.py"


@functools.cache
def portable_python() -> PortablePython:
    """Blocking the first time: copies a few megabytes. `RuntimeUnavailable` where the loader can't be found."""
    executable = Path(os.path.realpath(sys.executable))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries, loader = _libraries(executable, version)
    digest = hashlib.sha256(f"{executable} {sys.version} {libraries}".encode()).hexdigest()[:12]
    place = cache_dir() / "python" / f"{version}-{digest}"
    if not place.exists():
        _build(place, executable, libraries, version)
    argv = (f"{_INSIDE}/lib/{Path(loader).name}", "--library-path", f"{_INSIDE}/lib", f"{_INSIDE}/bin/{version}")
    mounts = (
        Mount(place, _INSIDE),
        Mount(_stdlib(), f"{_INSIDE}/lib/{version}"),
        *(Mount(_HERE / name, f"/polar/bin/{name}") for name in ("relay.py", "courier.py", "beneath.py")),
    )
    return PortablePython((*argv, "-I", "-S"), mounts)


def _stdlib() -> Path:
    return Path(os.path.realpath(os.__file__)).parent


def _libraries(executable: Path, version: str) -> tuple[list[str], str]:
    """Shared libraries of the interpreter and of the few extension modules that are needed, and the loader."""
    dynload = _stdlib() / "lib-dynload"
    modules = [str(p) for name in _MODULES for p in dynload.glob(f"{name}.*.so")]
    done = subprocess.run(["ldd", str(executable), *modules], capture_output=True, text=True, check=False)
    found = set(re.findall(r"=> (/\S+) \(", done.stdout))
    loaders = re.findall(r"^\s*(/\S+) \(0x", done.stdout, re.MULTILINE)
    if not loaders:
        raise RuntimeUnavailable(f"cannot tell the dynamic loader of {executable}: {done.stderr.strip()[-200:]}")
    return sorted(found | {loaders[0]}), loaders[0]


def _build(place: Path, executable: Path, libraries: list[str], version: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        work.chmod(0o755)
        (work / "bin").mkdir()
        (work / "lib" / version).mkdir(parents=True)
        shutil.copy2(executable, work / "bin" / version)
        for library in libraries:
            shutil.copy2(os.path.realpath(library), work / "lib" / Path(library).name)
        try:
            work.rename(place)
        except OSError:
            if not place.exists():
                raise
    finally:
        remove_tree(work)
