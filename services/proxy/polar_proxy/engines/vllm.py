"""vLLM's token endpoint `/inference/v1/generate`, which our local engine speaks too.

Answers are parsed as dictionaries, not as models: this is the hot path. A stream's events are merged per read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import orjson

from polar_common.errors import EngineBusy, EngineDown, EngineError, EngineRefused
from polar_common.events import SamplingUsed, VersionSpan

from .base import Capabilities, Chunk, EngineFinish, GenerateRequest, LogprobKind
from .wire import Wire, error_from, events, load, logprobs_of, token_ids

__all__ = ["VllmEngine", "sampling_json", "version_spans"]

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_PREFIX = "generate-tokens-"
_FINISH: dict[str, EngineFinish] = {"stop": "stop", "length": "length"}


def sampling_json(used: SamplingUsed, stop_token_ids: Iterable[int]) -> dict[str, Any]:
    """Every field, so that the engine takes none from the model's generation config."""
    out: dict[str, Any] = {
        "max_tokens": used.max_tokens,
        "temperature": used.temperature,
        "top_p": used.top_p,
        "top_k": used.top_k,
        "min_p": used.min_p,
        "presence_penalty": used.presence_penalty,
        "frequency_penalty": used.frequency_penalty,
        "repetition_penalty": used.repetition_penalty,
        "stop": list(used.stop),
        "stop_token_ids": list(stop_token_ids),
        "logprobs": 0,
        "skip_special_tokens": False,
    }
    if used.seed is not None:
        out["seed"] = used.seed
    if used.logit_bias:
        out["logit_bias"] = used.logit_bias
    return out


def version_spans(told: Any) -> tuple[VersionSpan, ...]:
    """`weight_versions` of an answer."""
    return tuple(VersionSpan(version=str(v["version"]), start=int(v["start"])) for v in told or ())


def finish_of(reason: Any) -> EngineFinish | None:
    """Raises EngineError where the engine itself ended the sample."""
    if reason is None:
        return None
    if (known := _FINISH.get(reason)) is not None:
        return known
    if reason == "abort":
        raise EngineBusy("the engine ended the generation", 503, 1.0)
    raise EngineDown(f"the engine ended the generation: {reason}")


def read_choice(chunk: Chunk, choice: dict[str, Any]) -> None:
    """Add a choice, whole or a piece of a stream, to `chunk`."""
    if choice.get("index"):
        raise ValueError("a choice that wasn't asked for")
    ids = choice.get("token_ids")
    if ids:
        chunk.ids += token_ids(ids)
        told = choice.get("logprobs")
        if told is not None and (content := told.get("content")) is not None:
            values = logprobs_of(content, "logprob")
            chunk.logprobs = values if chunk.logprobs is None else chunk.logprobs + values
    reason = choice.get("finish_reason")
    if reason is not None:
        chunk.finish = finish_of(reason)
        chunk.stop_reason = choice.get("stop_reason")
        chunk.versions = version_spans(choice.get("weight_versions"))
        chunk.kv_mixed = bool(choice.get("kv_mixed"))


def read_body(chunk: Chunk, body: dict[str, Any]) -> None:
    """Add one answer or one event of a stream. Raises EngineError for an error in it, EngineDown for nonsense."""
    try:
        if (error := body.get("error")) is not None:
            raise error_from(int(error.get("code") or 500), orjson.dumps(body))
        for choice in body["choices"]:
            read_choice(chunk, choice)
        if (prompt := body.get("prompt_token_ids")) is not None:
            chunk.prompt_ids = token_ids(prompt)
        if (usage := body.get("usage")) is not None:
            chunk.prompt_tokens = usage.get("prompt_tokens") or 0
            chunk.completion_tokens = usage.get("completion_tokens") or 0
            chunk.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineDown(f"an answer that isn't understood: {error!r}") from error


