"""Whether an engine takes pictures is found out by showing it one; whichever way it refuses, it stays usable."""

from __future__ import annotations

from typing import Any

import pytest
from recorded import Request, Wire, serving

from polar_proxy.engines.chat import VllmChatEngine


class _Blind(Wire):
    """Answers a request with a picture by `status`."""

    status = 400

    def whole(self, request: Request, path: str) -> tuple[int, Any]:
        messages = (request.body or {}).get("messages") or ()
        if any(isinstance(m["content"], list) for m in messages):
            return self.status, {"error": {"message": "smol is not a multimodal model", "code": self.status}}
        return super().whole(request, path)


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_a_text_model_takes_none(status: int) -> None:
    wire = _Blind("vllm_chat")
    wire.status = status
    async with serving(wire):
        adapter = VllmChatEngine(wire.url, "", "r0")
        found = await adapter.capabilities()
        await adapter.close()
    assert not found.images and found.ids_out and found.model == "smol"


async def test_a_model_that_answers_about_a_picture_takes_them() -> None:
    async with serving(Wire("vllm_chat")) as wire:
        adapter = VllmChatEngine(wire.url, "", "r0")
        found = await adapter.capabilities()
        await adapter.close()
    assert found.images
    shown = [
        r.body["messages"][0]["content"] for r in wire.generations if isinstance(r.body["messages"][0]["content"], list)
    ]
    ((picture, text),) = shown
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo") and text["type"] == "text"
