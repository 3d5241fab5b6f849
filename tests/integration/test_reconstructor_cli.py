"""`polar replay`, `build`, `trace`, `export` against a real log, and files that come back as they were written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import typer
from test_reconstructor import closed
from tests.scripted_sessions import Script
from typer.testing import CliRunner

from polar_common import subjects
from polar_common.blobs import Blobs
from polar_common.bus import Bus
from polar_common.errors import ConfigError, TraceError
from polar_common.events import BuildReconstructed, ImageRef
from polar_common.exclusions import MEANINGS
from polar_common.ids import FIRST_SEGMENT, task_id
from polar_common.nats_server import NatsServer
from polar_reconstructor import cli
from polar_reconstructor.builds import read_build
from polar_reconstructor.export import check, read_rows
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN

pytestmark = pytest.mark.nats
E = 99


@pytest.fixture
async def house(bus: Bus, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> list[Script]:
    """A log with two built sessions, and an environment that finds it."""
    monkeypatch.setenv("POLAR_NATS", nats_server.url)
    monkeypatch.setenv("POLAR_CACHE", "/nonexistent")
    service = Reconstructor(bus, "live", BUILT_IN["exact"])
    scripts = []
    for index in range(2):
        script = Script(task=task_id(FIRST_SEGMENT, "run", "t"), index=index).started()
        script.call("c1", [1, 2, index], [10, 11, E]).call("c2", [1, 2, index, 10, 11, E, 5], [20, E], parent="c1")
        script.call("c3", [1, 2, index, 10, 11, E, 7], [30, E], parent="c1").ended()
        await script.publish(bus)
        end = await bus.last(subjects.session(script.session, 1, "artifacts"))
        assert end is not None
        await service.on_ended(end)
        scripts.append(script)
    return scripts


async def polar(*arguments: str, ok: bool = True) -> list[dict[str, Any]]:
    """Run a command with --json; the objects it printed."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("replay")(cli.replay)
    app.command("export")(cli.export)
    app.add_typer(cli.build, name="build")
    app.add_typer(cli.trace, name="trace")
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code == 0) == ok, result.output
    return [orjson.loads(line) for line in result.stdout.splitlines()]


async def test_replay_and_the_builds_it_makes(house: list[Script]) -> None:
    (dry,) = await polar("replay", "--build", "again", "--dry-run")
    assert dry["reconstructed"] == 2 and {r["build"] for r in await polar("build", "list")} == {"live"}
    (made,) = await polar("replay", "--build", "again", "--processes", "1")
    assert made["reconstructed"] == 2 and made["failed"] == 0
    (single,) = await polar("replay", "--build", "one", "--session", house[0].session, "--rules", "per_request")
    assert single["reconstructed"] == 1
    found = {row["build"]: row for row in await polar("build", "list")}
    assert found.keys() == {"live", "again", "one"}
    assert found["live"]["rules_hash"] == found["again"]["rules_hash"] != found["one"]["rules_hash"]
    assert (found["live"]["traces"], found["one"]["traces"], found["live"]["exact_share"]) == (4, 3, 1.0)
    (same,) = await polar("build", "diff", "live", "again")
    assert same["same_traces"] == 4 and same["changes"] == []
    (shown,) = await polar("build", "show", "live")
    assert shown["tokens"] == 14 and shown["excluded"] == {} and shown["traces_per_session"] == 2.0
    assert shown["chain_classes"] == {"root": 2, "branch": 2} and shown["drift"] == {}


async def test_rules_from_a_file_and_typing_errors_in_it(house: list[Script], tmp_path: Path) -> None:
    rules = tmp_path / "short.yaml"
    rules.write_text("rule: exact\nmax_trace_tokens: 7\n")
    (made,) = await polar("replay", "--build", "short", "--rules", str(rules))
    assert made["rules"] == "short"
    (shown,) = await polar("build", "show", "short")
    assert shown["excluded"] == {"max_length": 4}
    rules.write_text("rule: exact\nmax_trace_token: 7\n")
    with pytest.raises(ConfigError, match="max_trace_token: unknown field"):
        await polar("replay", "--build", "typo", "--rules", str(rules))
    with pytest.raises(ConfigError, match="ISO"):
        await polar("replay", "--build", "typo", "--since", "yesterday")


async def test_a_choice_of_what_is_not_there_is_refused(house: list[Script]) -> None:
    for begin in ("2026-01-02", "2026-01-01T12:00"):
        with pytest.raises(ConfigError, match="nothing lies between"):
            await polar("replay", "--build", "none", "--since", begin, "--until", "2026-01-01T12:00Z")
    missing = house[0].session[:-1] + "7"
    with pytest.raises(ConfigError, match=f"no such session: {missing}$"):
        await polar("replay", "--build", "some", "--session", missing, "--session", house[0].session)
    assert [row["build"] for row in await polar("build", "list")] == ["live"]
    (made,) = await polar("replay", "--build", "some", "--session", house[0].session, "--rules", "per_request")
    assert made["reconstructed"] == 1