class VllmEngine:
    """One vLLM server (or local engine). `model` "": the first it lists.

    `logprob_kind` is vLLM's `--logprobs-mode`, which it doesn't tell.
    """

    name = "vllm"

    def __init__(self, url: str, model: str, replica: str, *, logprob_kind: LogprobKind = "processed", **wire: Any):
        self.replica = replica
        self.model = model
        self._kind: LogprobKind = logprob_kind
        self._wire = Wire(url, **wire)

    def _body(self, request: GenerateRequest, stream: bool) -> bytes:
        sampling = sampling_json(request.sampling, request.stop_token_ids)
        if request.guide is not None:
            sampling["structured_outputs"] = _guide(request.guide)
        body: dict[str, Any] = {
            "model": self.model,
            "token_ids": request.prompt,
            "sampling_params": sampling,
            "request_id": request.request_id,
            "return_token_ids": True,
            "stream": stream,
        }
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if stream:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body, option=_NUMPY)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        response = await self._wire.post("/inference/v1/generate", self._body(request, True))
        finished = False
        try:
            async for told in events(response):
                chunk = Chunk()
                for data in told:
                    read_body(chunk, load(data))
                finished = response.over = finished or chunk.finish is not None
                yield chunk
            if not finished:
                raise EngineDown("the engine's stream ended without a finish reason")
        finally:
            # A stream that isn't read to its end is closed with its connection: that is what aborts the generation.
            self._wire.release(response, ending=finished)

    async def complete(self, request: GenerateRequest) -> Chunk:
        body = await self._wire.ask("/inference/v1/generate", self._body(request, False))
        chunk = Chunk()
        read_body(chunk, body)
        if chunk.finish is None:
            raise EngineDown("the engine's answer has no finish reason")
        return chunk

    async def capabilities(self) -> Capabilities:
        return await self._capabilities(ids_in=True)

    async def _capabilities(self, *, ids_in: bool) -> Capabilities:
        status, listing = await self._wire.get("/v1/models")
        if status != 200 or not isinstance(listing, dict) or not listing.get("data"):
            raise EngineDown(f"the model listing answered {status}", status)
        card = next((m for m in listing["data"] if not self.model or m.get("id") == self.model), None)
        if card is None:
            served = ", ".join(str(m.get("id")) for m in listing["data"])
            raise EngineRefused(f"the engine serves {served}, not {self.model}", 404)
        self.model = str(card["id"])
        _, version = await self._wire.get("/version")
        status, weights = await self._wire.get("/weight_info")
        weights = weights if status == 200 and isinstance(weights, dict) else {}
        status, _ = await self._wire.get("/is_paused")
        found = await self._try()
        missing = [name for name, there in (("sampled ids", found.ids), ("log-probs", found.logprobs)) if not there]
        local = isinstance(version, dict) and version.get("engine") == "polar"
        return Capabilities(
            model=self.model,
            engine="polar" if local else "vllm",
            engine_version=str((version or {}).get("version") or ""),
            ids_in=ids_in,
            ids_out=bool(found.ids),
            logprobs=self._kind if found.logprobs is not None else "none",
            versions=bool(found.versions),
            weight_update=status == 200,
            pause=status == 200,
            guides=not local,
            reports_prompt=found.prompt_ids is not None,
            context_window=int(card.get("max_model_len") or 0),
            weights_version=str(weights.get("weight_version") or ""),
            weights_hash=str(weights.get("weights_sha256") or ""),
            dtype=str(weights.get("dtype") or ""),
            problems=tuple(f"the engine gives no {name}: nothing can be trained" for name in missing),
        )

    async def _try(self) -> Chunk:
        """One token, sampled for real: the only way to know what comes back."""
        used = SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1)
        body = {
            "model": self.model,
            "token_ids": [0],
            "sampling_params": sampling_json(used, ()),
            "return_token_ids": True,
        }
        chunk = Chunk()
        read_body(chunk, await self._wire.ask("/inference/v1/generate", orjson.dumps(body)))
        return chunk

    async def healthy(self) -> bool:
        try:
            status, _ = await self._wire.get("/health", timeout=2.0)
        except EngineError:
            return False
        return status == 200

    async def abort(self, request_id: str) -> None:
        await self._wire.ask("/abort_requests", orjson.dumps({"request_ids": [_PREFIX + request_id]}))

    async def update_weights(self, weights: str, version: str, *, drain: bool) -> None:
        """Pause, load, name the version, resume. The pause ends whatever happens."""
        await self._wire.ask(f"/pause?mode={'wait' if drain else 'keep'}", b"")
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
            await self._wire.ask("/collective_rpc", orjson.dumps(call))
            await self._wire.ask("/update_weight_version", orjson.dumps({"new_version": version}))
        finally:
            await self._wire.ask("/resume", b"")

    async def close(self) -> None:
        await self._wire.close()


def _guide(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") == "json_schema":
        return {"json": form["json_schema"]["schema"]}
    return {"json_object": True}
