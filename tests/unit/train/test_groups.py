"""Traces on arrival: what doesn't align or doesn't hash to its id is refused, and rewards find their traces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from tests.scripted_sessions import Script

from polar_common.blobs import Blobs
from polar_common.errors import TraceError
from polar_common.events import GroupMember
from polar_common.packing import pack
from polar_reconstructor.build import build_session, prepare
from polar_reconstructor.domain import select
from polar_reconstructor.publish import outgoing
from polar_reconstructor.rules import BUILT_IN
from polar_train.groups import TrainTrace, load_trace

E = 99


class NoBlobs:
    async def column(self, column: Any) -> None:
        assert column.blob is None


def body() -> dict[str, Any]:
    script = Script().call("c1", [1], [10, E]).call("c2", [1, 10, E, 5], [20, E], parent="c1").ended()
    selection = select(script.session, script.stored())
    assert selection is not None
    made = build_session(prepare(selection), {}, BUILT_IN["exact"])
    found: dict[str, Any] = orjson.loads(outgoing(made, "live").traces[0][1])
    return found


def column(values: list[float], kind: Any) -> dict[str, Any]:
    return pack(values, kind)[0].model_dump()


async def load(value: dict[str, Any], **rewards: float) -> TrainTrace:
    member = GroupMember(session=value["session"], outcome="passed", reward=0.5, trainable=True, trace_rewards=rewards)
    return await load_trace(orjson.dumps(value), cast(Blobs, NoBlobs()), member)


async def test_a_sound_trace_arrives_as_it_was() -> None:
    trace = await load(body())
    assert trace.response_ids.tolist() == [10, E, 5, 20, E] and trace.length == 6
    assert trace.reward == 0.5 and trace.step_rewards == {}


async def test_rewards_of_steps_and_traces_come_before_the_sessions() -> None:
    value = body()
    assert (await load(value, c1=0.1, c2=0.9)).reward == 0.9
    assert (await load(value, c1=0.1)).step_rewards == {"c1": 0.1}
    assert (await load(value, c1=0.1, **{value["trace_id"]: 3.0})).reward == 3.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"loss_mask": column([1, 1], "u8")}, "5 ids, a mask of 2"),
        ({"logprobs": column([-1.0] * 4, "f32")}, "4 log-probs"),
        ({"loss_mask": column([1, 1, 2, 0, 0], "u8")}, "the mask holds 2"),
        ({"loss_mask": column([1, 1, 1, 1, 1], "u8")}, "trains 5 tokens, the trace says 4"),
        ({"logprobs": column([-1.0, float("nan"), 0, -1, -1], "f32")}, r"logprobs\[1\] isn't finite"),
        ({"response_ids": column([10, E, -5, 20, E], "i32")}, "negative id"),
        ({"response_ids": column([10, E, 6, 20, E], "i32")}, "doesn't hash to its id"),
        ({"logprobs": column([-1.0, -1, 0, -1, -1], "f32")}, "doesn't hash to its id"),
    ],
)
async def test_a_damaged_trace_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(TraceError, match=told):
        await load(body() | change)


async def test_spans_must_lie_inside_the_response_in_order() -> None:
    value = body()
    value["spans"][1]["start"] = 1
    with pytest.raises(TraceError, match="span c2"):
        await load(value)


async def test_pictures_arrive_as_references_that_stand_inside_the_trace() -> None:
    image = {"blob": {"sha256": "a" * 64, "size": 3, "media_type": "image/png"}, "mime": "image/png", "span": [0, 1]}
    trace = await load(body() | {"images": [image]})
    assert [(i.mime, i.span, i.blob and i.blob.sha256) for i in trace.images] == [("image/png", (0, 1), "a" * 64)]
    for span in ([6, 1], [-1, 1], [2, -1]):
        with pytest.raises(TraceError, match=r"a picture at .* of 6 ids"):
            await load(body() | {"images": [image | {"span": span}]})


def test_the_trainers_library_needs_no_service_and_no_torch() -> None:
    names = {"torch", "transformers", "polar_render", "polar_reconstructor", "polar_ingest"}
    code = f"import sys, polar_train; print([m for m in sys.modules if m.partition('.')[0] in {names!r}])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path.cwd())
    assert found.stdout.strip() == "[]"