async def test_an_empty_name_is_no_builds_and_not_all_builds(house: list[Script], bus: Bus, tmp_path: Path) -> None:
    before = await polar("trace", "show", house[0].session)
    for command in (["build", "drop", ""], ["build", "show", ""], ["build", "diff", "", "live"]):
        with pytest.raises(ConfigError, match="no build of that name"):
            await polar(*command)
    with pytest.raises(ConfigError, match="a build needs a name"):
        await polar("replay", "--build", "")
    with pytest.raises(ConfigError, match="no build of that name"):
        await polar("export", str(tmp_path / "t.jsonl"), "--build", "")
    assert await polar("trace", "show", house[0].session) == before


async def test_a_builds_traces_are_bounded_and_dropped(house: list[Script], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_RECONSTRUCTOR_BUILD_BYTES", "100")
    with pytest.raises(ConfigError, match="budget of 100"):
        await polar("replay", "--build", "again")
    (dropped,) = await polar("build", "drop", "again")
    assert dropped["messages"] == 6 and [t["build"] for t in await polar("build", "list")] == ["live", "again"]
    with pytest.raises(ConfigError, match="no build of that name"):
        await polar("build", "drop", "agian")


async def test_what_was_dropped_or_never_was_is_told_and_not_exported_as_nothing(
    house: list[Script], tmp_path: Path
) -> None:
    await polar("replay", "--build", "pm")
    file = tmp_path / "t.jsonl"
    assert [(b["build"], b["held"]) for b in await polar("build", "list")] == [("live", 4), ("pm", 4)]
    await polar("build", "drop", "pm")
    assert [(b["build"], b["traces"], b["held"]) for b in await polar("build", "list")] == [
        ("live", 4, 4),
        ("pm", 4, 0),
    ]
    for command in (["export", str(file)], ["trace", "show", house[0].session]):
        with pytest.raises(ConfigError, match=r"pm: its traces were dropped; `polar replay`"):
            await polar(*command, "--build", "pm")
        with pytest.raises(ConfigError, match="nope: there is no build of that name"):
            await polar(*command, "--build", "nope")
    assert not file.exists()
    await polar("replay", "--build", "pm")
    (told,) = await polar("export", str(file), "--build", "pm")
    assert told["traces"] == 4
    (difference,) = await polar("build", "diff", "live", "pm")
    assert "last" not in difference["before"] and difference["before"]["traces"] == 4


async def test_a_trace_is_found_by_session_number_or_id_and_shown_in_pieces(house: list[Script]) -> None:
    both = await polar("trace", "show", house[0].session)
    assert [t["number"] for t in both] == [0, 1]
    first, second = both
    assert [(p["source"], p["text"]) for p in first["pieces"]] == [
        ("prompt", "1 2 0"),
        ("sampled", "10 11 99"),
        ("context", "5"),
        ("sampled", "20 99"),
    ]
    assert [p["source"] for p in second["pieces"]] == ["prompt", "masked", "context", "sampled"]
    assert await polar("trace", "show", f"{house[0].session}/1") == [second]
    assert await polar("trace", "show", second["trace_id"][:10]) == [second]
    for wrong in ("0123", "z" * 10, f"{house[0].session}/9"):
        with pytest.raises(ConfigError):
            await polar("trace", "show", wrong)


async def test_of_a_completion_the_trace_is_shown_that_trains_it(house: list[Script], bus: Bus) -> None:
    """Not those in which it is context."""
    script = Script(task=task_id(FIRST_SEGMENT, "run", "hex")).started()
    names = [f"{n}{n}{n}{n}c0ffee{n}" for n in "abc"]
    script.call(names[0], [1], [10, E]).call(names[1], [1, 10, E, 5], [20, E], parent=names[0])
    script.call(names[2], [1, 10, E, 7], [30, E], parent=names[0]).ended()
    await script.publish(bus)
    end = await bus.last(subjects.session(script.session, 1, "artifacts"))
    assert end is not None
    await Reconstructor(bus, "live", BUILT_IN["exact"]).on_ended(end)
    whole = await polar("trace", "show", script.session)
    for name, wanted in zip(names, (whole[0], whole[0], whole[1]), strict=True):
        assert await polar("trace", "show", name) == await polar("trace", "show", name[:8]) == [wanted]
    with pytest.raises(ConfigError, match="no traces of build live begin so"):
        await polar("trace", "show", "c0ffee")


async def test_a_completion_that_isnt_trained_is_shown_with_its_reason(
    house: list[Script], bus: Bus, tmp_path: Path
) -> None:
    rules = tmp_path / "short.yaml"
    rules.write_text("rule: exact\nmax_trace_tokens: 7\n")
    await polar("replay", "--build", "short", "--rules", str(rules))
    fact = (await read_build(bus, FIRST_SEGMENT, "short"))[house[0].session]
    assert isinstance(fact, BuildReconstructed)
    for completion in fact.excluded:
        shown = await polar("trace", "show", completion, "--build", "short")
        [one] = [s for s in shown if s["session"] == house[0].session]
        assert (one["completion"], one["reason"]) == (completion, "max_length")
        assert one["meaning"] == MEANINGS["max_length"] and one["sampled_tokens"] and one["text"].endswith("99")
    with pytest.raises(ConfigError, match="at least 6 digits"):
        await polar("trace", "show", "short")


def test_a_trace_without_colours_says_what_each_stretch_is(capsys: pytest.CaptureFixture[str]) -> None:
    cli._show_text([("prompt", "Say it", 2), ("sampled", "it", 1), ("masked", "no", 1)])
    lines = ["── prompt, 2 tokens", "Say it", "── sampled, 1 tokens", "it", "── masked, 1 tokens", "no"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("ending", ["jsonl", "arrow", "parquet"])
async def test_exports_come_back_as_they_were_with_how_it_ended(
    house: list[Script], bus: Bus, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"traces.{ending}"
    (told,) = await polar("export", str(path))
    assert told["traces"] == 4
    rows = list(read_rows(path))
    assert [r["session"] for r in rows] == [house[0].session] * 2 + [house[1].session] * 2
    assert {(r["outcome"], r["reward"], r["trainable"]) for r in rows} == {(None, None, None)}
    assert rows[1]["response_ids"].tolist() == [10, 11, E, 7, 30, E]
    assert rows[1]["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1]
    assert rows[0]["logprobs"].dtype == np.float32 and rows[0]["logprobs"][0] == np.float32(-0.5)
    assert orjson.loads(rows[0]["provenance"])["harness"] == "command"
    await bus.once(closed(house))
    message = await bus.last(subjects.group(house[0].task))
    assert message is not None
    await Reconstructor(bus, "live", BUILT_IN["exact"]).on_group_closed(message)
    await polar("export", str(path))
    ends = {(r["session"], r["outcome"], r["reward"]) for r in read_rows(path)}
    assert ends == {(house[0].session, "passed", 0.0), (house[1].session, "passed", 1.0)}


@pytest.mark.parametrize("ending", ["jsonl", "arrow", "parquet"])
async def test_pictures_are_exported_as_references_and_checked(
    bus: Bus, house: list[Script], tmp_path: Path, ending: str
) -> None:
    ref = await Blobs(bus, FIRST_SEGMENT).put(b"\x89PNG no", "image/png")
    script = Script(task=task_id(FIRST_SEGMENT, "run", "pictures")).started()
    script.call("c1", [1, 7, 7], [10, E], images=(ImageRef(message=0, part=0, blob=ref, span=(1, 2)),)).ended()
    await script.publish(bus)
    end = await bus.last(subjects.session(script.session, 1, "artifacts"))
    assert end is not None
    await Reconstructor(bus, "shown", BUILT_IN["exact"]).on_ended(end)
    path = tmp_path / f"traces.{ending}"
    await polar("export", str(path), "--build", "shown")
    (row,) = read_rows(path)
    (image,) = orjson.loads(row["images"])
    assert image["blob"]["sha256"] == ref.sha256 and image["mime"] == "image/png" and image["span"] == [1, 2]
    with pytest.raises(TraceError, match=r"images\[0\] stands at \[4, 2\] of 5 ids"):
        check(row | {"images": row["images"].replace("[1,2]", "[4,2]")})


async def test_an_edited_export_is_refused(house: list[Script], tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    await polar("export", str(path))
    path.write_text(path.read_text().replace('"response_ids":[10,11,99,5', '"response_ids":[10,11,98,5', 1))
    with pytest.raises(TraceError, match="hashes to"):
        list(read_rows(path))
    with pytest.raises(ConfigError, match="endings"):
        await polar("export", str(tmp_path / "traces.csv"))


@pytest.mark.parametrize("ending", ["jsonl", "arrow", "parquet"])
async def test_an_export_to_where_nothing_can_be_written_says_so(
    house: list[Script], tmp_path: Path, ending: str
) -> None:
    with pytest.raises(ConfigError, match=f"traces.{ending}: can't be written: .*No such file"):
        await polar("export", str(tmp_path / "nowhere" / f"traces.{ending}"))
