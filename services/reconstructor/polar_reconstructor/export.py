"""Traces as files: JSONL (one object a line), Arrow IPC or Parquet (one row a trace), read back with the same checks.

Lengths and alignment are validated on both ends; the trace id is recomputed on reading, so a damaged or edited file
doesn't pass. Files are written beside their name and moved there when they are complete.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from polar_common.errors import ConfigError, TraceError
from polar_common.events import GroupMember
from polar_common.traces import Span, trace_hash

from .images import check_places
from .traces import Read

__all__ = ["FORMATS", "SCHEMA", "Row", "check", "format_of", "read_rows", "row_of", "write"]

Format = Literal["jsonl", "arrow", "parquet"]
FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".arrow": "arrow", ".feather": "arrow", ".parquet": "parquet"}
_BATCH = 256
Row = dict[str, Any]

SCHEMA = pa.schema(
    [
        ("trace_id", pa.string()), ("run", pa.string()), ("build", pa.string()), ("task", pa.string()),
        ("session", pa.string()), ("attempt", pa.int32()), ("number", pa.int32()), ("rules", pa.string()),
        ("rules_hash", pa.string()), ("status", pa.string()), ("agent_role", pa.string()),
        ("chain_class", pa.string()), ("ambiguous", pa.bool_()), ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())), ("action_tokens", pa.int64()), ("session_traces", pa.int32()),
        ("session_action_tokens", pa.int64()), ("policy_seq_min", pa.int64()), ("policy_seq_max", pa.int64()),
        ("agent_depth", pa.int32()), ("agent", pa.string()), ("parent_call", pa.string()), ("tree", pa.string()),
        ("images", pa.string()), ("outcome", pa.string()), ("reward", pa.float64()), ("trainable", pa.bool_()),
        ("spans", pa.string()), ("provenance", pa.string()),
    ]
)  # fmt: skip
"""Spans, pictures, provenance and the place in a tree are JSON text: nested, sparse, and a small part of the bytes."""

_TEXT = ("tree", "images", "spans", "provenance")
_ARRAYS = {"prompt_ids": "<i4", "response_ids": "<i4", "loss_mask": "u1", "logprobs": "<f4"}
_ENDS = ("outcome", "reward", "trainable")
"""From the group's end, which a trace itself can't know; null where the group isn't closed, and no reward is null."""
_COPIED = [name for name in SCHEMA.names if name not in (*_ARRAYS, *_TEXT, *_ENDS)]


def format_of(path: Path) -> Format:
    """By the file name's ending. Raises ConfigError for another one."""
    try:
        return FORMATS[path.suffix]
    except KeyError:
        raise ConfigError(f"endings are {', '.join(FORMATS)}", str(path)) from None


def row_of(read: Read, member: GroupMember | None = None) -> Row:
    """A trace as a row: scalars, arrays, spans and provenance as JSON text; `member`: how its session ended."""
    trace = read.trace
    row: Row = {name: getattr(trace, name) for name in _COPIED}
    row |= {
        "prompt_ids": read.prompt,
        "response_ids": read.response,
        "loss_mask": read.mask,
        "logprobs": read.logprobs,
        "tree": trace.tree.model_dump_json() if trace.tree is not None else "null",
        "images": orjson.dumps([i.model_dump(mode="json") for i in trace.images]).decode(),
        "spans": orjson.dumps([s.model_dump(mode="json") for s in trace.spans]).decode(),
        "provenance": trace.provenance.model_dump_json(),
    }
    row |= {name: getattr(member, name) if member is not None else None for name in _ENDS}
    check(row)
    return row


def check(row: Row) -> None:
    """Raises TraceError where arrays don't align or the id isn't the content's."""
    arrays = {name: np.asarray(row[name], dtype=dtype) for name, dtype in _ARRAYS.items()}
    lengths = {name: len(arrays[name]) for name in ("response_ids", "loss_mask", "logprobs")}
    if len(set(lengths.values())) != 1:
        raise TraceError(f"trace {row['trace_id']}: lengths disagree: {lengths}")
    check_places(row["trace_id"], orjson.loads(row["images"]), len(arrays["prompt_ids"]) + lengths["response_ids"])
    spans = tuple(Span.model_validate(s) for s in orjson.loads(row["spans"]))
    found = trace_hash(
        arrays["prompt_ids"], arrays["response_ids"], arrays["loss_mask"], arrays["logprobs"], spans, row["rules_hash"]
    )
    if found != row["trace_id"]:
        raise TraceError(f"trace {row['trace_id']}: the content hashes to {found}")


async def write(path: Path, reads: AsyncIterator[Read], members: Mapping[str, GroupMember] | None = None) -> int:
    """Write all traces, with their sessions' ends where `members` has them; their number.

    The file appears whole or not at all. Raises ConfigError where it can't.
    """
    kind = format_of(path)
    draft = path.with_name(path.name + ".part")
    count = 0
    try:
        sink = _Sink(draft, kind)
    except OSError as error:
        raise ConfigError(f"can't be written: {error.strerror or error}", str(path)) from error
    try:
        async for read in reads:
            sink.add(row_of(read, (members or {}).get(read.trace.session)))
            count += 1
    except BaseException:
        sink.close()
        draft.unlink(missing_ok=True)
        raise
    sink.close()
    draft.replace(path)
    return count


class _Sink:
    def __init__(self, path: Path, kind: Format) -> None:
        self._rows: list[Row] = []
        self._lines = path.open("wb") if kind == "jsonl" else None
        self._table: Any = None
        if kind == "arrow":
            self._table = pyarrow.ipc.new_file(str(path), SCHEMA)
        elif kind == "parquet":
            self._table = pyarrow.parquet.ParquetWriter(str(path), SCHEMA, compression="zstd")

    def add(self, row: Row) -> None:
        if self._lines is not None:
            plain = row | {name: orjson.Fragment(row[name]) for name in _TEXT}
            self._lines.write(orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            return
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._table.write_batch(pa.RecordBatch.from_pylist(self._rows, schema=SCHEMA))
            self._rows = []

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            return
        self._flush()
        self._table.close()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, arrays as numpy, each checked. Raises TraceError, ConfigError."""
    kind = format_of(path)
    for row in _lines(path) if kind == "jsonl" else _records(path, kind):
        row |= {name: np.asarray(row[name], dtype=dtype) for name, dtype in _ARRAYS.items()}
        check(row)
        yield row


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row: Row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TraceError(f"{path.name}, line {number}: {error}") from error
            yield row | {name: orjson.dumps(row[name]).decode() for name in _TEXT}


def _records(path: Path, kind: Format) -> Iterator[Row]:
    if kind == "parquet":
        batches: Iterator[Any] = pyarrow.parquet.ParquetFile(str(path)).iter_batches(_BATCH)
    else:
        reader = pyarrow.ipc.open_file(str(path))
        batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
    yield from itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
