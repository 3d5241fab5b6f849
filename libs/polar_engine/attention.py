"""Attention of a ragged batch: every request over its own keys and values, shared prompts read once for all.

Where buffers have a parent, their rows attend to the parent's part together and to their own parts one by one; the two
results are joined by their log-sum-exps, which is softmax over both parts exactly. Needs torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polar_engine.kv import KvBuffer

__all__ = ["Ragged", "Segment", "attend", "batch_of"]


@dataclass
class Segment:
    """A request's place in the batch: `count` rows from `start`, to be appended to `buffer`."""

    buffer: KvBuffer
    start: int
    count: int
    mask: Any


@dataclass
class _Family:
    """Segments whose buffers share the first `base` positions of `parent`; `rows` are their rows, in order."""

    parent: KvBuffer
    base: int
    members: list[Segment]
    rows: Any


@dataclass
class Ragged:
    """One step's batch, split once for all layers."""

    segments: list[Segment]
    alone: list[Segment]
    families: list[_Family]


def batch_of(segments: list[Segment]) -> Ragged:
    """Sort the segments by what they share."""
    alone = [s for s in segments if s.buffer.parent is None]
    shared: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for seg in segments:
        if seg.buffer.parent is not None:
            shared[id(seg.buffer.parent), seg.buffer.base].append(seg)
    families = []
    for members in shared.values():
        parent = members[0].buffer.parent
        assert parent is not None
        rows = torch.tensor([r for s in members for r in range(s.start, s.start + s.count)])
        families.append(_Family(parent, members[0].buffer.base, members, rows))
    return Ragged(segments, alone, families)


def attend(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, ragged: Ragged, **_: Any
) -> tuple[Any, None]:
    """Attention over [1, heads, rows, dim]; appends keys and values, returns [1, rows, heads, dim]."""
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    layer: int = module.layer_idx
    out = query.new_zeros((1, rows, heads, dim))
    for seg in ragged.segments:
        at, last = seg.buffer.own, seg.start + seg.count
        own = seg.buffer.data[layer]
        own[0, :, at : at + seg.count] = key[0, :, seg.start : last]
        own[1, :, at : at + seg.count] = value[0, :, seg.start : last]
    # Query heads that share a key head become rows of that head: no key or value is ever copied.
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, dim)
    for seg in ragged.alone:
        mixed, _lse = _own(grouped, seg, layer, scaling)
        out[0, seg.start : seg.start + seg.count] = mixed.view(heads, seg.count, dim).transpose(0, 1)
    for family in ragged.families:
        mixed = _together(grouped, family, layer, scaling)
        out[0, family.rows] = mixed.reshape(heads, len(family.rows), dim).transpose(0, 1)
    return out, None


def _own(grouped: Any, seg: Segment, layer: int, scaling: float) -> tuple[Any, Any]:
    """A segment over its own part: [kv heads, group, count, dim] and log-sum-exps [kv heads, group, count]."""
    kv_heads, group, _, dim = grouped.shape
    rows = grouped[:, :, seg.start : seg.start + seg.count].reshape(1, kv_heads, group * seg.count, dim)
    mixed, lse = _softmax_mix(rows, seg.buffer, layer, seg.buffer.own + seg.count, seg.mask, scaling)
    return mixed.reshape(kv_heads, group, seg.count, dim), lse.reshape(kv_heads, group, seg.count)


def _together(grouped: Any, family: _Family, layer: int, scaling: float) -> Any:
    """All rows of a family over shared and own parts, [kv heads, group, rows, dim]."""
    kv_heads, group, _, dim = grouped.shape
    count = len(family.rows)
    rows = grouped[:, :, family.rows].reshape(1, kv_heads, group * count, dim)
    shared, shared_lse = _softmax_mix(rows, family.parent, layer, family.base, None, scaling)
    parts: Sequence[tuple[Any, Any]] = [_own(grouped, seg, layer, scaling) for seg in family.members]
    own = torch.cat([p[0] for p in parts], dim=2)
    own_lse = torch.cat([p[1] for p in parts], dim=2)
    # exp(a) / (exp(a) + exp(b)) is the share of the softmax's mass that lies in the shared part.
    share = torch.sigmoid(shared_lse.reshape(kv_heads, group, count) - own_lse)
    return torch.lerp(own, shared.reshape(own.shape), share[..., None].to(own.dtype))


def _softmax_mix(rows: Any, buffer: KvBuffer, layer: int, end: int, mask: Any, scaling: float) -> tuple[Any, Any]:
    """`rows` over the first `end` positions in `buffer.data`: values mixed by softmax, and the log-sum-exps."""
    keys, values = buffer.data[layer, None, 0, :, :end], buffer.data[layer, None, 1, :, :end]
    mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return mixed, lse
