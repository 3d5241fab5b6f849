"""Model calls past the proxy: noticed where nothing can prevent them, impossible where something can."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import gateway_kit as kit
import pytest
from runtime_kit import Unix

from polar_common.bus import Bus
from polar_gateway.models import ModelHosts
from polar_runtime import RuntimeSpec, bwrap, make_runtime
from polar_runtime.peers import Peers

# Talks to itself and to whom it is told, for a second.
_TALK = """
import socket, sys, time
own = socket.create_server(("127.0.0.1", 0)); inner = socket.create_connection(own.getsockname())
try:
    held = [socket.create_connection((h, int(p)), timeout=2) for h, _, p in (a.rpartition(":") for a in sys.argv[1:])]
except OSError as error:
    print(error)
time.sleep(1)
"""


@asynccontextmanager
async def listening() -> AsyncIterator[str]:
    """Somebody's server on this host, not of the attempt's; its address."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("groups", ["on", "off"])
async def test_connections_past_the_proxy_are_seen_where_the_network_is_open(groups: str, tmp_path: Path) -> None:
    proxy = Unix(tmp_path / "sock" / "proxy.sock")
    async with await proxy.serve(), listening() as engine:
        spec = RuntimeSpec(
            "local", "s.1", tmp_path / "a", proxy_socket=proxy.path, isolation="none", options={"cgroup": groups}
        )
        async with make_runtime(spec) as rt:
            told = rt.proxy_base.removeprefix("http://")
            await rt.exec([sys.executable, "-c", _TALK, told], proxy=True)
            assert (await rt.stats()).peers == (), "the proxy, and the agent's own servers, are nobody else"
            await rt.exec([sys.executable, "-c", _TALK, engine])
            assert (await rt.stats()).peers == (), "only what runs with the proxy is a harness"
            await rt.exec([sys.executable, "-c", _TALK, told, engine], proxy=True)
        assert (await rt.stats()).peers == (engine,)


@pytest.mark.skipif(bool(bwrap.missing()), reason="no bubblewrap")
async def test_a_closed_network_has_no_peers(tmp_path: Path) -> None:
    async with listening() as engine:
        async with make_runtime(RuntimeSpec("local", "s.1", tmp_path, isolation="bubblewrap")) as rt:
            python = bwrap.system_python()[0]
            result = await rt.exec([python, "-c", _TALK, engine], proxy=True)
            assert "refused" in result.stdout.decode()
        assert (await rt.stats()).peers == ()
        open_spec = RuntimeSpec("local", "s.2", tmp_path, isolation="bubblewrap", network="host")
        async with make_runtime(open_spec) as rt:
            await rt.exec([python, "-c", _TALK, engine], proxy=True)
        assert (await rt.stats()).peers == (engine,)


async def test_a_harness_that_calls_a_model_directly_is_labelled(bus: Bus, tmp_path: Path) -> None:
    async with listening() as engine, listening() as other:
        talk = f"python3 -c '{_TALK}' {engine} {other}"
        made = kit.settings(tmp_path, gateway_isolation="none", gateway_engines=(engine,))
        async with kit.gateway(bus, made):
            direct = await kit.over(bus, await kit.release(bus, kit.script(talk, name="direct")))
            honest = await kit.over(bus, await kit.release(bus, kit.script("sleep 0.5", name="honest")))
    exited = direct.attempts[1].exited
    assert exited is not None
    assert set(exited.peers) == {engine, other}
    assert exited.bypass == (engine,)
    clean = honest.attempts[1].exited
    assert clean is not None
    assert (clean.peers, clean.bypass) == ((), ())


async def test_models_are_told_by_name_address_and_port() -> None:
    models = ModelHosts(("127.0.0.1:8000", "localhost:9000", "[::1]:1", "10.9.9.9", "no-such-host.invalid"))
    peers = ["127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:9000", "[::1]:1", "10.9.9.9:443", "[fe80::1]:2"]
    assert await models.among(peers) == ("127.0.0.1:8000", "127.0.0.1:9000", "[::1]:1", "10.9.9.9:443")
    assert await models.among([]) == ()
    assert await ModelHosts(()).among(peers) == ()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_peers_are_read_in_both_address_families(family: socket.AddressFamily, host: str) -> None:
    server = socket.create_server((host, 0), family=family)
    port = server.getsockname()[1]
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with socket.create_connection((host, port)), server.accept()[0]:
        seen = Peers()
        seen.look([os.getpid()])
        assert seen.seen == set(), "this process serves it"
        server.close()
        seen.look([os.getpid()])
        assert name in seen.seen
        told = Peers(frozenset({name}))
        told.look([os.getpid()])
        assert name not in told.seen
