"""Traces of real samples, recomputed: what is right agrees within the bar, what is wrong is found where it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest
from click.testing import Result
from fidelity_kit import Talk, loaded, random_ids, republish, traces
from local_engine_kit import EngineClient
from typer.testing import CliRunner

pytest.importorskip("torch")
from polar_common.bus import Bus
from polar_common.cli.main import app
from polar_common.errors import ConfigError
from polar_common.events import PolicyPublished
from polar_common.nats_server import NatsServer
from polar_common.packing import pack
from polar_common.traces import TraceImage, trace_hash
from polar_engine.models import ensure_model, weights_hash
from polar_engine.testing import engine_thread
from polar_train.fidelity import TOLERANCE, Options, Policies, Report, check, recompute
from polar_train.fidelity.policies import known_models, published
from polar_train.fidelity.source import choose

pytestmark = pytest.mark.nats
TINY = ensure_model("tiny").path
END = orjson.loads((TINY / "config.json").read_bytes())["eos_token_id"]
EVENTS = ["POLAR_EVENTS_s1"]


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    with engine_thread(model="tiny", max_model_len=2048) as running:
        yield EngineClient(running.url)


async def checked(bus: Bus, build: str = "live", policies: Policies | None = None, **options: object) -> Report:
    found = policies or Policies(await published(bus, EVENTS), TINY)
    return await check(bus, Options(build, **options), found)  # type: ignore[arg-type]


async def conversation(client: EngineClient, bus: Bus, index: int, calls: int = 4, rules: str = "exact") -> Talk:
    """Each prompt is the last one, what was sampled, and some new ids."""
    talk = Talk(client, index)
    prompt = random_ids(index, 20 + 7 * index)
    for call in range(calls):
        sampling = {"temperature": (0.7, 1.0, 1.3)[(index + call) % 3]}
        facts = {"parent": f"c{call - 1}", "chain_class": "continued"} if call else {}
        answer = talk.call(f"c{call}", prompt, sampling=sampling, **facts)
        prompt = [*prompt, *answer, *random_ids(100 + call, 5)]
    await talk.publish(bus, rules)
    return talk


async def test_exact_conversations_agree_at_any_temperature(client: EngineClient, bus: Bus) -> None:
    talks = [await conversation(client, bus, index) for index in range(4)]
    report = await checked(bus)
    assert (report.sessions, report.traces, report.checked, report.spans) == (4, 4, 4, 16)
    assert report.tokens == sum(len(ids) for t in talks for ids in t.sampled.values())
    sums = report.in_scope
    assert sums.share == 1.0 and sums.spans == 16 and sums.tokens == report.tokens
    assert 0 < sums.max_abs < TOLERANCE and sums.mean_abs is not None and sums.mean_abs < 1e-5
    assert report.contexts == ["exact"] and not report.reasons and not report.unmeasured
    assert abs(sums.ratio_min - 1) < 1e-3 and abs(sums.ratio_max - 1) < 1e-3
    assert report.versions == {"v0": str(TINY)} and report.faultless


async def test_the_temperature_is_part_of_the_comparison(client: EngineClient, bus: Bus) -> None:
    talk = Talk(client, 1)
    talk.call("c0", random_ids(1, 30), sampling={"temperature": 0.7})
    await talk.publish(bus)
    (trace,) = await traces(bus)
    assert (await checked(bus)).in_scope.share == 1.0
    (span,) = trace.spans
    (one,) = await loaded(bus)
    hot = (span.model_copy(update={"temperature": 1.0}),)
    name = trace_hash(one.ids[: one.start], one.ids[one.start :], one.mask, one.logprobs, hot, trace.rules_hash)
    await republish(bus, trace, "hot", spans=hot, trace_id=name)
    report = await checked(bus, "hot")
    assert report.in_scope.share == 0.0 and report.in_scope.max_abs > 0.05


async def drifting(client: EngineClient, bus: Bus, index: int) -> Talk:
    """The second prompt shows another text in place of the first answer, as a plain template would."""
    talk = Talk(client, index)
    facts = {"end_of_turn": (END,)}
    first = random_ids(index, 40)
    answer = talk.call("c0", first, engine=facts)
    assert END not in answer
    shown = [(i + 77) % 400 for i in answer]
    second = [*first, *shown, END, *random_ids(index + 50, 6)]
    talk.call("c1", second, engine=facts, parent="c0", chain_class="continued")
    await talk.publish(bus, "prefix_merging")
    await talk.build(bus, "per_request", "apart")
    return talk


async def test_drift_shows_as_large_differences_and_as_ratios(client: EngineClient, bus: Bus) -> None:
    for index in range(3):
        await drifting(client, bus, index)
    report = await checked(bus)
    assert report.traces == 3 and report.spans == 6
    assert report.contexts == ["drifted/retokenised", "exact"]
    exact, drifted = report.context("exact"), report.context("drifted/retokenised")
    assert exact.share == 1.0 and exact.spans == 3
    assert drifted.spans == 3 and drifted.share == 0.0 and drifted.max_abs > 0.1
    assert 0 < drifted.ratio_min < drifted.ratio_max < 0.1 and abs(exact.ratio_max - 1) < 1e-3
    assert report.in_scope.share == 0.5 and not report.faultless
    assert {w.context for w in report.worst[:3]} == {"drifted/retokenised"}
    # The same calls, each in the context it really had.
    apart = await checked(bus, "apart")
    assert apart.in_scope.share == 1.0 and apart.spans == 6


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "temperature": 0.6}]
)
async def test_truncated_sampling_is_outside_and_recomputed_over_its_kept_set(
    client: EngineClient, bus: Bus, sampling: dict[str, float]
) -> None:
    talk = Talk(client, 1)
    prompt = random_ids(3, 30)
    answer = talk.call("plain", prompt)
    talk.call("cut", [*prompt, *answer, 7], sampling=sampling, parent="plain", chain_class="continued")
    await talk.publish(bus)
    report = await checked(bus)
    assert report.reasons == ["truncated_sampling"] and report.in_scope.spans == 1 and report.in_scope.share == 1.0
    outside = report.scope("truncated_sampling")
    assert outside.spans == 1 and outside.outside_kept == 0 and outside.max_abs < TOLERANCE


async def test_an_altered_log_prob_is_found_where_it_is(client: EngineClient, bus: Bus) -> None:
    for index in range(3):
        talk = Talk(client, index)
        prompt = random_ids(index, 33)
        first = talk.call("c0", prompt)
        later = [*prompt, *first, 1, 2, 3]
        talk.call("c1", later, parent="c0", chain_class="continued", alter={5: 0.01} if index == 1 else {})
        await talk.publish(bus)
        if index == 1:
            session, place, token = talk.session, len(later) + 5, talk.sampled["c1"][5]
    report = await checked(bus)
    assert report.in_scope.within == 5 and report.in_scope.spans == 6
    worst = report.worst[0]
    assert (worst.session, worst.completion, worst.at, worst.place, worst.token) == (session, "c1", 5, place, token)
    assert worst.difference == pytest.approx(-0.01, abs=1e-4)
    assert worst.before[-1] == later[-1] if worst.at == 0 else len(worst.before) == 24
    assert report.worst[1].difference == pytest.approx(0, abs=TOLERANCE)


async def test_spans_whose_weights_are_gone_are_counted(client: EngineClient, bus: Bus, tmp_path: Path) -> None:
    talk = Talk(client, 1)
    prompt = random_ids(1, 20)
    for number, version in enumerate(["v0", "step-1", "step-2", "step-3", "step-4"]):
        facts = {"parent": f"c{number - 1}", "chain_class": "continued"} if number else {}
        prompt += [*talk.call(f"c{number}", prompt, versions=[(version, 0)], **facts), 9]
    await talk.publish(bus)
    places = {"step-1": str(tmp_path / "gone"), "step-3": "s3://bucket/step-3", "step-4": str(TINY)}
    for number, (version, path) in enumerate(places.items(), 1):
        event = PolicyPublished(
            segment="s1", version=version, policy_seq=number, model="tiny", weights=path, weights_hash="0" * 64
        )
        await bus.once(event)
    report = await checked(bus)
    assert report.spans == 5 and report.in_scope.spans == 1 and report.in_scope.share == 1.0
    assert report.unmeasured == {
        "weights_gone": 1, "weights_unknown": 1, "weights_remote": 1, "weights_changed": 1,
    }  # fmt: skip
    assert report.versions["step-2"] == "weights_unknown"
    without = await checked(bus, policies=Policies({}))
    assert without.unmeasured == {"weights_unknown": 5} and without.in_scope.share is None and not without.faultless


def other_weights(target: Path) -> Path:
    """The tiny model a training step further."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(TINY), dtype=torch.float32)
    with torch.no_grad():
        draws = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draws)
    model.save_pretrained(str(target))
    AutoTokenizer.from_pretrained(str(TINY)).save_pretrained(str(target))
    return target


