"""The exactness benchmark in small: an engine that makes continuing hard, and its own journal of what it was sent."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest

pytestmark = pytest.mark.nats


def test_every_call_of_every_protocol_is_exact_faithful_and_continued() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.exact", "--json", "--short"], stdout=subprocess.PIPE, timeout=110, check=True
    )
    lines = [orjson.loads(line) for line in done.stdout.splitlines()]
    found = {line["name"]: line["value"] for line in lines}
    shares = [name for name in found if name.startswith(("exact_share", "faithful_share", "continued_share"))]
    assert len(shares) >= 15 and {found[name] for name in shares} == {1.0}, found
    assert all(value <= 1.2 for name, value in found.items() if name.startswith("samples_per_session")), found
    assert all(value > 0.1 for name, value in found.items() if name.startswith("feature_share")), found
