"""What `compose/` says fits the code: panels' SQL runs on the real engine, services and settings exist."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path

import pytest
import yaml

from polar_analytics.store import Store
from polar_common.nats_server import MAX_PAYLOAD

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