async def test_each_version_is_recomputed_with_its_own_weights(bus: Bus, tmp_path: Path) -> None:
    step = other_weights(tmp_path / "step-1")
    with engine_thread(model="tiny", max_model_len=2048) as running:
        client = EngineClient(running.url)
        talk = Talk(client, 1)
        prompt = random_ids(1, 40)
        before = talk.call("c0", prompt, engine={"weights_hash": weights_hash(TINY)})
        client.post("/update_weights", {"path": str(step), "version": "step-1"})
        second = [*prompt, *before, 4]
        later = {"engine": {"weights_hash": weights_hash(step)}, "chain_class": "continued"}
        after = talk.call("c1", second, parent="c0", **later)
        mixed = [*second, *after, 5]
        talk.call("c2", mixed, parent="c1", versions=[("step-1", 0), ("twin", 5)], **later)
    await talk.publish(bus)
    for number, version in enumerate(("step-1", "twin"), 1):
        await bus.once(
            PolicyPublished(
                segment="s1", version=version, policy_seq=number, model="tiny", weights=step.as_uri(),
                weights_hash=weights_hash(step),
            )
        )  # fmt: skip
    report = await checked(bus)
    assert report.in_scope.spans == 2 and report.in_scope.share == 1.0
    assert report.scope("several_versions").share == 1.0
    assert report.versions == {"v0": str(TINY), "step-1": str(step), "twin": str(step)}
    wrong = await checked(bus, policies=Policies({}, TINY))
    assert wrong.unmeasured == {"weights_unknown": 2}
    event = PolicyPublished(segment="s1", version="step-1", policy_seq=1, model="tiny", weights=str(TINY))
    swapped = await checked(bus, policies=Policies({"step-1": event}, TINY))
    assert swapped.in_scope.within == 1 and swapped.in_scope.max_abs > 0.01


