"""Every captured request of every harness, sent again: answered, recorded, and nothing of it gone without a note."""

from __future__ import annotations

from itertools import groupby

import pytest
from proxy_kit import TASK, Kit, session_key

from captures_kit import Capture, captures
from polar_common.events import CompletionCaptured, CompletionRejected
from polar_proxy.dialects import route

pytestmark = pytest.mark.nats

SCENARIOS = {name: list(group) for name, group in groupby(captures(), key=lambda c: c.scenario)}


def _kind(capture: Capture) -> str:
    return route(capture.method, capture.path, capture.params, capture.headers)[1].kind


@pytest.mark.parametrize("harness", sorted({c.harness for c in captures()}))
async def test_every_captured_request_is_served_and_recorded(proxy: Kit, harness: str) -> None:
    mine = [group for name, group in SCENARIOS.items() if name.startswith(f"{harness}/")]
    for number, scenario in enumerate(mine):
        key = session_key(f"{TASK}-{number}")
        for capture in scenario:
            url = f"{proxy.base(key)}{capture.path}?{capture.query}"
            response = await proxy.client.request(
                capture.method, url, content=capture.written(), headers=capture.headers
            )
            assert response.status_code == 200, (capture.label, response.text)
        recorded = await proxy.of(CompletionCaptured, key)
        assert not await proxy.of(CompletionRejected, key)
        sent = [c for c in scenario if _kind(c) == "generate"]
        # An identical request later on is a sample of its own, so that there is one completion per call.
        assert len(recorded) == len(sent)
        for capture, event in zip(sent, recorded, strict=True):
            dialect, found = route(capture.method, capture.path, capture.params, capture.headers)
            assert set(dialect.parse(found, capture.headers, capture.written()).dropped) <= set(event.dropped)
            assert event.untrainable == "" and event.context_exact, capture.label
