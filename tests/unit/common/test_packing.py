"""Columns survive the wire bit for bit; damage is noticed."""

from __future__ import annotations

import base64
import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_common.errors import BlobError
from polar_common.packing import INLINE_LIMIT, Column, pack, pack_bytes, unpack


@given(st.lists(st.integers(0, 2**31 - 1), max_size=200))
def test_ids_round_trip(ids: list[int]) -> None:
    column, blob = pack(ids, "i32")
    assert blob is None
    assert unpack(Column.model_validate_json(column.model_dump_json())).tolist() == ids


@given(st.lists(st.floats(width=32, allow_nan=True), max_size=100))
def test_logprobs_round_trip_including_what_isnt_finite(values: list[float]) -> None:
    back = unpack(pack(values, "f32")[0]).tolist()
    assert len(back) == len(values)
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(back, values, strict=True))


def test_large_columns_become_blobs_named_by_their_hash() -> None:
    ids = [hash(str(i)) % 150_000 for i in range(50_000)]
    column, blob = pack(ids, "i32")
    assert column.data is None and blob is not None
    ref, body = blob
    assert ref.sha256 == hashlib.sha256(body).hexdigest()
    assert ref.size == len(body) >= INLINE_LIMIT
    assert unpack(column, body).tolist() == ids


@pytest.mark.parametrize(
    "column",
    [
        Column(type="i32", n=3, data=base64.b64encode(pack_bytes([1, 2], "i32")).decode()),
        Column(type="i32", n=1, data=base64.b64encode(pack_bytes([1, 2], "i32")).decode()),
        Column(type="i32", n=2, data="not base64!"),
        Column(type="i32", n=2, data=base64.b64encode(b"not zstd").decode()),
        Column(type="f32", n=2, data=None),
    ],
)
def test_damage_is_noticed(column: Column) -> None:
    with pytest.raises(BlobError):
        unpack(column)


def test_a_bomb_isnt_expanded() -> None:
    bomb = pack_bytes([0] * 10_000_000, "i32")
    with pytest.raises(BlobError):
        unpack(Column(type="i32", n=4, data=base64.b64encode(bomb).decode()))