async def test_nodes_of_a_tree_are_read_behind_their_ancestors(client: EngineClient, bus: Bus) -> None:
    talk = Talk(client, 1)
    root = random_ids(1, 25)
    first = [*root, *talk.call("c0", root)]
    for name, more in (("left", [1, 2]), ("right", [3, 4])):
        prompt = [*first, *more]
        answer = talk.call(name, prompt, parent="c0", chain_class="continued")
        talk.call(f"{name}2", [*prompt, *answer, 8], parent=name, chain_class="continued")
    await talk.publish(bus, "tree")
    assert [t.tree.parent for t in await traces(bus) if t.tree is not None] == [None, 0, 0]
    report = await checked(bus)
    assert report.traces == 3 and report.spans == 5 and report.in_scope.share == 1.0
    (last,) = await loaded_of(bus, 2)
    assert last.ids[: len(first)].tolist() == first


async def loaded_of(bus: Bus, number: int) -> list[object]:
    return [t for t in await loaded(bus) if t.name.number == number]


async def test_damaged_missing_and_unnamed_traces(client: EngineClient, bus: Bus) -> None:
    talk = await conversation(client, bus, 1, calls=2)
    (trace,) = await traces(bus)
    (one,) = await loaded(bus)
    column, _ = pack(np.where(one.mask == 1, one.logprobs - 1, 0).astype(np.float32), "f32")
    await republish(bus, trace, "damaged", logprobs=column)
    report = await checked(bus, "damaged")
    assert report.unreadable == {"damaged": 1} and report.spans == 0 and not report.faultless
    assert "doesn't hash to its id" in report.details[0]
    await republish(bus, trace, "another", named="f" * 64)
    report = await checked(bus, "another")
    assert report.unreadable == {"damaged": 1} and "the manifest says ffff" in report.details[0]
    await republish(bus, trace, "short", number=3)
    report = await checked(bus, "short")
    assert report.unreadable == {"missing": 1} and report.traces == 1
    await bus.once_raw(
        f"polar.traces.run.loose.{talk.script.task}.{talk.session}.0",
        trace.model_copy(update={"build": "loose"}).model_dump_json().encode(),
        trace.trace_id,
    )
    with pytest.raises(ConfigError, match="no session is in build loose"):
        await checked(bus, "loose")


