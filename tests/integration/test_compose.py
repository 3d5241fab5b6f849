"""What `compose/` says fits the code: panels' SQL runs on the real engine, services and settings exist."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path

import pytest
import yaml
from tests.conftest import start_nats

from polar_analytics.store import Store
from polar_common.bus import Bus
from polar_common.connection import with_user
from polar_common.nats_server import MAX_PAYLOAD
from polar_common.permissions import SERVICES, USERS, authorization, users
from polar_common.topology import Topology

COMPOSE = Path(__file__).parents[2] / "compose"


@pytest.mark.chdb
async def test_every_panel_of_the_dashboard_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "chdb")
    await store.open()
    panels = json.loads((COMPOSE / "grafana/dashboards/polar.json").read_text())["panels"]
    assert len(panels) >= 10
    for panel in panels:
        for target in panel["targets"]:
            assert (await store.query(target["rawSql"])).columns, panel["title"]
    await store.close()


def test_every_service_is_there_with_settings_it_knows() -> None:
    services = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())["services"]
    known = {e.name: e for e in importlib.metadata.entry_points(group="polar.services")}
    for name in ("ingest", "proxy", "gateway", "reconstructor", "evaluator", "analytics"):
        assert services[name]["command"] == [name]
        assert name in known
        module = importlib.import_module(known[name].value.partition(":")[0].replace(".app", ".settings"))
        fields = {f for cls in vars(module).values() if hasattr(cls, "model_fields") for f in cls.model_fields}
        for variable in services[name]["environment"]:
            assert variable.removeprefix("POLAR_").lower() in fields, f"{name}: {variable}"


def test_the_cluster_flushes_before_it_acknowledges() -> None:
    text = (COMPOSE / "nats/cluster.conf").read_text()
    assert "sync_interval: always" in text
    assert f"max_payload: {MAX_PAYLOAD}" in text


@pytest.mark.nats
async def test_the_clusters_users_are_the_codes_and_a_server_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (COMPOSE / "nats/users.conf").read_text()
    assert text == authorization(users(Topology()), lambda user: f"$POLAR_NATS_{user.upper()}"), (
        "polar log permissions > compose/nats/users.conf"
    )
    services = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())["services"]
    assert set(services["nats1"]["environment"]) == {f"POLAR_NATS_{u.upper()}" for u in USERS}
    for user in USERS:
        monkeypatch.setenv(f"POLAR_NATS_{user.upper()}", f"p0{user}")
    server = start_nats(tmp_path, sync="2m", authorization=text)
    for user in (*SERVICES, "admin", "tools"):
        bus = await Bus.connect(with_user(server.url, user, f"p0{user}"), "test", wait_s=5)
        await bus.close()
    server.stop("kill")
