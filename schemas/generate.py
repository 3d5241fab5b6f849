"""Write the schemas from the code: `python schemas/generate.py [DIRECTORY]`. A test fails when they drift.

events/<kind>.json    JSON Schema of each event
messages/<name>.json  task, trace, manifest, group closing
asyncapi.json         channels (subject patterns) with their messages, who writes and who reads
openapi-ingest.json   ingest's HTTP interface
clickhouse.sql        tables and views of analytics
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from polar_analytics.views import ddl_text
from polar_common import __version__
from polar_common.bus.client import BODY
from polar_common.bus.wire import ENCODING
from polar_common.events import EVENT_TYPES
from polar_common.ownership import OWNERS
from polar_common.task_spec import TaskSpec
from polar_common.topology import Topology, consumers
from polar_common.traces import GroupTraces, Trace, TraceManifest
from polar_ingest.openapi import openapi

MESSAGES: dict[str, Any] = {"task": TaskSpec, "trace": Trace, "manifest": TraceManifest, "group": GroupTraces}
HEADERS = {
    "type": "object",
    "properties": {
        BODY: {"type": "string", "description": "Hash of what the event says, without who said it and when."},
        ENCODING: {
            "const": "zstd",
            "description": "The body is one zstd frame: long events on streams that the server doesn't compress, as a "
            "cluster's. Without it the body is JSON as it is.",
        },
    },
}


def _dump(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"


def asyncapi() -> dict[str, Any]:
    """AsyncAPI 3.0: one channel per event kind, one receive operation per durable consumer."""
    channels = {
        kind: {
            "address": OWNERS[kind].pattern,
            "messages": {
                kind: {
                    "contentType": "application/json",
                    "headers": {"$ref": "#/components/schemas/headers"},
                    "payload": {"$ref": f"./events/{kind}.json"},
                }
            },
            "description": f"Written by {OWNERS[kind].owner}.",
        }
        for kind in sorted(EVENT_TYPES)
    }
    operations = {
        spec.durable: {
            "action": "receive",
            "channel": {"$ref": "#/channels/" + kind},
            "summary": f"{spec.owner}, durable consumer on {spec.stream}",
        }
        for spec in consumers(Topology())
        for kind in sorted(EVENT_TYPES)
        if any(_covers(pattern, OWNERS[kind].pattern) for pattern in spec.filters)
    }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Polar", "version": __version__},
        "channels": channels,
        "operations": operations,
        "components": {"schemas": {"headers": HEADERS}},
    }


def _covers(pattern: str, subject: str) -> bool:
    mine, other = pattern.split("."), subject.split(".")
    for index, token in enumerate(mine):
        if token == ">":
            return len(other) > index
        if index >= len(other) or (token != "*" and other[index] not in (token, "*")):
            return False
    return len(mine) == len(other)


def files() -> dict[str, bytes]:
    """Relative path → content."""
    out = {f"events/{kind}.json": _dump(cls.model_json_schema()) for kind, cls in EVENT_TYPES.items()}
    out |= {f"messages/{name}.json": _dump(cls.model_json_schema()) for name, cls in MESSAGES.items()}
    out["asyncapi.json"] = _dump(asyncapi())
    out["openapi-ingest.json"] = _dump(openapi())
    out["clickhouse.sql"] = ddl_text().encode()
    return out


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, content in files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
