"""How the local engine's tests talk to it, and the plain recompute that they hold its numbers against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

GENERATE = "/inference/v1/generate"


@dataclass
class Streamed:
    """One choice put together from its chunks."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_versions: list[dict[str, Any]] | None = None


class EngineClient:
    """A blocking client; every call checks the status that it expects."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)

    def generate(self, token_ids: Sequence[int], status: int = 200, **params: Any) -> dict[str, Any]:
        """Sampling parameters as keywords; fields of the request itself in `request={...}`."""
        request = params.pop("request", {})
        body = {"token_ids": list(token_ids), "sampling_params": {"logprobs": 0, **params}, **request}
        answer = self.http.post(GENERATE, json=body)
        assert answer.status_code == status, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def chunks(self, token_ids: Sequence[int], **params: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer; checks the framing."""
        request = params.pop("request", {})
        sampling = {"logprobs": 0, **params}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "stream": True, **request}
        with self.http.stream("POST", GENERATE, json=body) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            raw = answer.read().decode()
        events = raw.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(e.startswith("data: ") for e in events[:-1])
        return [json.loads(e[6:]) for e in events[:-2]]

    def stream(self, token_ids: Sequence[int], **params: Any) -> dict[int, Streamed]:
        """A streamed answer by choice."""
        choices: dict[int, Streamed] = {}
        for chunk in self.chunks(token_ids, **params):
            for part in chunk["choices"]:
                choice = choices.setdefault(part["index"], Streamed())
                assert choice.finish_reason is None, "nothing may follow the end of a choice"
                choice.token_ids += part["token_ids"]
                choice.text += part.get("text", "")
                if part["logprobs"] is not None:
                    choice.logprobs += [entry["logprob"] for entry in part["logprobs"]["content"]]
                choice.finish_reason = part["finish_reason"]
                choice.stop_reason = part["stop_reason"]
                choice.weight_versions = part["weight_versions"]
        return choices

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        """A control call."""
        answer = self.http.post(path, json=body) if body is not None else self.http.post(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        """A control question."""
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    """The reported log-probabilities of an unstreamed choice, with a check that they belong to its tokens."""
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    return [entry["logprob"] for entry in content]


class Reference:
    """The same model by the plain library: one forward pass over the whole sequence, no cache, no batch."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Teacher-forced log-probabilities of `answer` behind `prompt`."""
        torch = self._torch
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer]])
            logits = self._model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].double() / temperature
            rows = logits.log_softmax(-1)
            picked: np.ndarray = rows[torch.arange(len(answer)), torch.tensor(list(answer))].numpy()
        return picked
