"""What Polar adds to a container: INIT with a warm toolchain against a bare start, and teardown, on a real daemon.

The daemon is that of `DOCKER_HOST`. A session's INIT is measured by the gateway itself (`initialized.init_s`): a
container with limits, toolchain and relay mounted, harness files, snapshot of the working directory. Bare is the same
image created and started by the same SDK with no network and nothing else. Both take turns, one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
from pydantic import SecretStr

from bench.load import Result, arguments, median, report
from polar_common.bus import Bus, Worker
from polar_common.events import SessionAccepted, SessionQueued
from polar_common.ids import session_id, task_id
from polar_common.nats_server import NatsConfig, NatsServer, free_port
from polar_common.session_state import fold
from polar_common.task_spec import HarnessSpec, RuntimeChoice, TaskSpec
from polar_common.tasks import spawn
from polar_common.topology import Topology, apply, work_consumer
from polar_gateway.handlers import Gateway
from polar_gateway.harnesses import registry, toolchain
from polar_gateway.harnesses.base import Harness, Launch, LaunchContext
from polar_gateway.house import make_house
from polar_gateway.settings import GatewaySettings


def quick(name: str) -> Harness:
    """The harness with its toolchain and files, but a program that ends at once."""
    found = registry.find(name)

    def launch(ctx: LaunchContext) -> Launch:
        return replace(type(found)().launch(ctx), argv=("true",), stdin=None)

    found.launch = launch  # type: ignore[method-assign]
    return found


def bare(client: Any, image: str) -> tuple[float, float]:
    """Seconds to create and start a container, and to remove it."""
    began = time.monotonic()
    made = client.containers.create(image, ["sleep", "1000"], network_mode="none")
    made.start()
    started = time.monotonic()
    made.remove(force=True, v=True)
    return started - began, time.monotonic() - started


async def once(bus: Bus, spec: TaskSpec, index: int) -> tuple[float, float]:
    """Seconds of INIT and of teardown of one session."""
    task = task_id("s1", "bench", spec.id)
    session = session_id(task, index)
    about: dict[str, Any] = {"session": session, "run": "bench", "task": task, "work_class": "docker"}
    accepted = await bus.once(SessionAccepted(attempt=0, index=index, **about))
    await bus.transition(SessionQueued(attempt=1, spec=spec, **about), accepted.sequence)
    async with asyncio.timeout(120):
        while True:
            attempt = fold(session, await bus.read_session(session, completions=False)).attempts.get(1)
            if attempt is not None and attempt.over:
                break
            await asyncio.sleep(0.02)
    assert attempt.exited is not None and attempt.artifacts is not None
    if attempt.initialized is None or attempt.exited.fault == "infra":
        sys.exit(f"a session failed: {attempt.exited.detail}")
    return attempt.initialized.init_s, attempt.artifacts.teardown_s


async def measure(url: str, directory: Path, told: argparse.Namespace, rounds: int) -> list[Result]:
    image, harness = told.image, told.harness
    bus = await Bus.connect(url, "bench/containers")
    await apply(bus.js, Topology())
    settings = GatewaySettings(
        data=directory, secret=SecretStr("bench"), gateway_classes=("docker",), gateway_disk=told.disk
    )
    for path in (settings.root, settings.proxy_socket.parent):
        path.mkdir(parents=True)
    house = make_house(settings, bus, "bench")
    toolchain.ensure(registry.find(harness))
    house.find_harness = quick
    worker = Worker(
        bus, work_consumer("docker"), Gateway(house).on_queued, lambda: worker.active + house.pools.init.free
    )
    stop = asyncio.Event()
    working = spawn(worker.run(stop), name="gateway")
    spec = TaskSpec(
        id="t", instruction="x", harness=HarnessSpec(name=harness), runtime=RuntimeChoice(kind="docker", image=image)
    )
    client = docker.from_env()
    ours, theirs = [], []
    try:
        await once(bus, spec, 0)
        for index in range(1, rounds + 1):
            theirs.append(await asyncio.to_thread(bare, client, image))
            ours.append(await once(bus, spec, index))
    finally:
        stop.set()
        await working
        client.close()
        await bus.close()
    init, start = median([o[0] for o in ours]), median([t[0] for t in theirs])
    down, removed = median([o[1] for o in ours]), median([t[1] for t in theirs])
    return [
        Result("init", init, "s", start, init / start, f"{harness}, {rounds} rounds; baseline: bare create and start"),
        Result("teardown", down, "s", removed, down / removed, "baseline: bare removal"),
        Result("teardown_worst", max(o[1] for o in ours), "s"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser, rest = argparse.ArgumentParser(add_help=False), list(sys.argv[1:] if argv is None else argv)
    parser.add_argument("--image", required="-h" not in rest and "--help" not in rest, help="an image the daemon has")
    parser.add_argument("--harness", default="pi", help="whose toolchain is mounted")
    parser.add_argument("--disk", choices=("watch", "loop"), default="watch", help="as the gateway's own setting")
    told, rest = parser.parse_known_args(rest)
    options = arguments(__doc__ or "", rest, rounds=20)
    rounds = 5 if options.short else options.rounds
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        server = NatsServer(NatsConfig(data=Path(name) / "js", port=free_port(), name="bench"))
        server.start()
        try:
            found = asyncio.run(measure(server.url, Path(name), told, rounds))
            report(found, options.json)
        finally:
            server.stop("kill")


if __name__ == "__main__":
    main()
