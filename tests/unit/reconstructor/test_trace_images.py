"""Pictures in traces: by reference, each once, where their ids stand; never the bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson
import pytest
from reconstruction_kit import built, ids
from tests.scripted_sessions import Script

from polar_common.errors import TraceError
from polar_common.events import ImageRef
from polar_common.packing import BlobRef
from polar_common.traces import Trace, TraceImage
from polar_reconstructor import tree
from polar_reconstructor.build import Built, build_session, prepare
from polar_reconstructor.domain import select
from polar_reconstructor.publish import outgoing
from polar_reconstructor.rules import BUILT_IN, Chain, Link, View

E, PAD = 99, 7
PNG = b"\x89PNG not really"


def blob(name: str) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(name.encode()).hexdigest(), size=len(PNG), media_type="image/png")


def picture(name: str, message: int, at: tuple[int, int] | None, part: int = 0, **more: Any) -> ImageRef:
    facts = {"processor": "Qwen2VLImageProcessor", "processor_hash": "p" * 64, "grid": (1, 2, 4)} | more
    return ImageRef(message=message, part=part, blob=blob(name), span=at, **facts)


def session() -> Script:
    """Two turns with a picture each; the second also branches off."""
    first, second = picture("one", 0, (1, 2)), picture("two", 2, (7, 3))
    script = Script().started().call("c1", [1, PAD, PAD, 2], [10, E], images=(first,))
    script.call(
        "c2", [1, PAD, PAD, 2, 10, E, 5, PAD, PAD, PAD, 6], [20, E], parent="c1", base="c1", shared=6,
        images=(first, second),
    )  # fmt: skip
    script.call("c3", [1, PAD, PAD, 2, 10, E, 8], [30, E], parent="c1", base="c1", shared=6, images=(first,))
    return script.ended()


def places(made: Built) -> list[list[tuple[str, list[int] | None]]]:
    names = {blob(n).sha256: n for n in ("one", "two", "three")}
    return [[(names[i["blob"]["sha256"]], i["span"]) for i in t.draft.images] for t in made.traces]


def test_each_picture_is_told_once_where_its_ids_stand() -> None:
    made = built(session())
    assert places(made) == [[("one", [1, 2]), ("two", [7, 3])], [("one", [1, 2])]]
    for (prompt, response), trace in zip(ids(made), made.traces, strict=True):
        for image in trace.draft.images:
            start, size = image["span"]
            assert (prompt + response)[start : start + size] == [PAD] * size


def test_a_completion_of_its_own_has_all_pictures_of_its_prompt() -> None:
    made = built(session(), "per_request")
    assert places(made) == [[("one", [1, 2])], [("one", [1, 2]), ("two", [7, 3])], [("one", [1, 2])]]


def test_a_cut_trace_has_only_the_pictures_that_it_shows() -> None:
    made = built(session(), max_trace_tokens=8)
    assert places(made)[0] == [("one", [1, 2])]


def test_tree_nodes_have_their_own_pictures_and_a_walk_has_the_chains() -> None:
    made, chains = built(session(), "tree"), built(session())
    nodes = [(t.draft, t.place) for t in made.traces if t.place is not None]
    assert places(made) == [[("one", [1, 2])], [("two", [1, 3])], []]
    for draft, place in nodes:
        for image in draft.images:
            start, size = image["span"]
            assert [*draft.prompt, *draft.response][start : start + size] == [PAD] * size, place
    walked = [tree.walk(nodes, leaf).images for leaf in (1, 2)]
    assert walked == [t.draft.images for t in chains.traces]


def test_pictures_move_with_their_ids_where_a_sample_stands_in_for_its_copy() -> None:
    """`prefix_merging`: raw [8, 9] in place of the copy [4]: everything behind is one further on."""
    first, second = picture("one", 0, (1, 1)), picture("two", 2, (5, 2))
    script = Script().started().call("c1", [1, PAD], [8, 9], images=(first,), context="native", chain_class="native")
    script.call(
        "c2", [1, PAD, 4, E, 5, PAD, PAD, 6], [20, E], parent="c1", images=(first, second), context="native",
        chain_class="native",
    )  # fmt: skip
    made = built(script.ended(), "prefix_merging")
    assert ids(made) == [([1, PAD], [8, 9, E, 5, PAD, PAD, 6, 20, E])]
    assert places(made) == [[("one", [1, 1]), ("two", [6, 2])]]


class Apart:
    """c2 behind c1, with the end of its own prompt alone between them."""

    def chains(self, view: View) -> list[Chain]:
        return [Chain((Link(0), Link(1, gap=view.contexts.prompt(view.calls[1])[-3:], drift_class="edited")))]


def test_a_picture_whose_ids_a_rule_left_out_has_no_place() -> None:
    first, second = picture("one", 0, (1, 2)), picture("two", 2, (4, 2))
    script = Script().started().call("c1", [1], [10, E])
    script.call("c2", [1, PAD, PAD, 5, PAD, PAD, 6], [20, E], images=(first, second)).ended()
    selection = select(script.session, script.stored())
    assert selection is not None
    made = build_session(prepare(selection), {}, BUILT_IN["exact"], rule=Apart())
    assert ids(made) == [([1], [10, E, PAD, PAD, 6, 20, E])]
    assert places(made) == [[("one", None), ("two", [3, 2])]]


def test_what_isnt_known_stays_unknown() -> None:
    address = ImageRef(message=0, part=1, url="https://example.org/a.png")
    script = Script().started().call("c1", [1, 2], [10, E], images=(picture("one", 0, None), address)).ended()
    (trace,) = [Trace.model_validate_json(body) for _, body, _ in outgoing(built(script), "live").traces]
    assert [(i.blob, i.mime, i.url, i.span) for i in trace.images] == [
        (blob("one"), "image/png", "", None),
        (None, "", "https://example.org/a.png", None),
    ]


@pytest.mark.parametrize("rules", ["exact", "per_request", "prefix_merging", "tree"])
def test_published_pictures_are_references_in_the_form_of_the_contract(rules: str) -> None:
    out = outgoing(built(session(), rules), "live")
    for _, body, _ in out.traces:
        trace = Trace.model_validate_json(body)
        assert trace.model_dump(mode="json")["images"] == orjson.loads(body)["images"]
        for image in trace.images:
            assert image == TraceImage(
                blob=image.blob, mime="image/png", processor="Qwen2VLImageProcessor", processor_hash="p" * 64,
                span=image.span, grid=(1, 2, 4),
            )  # fmt: skip
    assert out.pictures == [blob("one"), blob("two")]
    assert all(ref != picture for ref, _ in out.blobs for picture in out.pictures)


def test_pictures_are_outside_the_trace_id() -> None:
    with_pictures, without = built(session()), session()
    without.events = [
        (n, e.model_copy(update={"images": ()}) if e.kind == "completion.captured" else e) for n, e in without.events
    ]
    assert [t.trace_id for t in built(without).traces] == [t.trace_id for t in with_pictures.traces]


@pytest.mark.parametrize(
    ("images", "told"),
    [
        ([{"message": 0, "part": 0, "span": [3, 2]}], r"c1, images\[0\]: span \(3, 2\) in a prompt of 4 ids"),
        ([{"message": 0, "part": 0, "span": [-1, 2]}], r"c1, images\[0\]: span"),
        ([{"message": -1, "part": 0}], r"c1, images\[0\]: message"),
        ([{"message": 0, "part": 0, "blob": {"sha256": "x", "size": 1}}], r"c1, images\[0\]: blob.sha256"),
        (["x"], r"c1, images\[0\]"),
        ("x", "c1: damaged event: images is 'x'"),
    ],
)
def test_damaged_pictures_are_named(images: object, told: str) -> None:
    from test_bad_input import damaged, setting

    script = Script().started().call("c1", [1, PAD, PAD, 2], [10, E]).ended()
    with pytest.raises(TraceError, match=told):
        damaged(script, {"c1": setting("images", images)})
