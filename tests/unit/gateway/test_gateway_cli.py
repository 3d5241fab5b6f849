"""`polar harness`: names with versions, what is installed, and how a smoke run is summed up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polar_common.errors import ConfigError
from polar_common.events import CompletionCaptured
from polar_gateway import cli
from polar_gateway.harnesses import registry, toolchain
from polar_gateway.smoke import jobs_of, summary

COLUMN = {"type": "i32", "n": 0, "data": ""}


def test_a_version_can_be_chosen_and_has_a_toolchain_of_its_own(tmp_path: Path) -> None:
    pinned, other = registry.find("codex"), registry.find("codex@0.80.0")
    assert (other.name, other.version) == ("codex", "0.80.0")
    assert other.recipe.packages == ("@openai/codex@0.80.0",)
    assert registry.find("mini_swe_agent@2.4.0").recipe.packages == ("mini-swe-agent==2.4.0", "litellm==1.110.2")
    assert registry.find("codex").version == pinned.version
    assert toolchain.path_of(other, tmp_path) != toolchain.path_of(pinned, tmp_path)
    assert toolchain.path_of(registry.find(f"codex@{pinned.version}"), tmp_path) == toolchain.path_of(pinned, tmp_path)


@pytest.mark.parametrize("name", ["pi@", "pi@ 1", "pi@--registry=x", "pi@1;2", "command@1", "nothing@1"])
def test_versions_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        registry.find(name)


def test_the_list_names_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.73.1", "0.70.0"):
        made = tmp_path / "harness" / f"pi-{version}-abc"
        made.mkdir(parents=True)
        (made / "polar.json").write_text(json.dumps({"version": version}))
    (tmp_path / "harness" / "pi-0.1.0-half").mkdir()
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    done = CliRunner().invoke(cli.app, ["list", "--json"])
    assert done.exit_code == 0
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["pi"]["installed"] == ["0.70.0", "0.73.1"]
    assert rows["codex"]["installed"] == [] and rows["codex"]["path"].startswith(str(tmp_path))
    assert (rows["command"]["kind"], rows["command"]["path"]) == ("none", "")
    table = CliRunner().invoke(cli.app, ["list"]).stdout
    assert "0.70.0, 0.73.1" in table and "anthropic" in table


def test_what_a_killed_installer_left_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_pip", lambda work, packages: (work / "venv").mkdir())
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    harness = registry.find("mini_swe_agent")
    monkeypatch.setattr(type(harness), "recipe", replace(harness.recipe, probe=""))
    final = toolchain.path_of(harness)
    half, others = final.parent / f".{final.name}-abc", final.parent / ".mini_swe_agent-0.1-def-abc"
    for path in (half / "venv", others):
        path.mkdir(parents=True)
    assert toolchain.ensure(harness) == final
    assert {p.name for p in final.parent.iterdir()} == {final.name, f"{final.name}.lock", others.name}


def test_each_api_has_its_job_and_some_harnesses_have_none() -> None:
    assert [api for api, _ in jobs_of("pi", registry.find("pi"))] == list(registry.find("pi").apis)
    assert jobs_of("pi", registry.find("pi"))[0][1].harness.args == {"api": "openai-chat"}
    limits = jobs_of("pi", registry.find("pi"))[0][1].limits
    assert limits.max_tokens_per_call and limits.total_tokens and limits.total_tokens < 10_000
    [(api, task)] = jobs_of("codex@0.80.0", registry.find("codex@0.80.0"))
    assert (api, task.harness.name, task.harness.args) == ("openai-responses", "codex@0.80.0", {})
    assert jobs_of("aider", registry.find("aider"))[0][1].harness.args == {"files": ["hello.txt"]}
    assert jobs_of("command", registry.find("command")) == []
    own = "tests.integration.own_kit:Short"
    assert [api for api, _ in jobs_of(own, registry.find(own))] == ["any"], "it needn't say which it speaks"


def captured(name: str, *, exact: bool | None = True, chain: str = "root") -> CompletionCaptured:
    engine = {"name": "vllm", "replica": "e0", "model": "m"}
    used = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 9}
    return CompletionCaptured.model_validate(
        {
            "event_id": name, "time": "2026-01-01T00:00:00Z", "producer": "t", "session": "s", "attempt": 1, "run": "r",
            "task": "t", "completion": name, "dialect": "google", "stream": True, "model": "m", "request_hash": "",
            "head": {"hash": ""}, "messages": {}, "prompt": {"new": COLUMN, "length": 0}, "sampled": COLUMN,
            "finish": "stop", "closed": True, "context_exact": exact, "chain_class": chain, "sampling": used,
            "engine": engine,
        }
    )  # fmt: skip


def session(*, code: int | None = 0, drifted: int = 0) -> dict[str, Any]:
    return {
        "session": "s", "outcome": "passed", "phase": "completed",
        "attempts": [{"exit_code": code, "run_s": 1.5, "cause": "", "detail": "words"}],
        "builds": [{"build": "live", "exact_spans": 2, "drifted_spans": drifted, "traces": 1}],
    }  # fmt: skip


def test_a_good_run() -> None:
    row = summary(session(), [captured("a"), captured("b", chain="continued")])
    assert (row["calls"], row["spoken"], row["streamed"], row["exact"]) == (2, "google", True, 1.0)
    assert (row["continued"], row["traces"], row["ok"], row["detail"]) == (1, 1, True, "words")


@pytest.mark.parametrize(
    ("shown", "events"),
    [
        (session(), []),
        (session(code=1), [captured("a")]),
        (session(code=None), [captured("a")]),
        (session(drifted=1), [captured("a")]),
        (session(), [captured("a", exact=None)]),
    ],
)
def test_what_makes_a_run_bad(shown: dict[str, Any], events: list[Any]) -> None:
    assert summary(shown, events)["ok"] is False


def test_a_session_that_never_ran_is_summed_up_too() -> None:
    row = summary({"session": "s", "outcome": None, "phase": "queued", "attempts": [], "builds": []}, [])
    assert (row["outcome"], row["exit"], row["exact"], row["ok"]) == ("queued", None, None, False)
