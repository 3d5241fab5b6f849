"""`polar up`, `down`, `status`, `run-service`."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer
from pydantic import ValidationError

from polar_common.errors import ConfigError
from polar_common.house.layout import House, find_house, process_started
from polar_common.house.supervisor import reap
from polar_common.house.up import ENGINE_KINDS, UpOptions, check_options, run_house
from polar_common.service import own_process
from polar_common.settings import inherited_environment
from polar_common.topology import ACK_WAIT_S

from .output import console, emit, fail, table

__all__ = ["DataOption", "JsonOption", "down", "run_service", "status", "up"]

DataOption = Annotated[Path, typer.Option("--data", envvar="POLAR_DATA", help="The house's directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="By default the usual one, if it is free.")]
_DATA = Path(".polar")


def up(
    data: DataOption = _DATA,
    model: Annotated[
        str, typer.Option(help="smollm2-135m, tiny, or a model directory, on the local engine.")
    ] = "smollm2-135m",
    engine_url: Annotated[str, typer.Option(help="An engine of your own instead, e.g. http://127.0.0.1:8000.")] = "",
    engine_kind: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINE_KINDS)}.")] = "vllm",
    tokenizer: Annotated[str, typer.Option(help="Directory with that engine's tokenizer and chat template.")] = "",
    ingest_port: Port = None,
    proxy_port: Port = None,
    analytics_port: Port = None,
    engine_port: Port = None,
    nats_port: Port = None,
    slots: Annotated[int, typer.Option(min=1, help="Harnesses that run at once.")] = 4,
    engine_threads: Annotated[int, typer.Option(min=1, help="Threads of the local engine.")] = 1,
    sync: Annotated[
        str, typer.Option(help="When the log is flushed: always, or an interval such as 2m (unsafe).")
    ] = "always",
    lease: Annotated[
        float, typer.Option(min=2, help="Seconds until a dead process's work is given to another.")
    ] = ACK_WAIT_S,
    setting: Annotated[list[str] | None, typer.Option(help="Any further setting, e.g. POLAR_PROXY_DRAIN=true.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it's ready; stop it with `polar down`.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Start a whole house on this machine: log, engine, six services. Ctrl-C stops it.

    Example: polar up --model smollm2-135m --data ./.polar
    """
    for given in setting or []:
        if "=" not in given:
            raise ConfigError(f"must be NAME=VALUE, not {given!r}", "--setting")
    extra = dict(s.partition("=")[::2] for s in setting or [])
    named = {
        "ingest": ingest_port,
        "proxy": proxy_port,
        "analytics": analytics_port,
        "engine": engine_port,
        "nats": nats_port,
    }
    options = UpOptions(
        data=data,
        model=model,
        engine_url=engine_url.rstrip("/"),
        engine_kind=engine_kind,
        tokenizer=tokenizer,
        ports={name: port for name, port in named.items() if port is not None},
        sync=sync,
        gateway_slots=slots,
        engine_threads=engine_threads,
        lease_s=lease,
        env=extra,
    )
    check_options(options)
    if detach:
        _detached(data, json)
        return
    began = time.monotonic()

    def say(text: str) -> None:
        if json:
            emit({"at_s": round(time.monotonic() - began, 1), "message": text})
        else:
            console.print(f"[{time.monotonic() - began:6.1f} s] {text}", markup=False)

    run_house(options, say)


def _detached(data: Path, json: bool) -> None:
    """Start `polar up` with the same arguments in a session of its own and wait for the house file."""
    house = House(data)
    house.make()
    if house.read() is not None:
        raise ConfigError(f"a house already runs on {house.data}: see `polar status`", "up")
    log = house.logs / "up.log"
    argv = [a for a in sys.argv[1:] if a != "--detach"]
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "polar_common.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=inherited_environment(),
        )
    shown = 0
    while house.read() is None:
        shown = _show_new(log, shown, quiet=json)
        if process.poll() is not None:
            _show_new(log, shown, quiet=json)
            # A script has seen nothing of it yet.
            words = f":\n{log.read_text(errors='replace')[-2000:]}" if json else ""
            fail(f"`polar up` ended ({process.returncode}){words}", 1)
        time.sleep(0.1)
    _show_new(log, shown, quiet=json)
    found = find_house(data)
    if json:
        emit(
            {"ingest": found.ingest, "proxy": found.proxy, "analytics": found.analytics, "s": time.monotonic() - began}
        )