async def test_traces_with_pictures_are_counted_and_not_recomputed(client: EngineClient, bus: Bus) -> None:
    await conversation(client, bus, 1, calls=2)
    (trace,) = await traces(bus)
    await republish(bus, trace, "shown", images=(TraceImage(url="https://example.org/a.png"),))
    report = await checked(bus, "shown")
    assert report.unreadable == {"pictures": 1} and report.spans == 0 and "shows 1 pictures" in report.details[0]


async def test_a_sample_of_traces_is_drawn_by_seed(client: EngineClient, bus: Bus) -> None:
    for index in range(8):
        await conversation(client, bus, index, calls=1)
    all_of_them = await checked(bus, window_tokens=60)
    assert all_of_them.checked == all_of_them.traces == 8 and all_of_them.in_scope.share == 1.0
    draws = [await choose(bus, "live", sample=3, seed=seed) for seed in (1, 1, 2, 3)]
    seen = [{name.session for name in d.names} for d in draws]
    assert [len(s) for s in seen] == [3, 3, 3, 3] and draws[0].traces == draws[0].sessions == 8
    assert seen[0] == seen[1] and len(set.union(*seen)) > 3
    drawn = await checked(bus, sample=3, seed=1, worst=100)
    assert drawn.checked == 3 and drawn.traces == 8 and {w.session for w in drawn.worst} == seen[0]
    one = await checked(bus, sessions=(next(iter(seen[0])),))
    assert one.traces == one.checked == 1


async def test_first_weights_are_known_by_their_hash(client: EngineClient, bus: Bus) -> None:
    digest = ensure_model("tiny").weights_sha256
    talk = Talk(client, 1)
    talk.call("c0", random_ids(1, 20), engine={"weights_hash": digest})
    await talk.publish(bus)
    found = await checked(bus, policies=Policies({}, None, known_models([TINY])))
    assert found.in_scope.share == 1.0 and found.versions == {"v0": str(TINY)}
    gone = await checked(bus, policies=Policies({}))
    assert gone.unmeasured == {"weights_gone": 1}


async def test_the_command(
    client: EngineClient, bus: Bus, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await conversation(client, bus, 1)
    await drifting(client, bus, 2)
    monkeypatch.setenv("POLAR_NATS", nats_server.url)
    monkeypatch.setenv("POLAR_DATA", str(tmp_path))

    async def polar(*args: str) -> Result:
        # The command runs a loop of its own.
        return await asyncio.to_thread(CliRunner().invoke, app, ["fidelity", *args])

    one = await polar("--model", "tiny", "--build", "apart", "--strict", "--json")
    assert one.exit_code == 0, one.output
    found = orjson.loads(one.stdout)
    assert found["in_scope"]["share"] == 1.0 and found["contexts"]["exact"]["spans"] == 2
    assert "recomputing traces: 2 of 2" in one.stderr
    assert [w["context"] for w in found["worst"]] == ["exact"] * 5 and found["versions"] == {"v0": str(TINY)}
    both = await polar("--model", str(TINY), "--strict", "--sample", "0")
    assert both.exit_code == 1
    assert "5 of 6 spans (83.33%)" in both.stdout and "drifted/retokenised" in both.stdout
    for arguments, told in (
        (["--build", "nowhere"], "build: no session is in build nowhere"),
        (["--run", "other"], "run: no session of run other is in build live"),
        (["--session", "s1-none-0", "--native"], "session: not in build live: s1-none-0"),
        (["--no-recompute"], "native: with --no-recompute"),
        (["--model", "nowhere"], "model: `nowhere` is neither"),
    ):
        refused = await polar(*arguments)
        assert isinstance(refused.exception, ConfigError) and told in str(refused.exception)


async def test_a_check_that_is_interrupted_ends_and_so_does_its_thread(
    client: EngineClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        await conversation(client, bus, index)
    taken = 0
    take = recompute._take

    def slow(*arguments: object) -> None:
        nonlocal taken
        taken += 1
        time.sleep(0.05)
        take(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recompute, "_take", slow)
    monkeypatch.setattr(recompute, "_LOGITS", 1)
    running = asyncio.ensure_future(checked(bus))
    while taken < 3:
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(2)
    before = taken
    await asyncio.sleep(0.5)
    assert taken == before < 60