def _show_new(log: Path, shown: int, *, quiet: bool) -> int:
    text = log.read_text(errors="replace")
    if not quiet and len(text) > shown:
        console.print(text[shown:].rstrip("\n"), markup=False)
    return len(text)


def down(data: DataOption = _DATA, json: JsonOption = False) -> None:
    """Stop the house that runs on this directory. Nothing is lost; `polar up` goes on where it was.

    Example: polar down
    """
    house = House(data)
    found = house.read()
    if found is None:
        left = reap(house.run) if house.run.exists() else []
        _say_down(
            json, stopped=bool(left), text=f"ended leftovers: {', '.join(left)}" if left else "no house runs here"
        )
        return
    os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while process_started(found.pid) == found.started:
        if time.monotonic() > deadline:
            os.kill(found.pid, signal.SIGKILL)
            reap(house.run)
        time.sleep(0.1)
    _say_down(json, stopped=True, text="stopped")


def _say_down(json: bool, *, stopped: bool, text: str) -> None:
    if json:
        emit({"stopped": stopped, "message": text})
    else:
        console.print(text, markup=False)


def status(data: DataOption = _DATA, json: JsonOption = False) -> None:
    """Say what runs where. Exit code 1 if something doesn't answer, or ingest admits nothing.

    Example: polar status --json
    """
    found = find_house(data if data != _DATA else None)
    rows = []
    for name, url in (("ingest", found.ingest), ("proxy", found.proxy), ("analytics", found.analytics)):
        state = "-"
        if url:
            try:
                answer = httpx.get(f"{url}/health", headers=found.headers, timeout=5)
                state = _health(answer) if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as error:
                state = f"no answer: {error!r}"
        rows.append([name, url, state])
    rows += _children(House(found.data))
    bad = [r[0] for r in rows if r[2] not in ("ok", "-") and not str(r[2]).startswith("pid")]
    if json:
        emit({"house": str(found.data), "parts": [dict(zip(("name", "where", "state"), r, strict=True)) for r in rows]})
    else:
        table("", ["part", "where", "state"], rows)
    if bad:
        raise typer.Exit(1)


def _health(answer: httpx.Response) -> str:
    """What a service that answers says of itself, where it says more than that."""
    try:
        return str(answer.json().get("detail") or "ok")
    except (ValueError, AttributeError):
        return "ok"


def _children(house: House) -> list[list[str]]:
    import orjson

    rows = []
    for label in sorted(house.run.glob("*.pid")):
        told = orjson.loads(label.read_bytes())
        alive = process_started(told["pid"]) == told["started"]
        rows.append(
            [
                f"process {told['name']}",
                str(house.logs / f"{told['name']}.log"),
                f"pid {told['pid']}" if alive else "dead",
            ]
        )
    return rows


def run_service(
    name: Annotated[str, typer.Argument(help="ingest, gateway, proxy, reconstructor, evaluator, analytics, engine")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON (pid, port) once it is ready.")] = False,
) -> None:
    """Run one service in the foreground; settings come from the environment (`POLAR_…`). It logs to standard error.

    Example: POLAR_NATS=nats://10.0.0.5:4222 polar run-service gateway
    """
    found = {e.name: e for e in importlib.metadata.entry_points(group="polar.services")}
    if name not in found:
        raise ConfigError(f"no service {name!r}; there are: {', '.join(sorted(found))}", "name")
    own_process(announce=json)
    try:
        found[name].load()()
    except ValidationError as error:
        if not error.title.endswith("Settings"):
            raise
        prefix = "POLAR_ENGINE_" if error.title == "EngineSettings" else "POLAR_"
        wrong = "; ".join(f"{prefix}{'.'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors())
        raise ConfigError(wrong) from error
