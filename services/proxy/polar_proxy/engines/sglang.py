"""SGLang's `/generate`. Log-probs come first in its triples, streams repeat all ids so far unless told otherwise, and
names of routes move between releases, so they are probed.

Written from SGLang 0.5's released source; not run against a server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import orjson

from polar_common.errors import EngineBusy, EngineDown, EngineError, EngineRefused
from polar_common.events import SamplingUsed, VersionSpan

from .base import Capabilities, Chunk, EngineFinish, GenerateRequest, LogprobKind
from .wire import Wire, error_from, events, load, logprobs_of, token_ids

__all__ = ["SglangEngine"]

_FINISH: dict[str, EngineFinish] = {"stop": "stop", "length": "length"}


def _sampling(used: SamplingUsed, stop_token_ids: Iterable[int]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "max_new_tokens": used.max_tokens,
        "temperature": used.temperature,
        "top_p": used.top_p,
        "top_k": used.top_k or -1,
        "min_p": used.min_p,
        "presence_penalty": used.presence_penalty,
        "frequency_penalty": used.frequency_penalty,
        "repetition_penalty": used.repetition_penalty,
        "stop": list(used.stop),
        "stop_token_ids": list(stop_token_ids),
        "skip_special_tokens": False,
    }
    if used.seed is not None:
        out["sampling_seed"] = used.seed
    if used.logit_bias:
        out["logit_bias"] = used.logit_bias
    return out


def _versions(meta: dict[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """Spans, one version per token, or (older releases) only the last one."""
    told = meta.get("weight_versions")
    if isinstance(told, list) and told:
        if isinstance(told[0], dict):
            return tuple(VersionSpan(version=str(v["version"]), start=int(v.get("start", 0))) for v in told)
        found: list[VersionSpan] = []
        for at, version in enumerate(told[:count]):
            if not found or found[-1].version != str(version):
                found.append(VersionSpan(version=str(version), start=at))
        return tuple(found)
    last = meta.get("weight_version")
    return (VersionSpan(version=str(last), start=0),) if last is not None else ()


class _Reader:
    """Answers, or events of a stream, into chunks. `seen`: ids taken so far; `version`: the weights at the start."""

    def __init__(self, version: str = "") -> None:
        self.seen = 0
        self._version = version

    def take(self, chunk: Chunk, body: dict[str, Any]) -> None:
        """Raises EngineError for an error in the answer, EngineDown for nonsense."""
        try:
            if (error := body.get("error")) is not None:
                raise error_from(int(error.get("code") or 500), orjson.dumps(body))
            meta = body["meta_info"]
            self._ids(chunk, token_ids(body.get("output_ids") or []), meta)
            chunk.prompt_tokens = int(meta.get("prompt_tokens") or 0)
            chunk.cached_tokens = int(meta.get("cached_tokens") or 0)
            if (reason := meta.get("finish_reason")) is not None:
                _finish(chunk, reason)
                chunk.versions = _versions(meta, self.seen)
                last = None if "weight_versions" in meta else meta.get("weight_version")
                if self._version and last is not None and str(last) != self._version:
                    # Only the last weights are told: where they began, nobody knows.
                    chunk.versions, chunk.kv_mixed = (), True
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineDown(f"an answer that isn't understood: {error!r}") from error

    def _ids(self, chunk: Chunk, ids: list[int], meta: dict[str, Any]) -> None:
        """Ids and log-probs that are new: both may be all so far, or only the latest."""
        total = int(meta.get("completion_tokens") or 0)
        fresh = ids[self.seen :] if len(ids) == total else ids
        told = meta.get("output_token_logprobs")
        if told is not None:
            triples = told[self.seen :] if len(told) == total else told
            values = logprobs_of(triples, 0)
            chunk.logprobs = values if chunk.logprobs is None else chunk.logprobs + values
        chunk.ids += fresh
        self.seen += len(fresh)


def _finish(chunk: Chunk, reason: dict[str, Any]) -> None:
    kind = reason.get("type")
    if (known := _FINISH.get(str(kind))) is not None:
        chunk.finish, chunk.stop_reason = known, reason.get("matched")
        return
    status = int(reason.get("status_code") or 0)
    message = str(reason.get("message") or f"the engine ended the generation: {kind}")
    if kind == "abort" and status in (0, 503):
        raise EngineBusy(message, 503, 1.0)
    raise error_from(status or 500, message.encode())


class SglangEngine:
    """One SGLang server. `model` "": the one it serves."""

    name = "sglang"

    def __init__(self, url: str, model: str, replica: str, *, logprob_kind: LogprobKind = "processed", **wire: Any):
        self.replica = replica
        self.model = model
        self._kind: LogprobKind = logprob_kind
        self._wire = Wire(url, **wire)

    def _body(self, request: GenerateRequest, stream: bool) -> bytes:
        sampling = _sampling(request.sampling, request.stop_token_ids)
        if request.guide is not None:
            sampling["json_schema"] = _schema(request.guide)
        body: dict[str, Any] = {
            "input_ids": request.prompt,
            "sampling_params": sampling,
            "rid": request.request_id,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": stream,
        }
        if request.cache_salt:
            body["extra_key"] = request.cache_salt
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        response = await self._wire.post("/generate", self._body(request, True))
        reader, finished = _Reader(request.cache_salt), False
        try:
            async for told in events(response):
                chunk = Chunk()
                for data in told:
                    reader.take(chunk, load(data))
                finished = response.over = finished or chunk.finish is not None
                yield chunk
            if not finished:
                raise EngineDown("the engine's stream ended without a finish reason")
        finally:
            self._wire.release(response, ending=finished)

    async def complete(self, request: GenerateRequest) -> Chunk:
        body = await self._wire.ask("/generate", self._body(request, False))
        chunk = Chunk()
        _Reader(request.cache_salt).take(chunk, body)
        if chunk.finish is None:
            raise EngineDown("the engine's answer has no finish reason")
        return chunk

    async def capabilities(self) -> Capabilities:
        info = await self._first("/model_info", "/get_model_info")
        server = await self._first("/server_info", "/get_server_info")
        if not info:
            raise EngineDown("neither /model_info nor /get_model_info answers")
        served = str(server.get("served_model_name") or info.get("model_path") or "")
        if self.model and served and self.model != served:
            raise EngineRefused(f"the engine serves {served}, not {self.model}", 404)
        self.model = self.model or served
        used = SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1)
        probe = {"input_ids": [0], "sampling_params": _sampling(used, ()), "return_logprob": True}
        found = Chunk()
        _Reader().take(found, await self._wire.ask("/generate", orjson.dumps(probe)))
        problems = []
        if not found.ids:
            problems.append("the engine gives no sampled ids: nothing can be trained")
        if found.logprobs is None:
            problems.append("the engine gives no log-probs: nothing can be trained")
        return Capabilities(
            model=self.model,
            engine="sglang",
            engine_version=str(server.get("version") or ""),
            ids_out=bool(found.ids),
            logprobs=self._kind if found.logprobs is not None else "none",
            versions=bool(found.versions),
            weight_update=True,
            pause=True,
            guides=True,
            context_window=int(server.get("context_length") or info.get("context_length") or 0),
            weights_version=str(info.get("weight_version") or ""),
            dtype=str(server.get("dtype") or ""),
            problems=tuple(problems),
        )

    async def _first(self, *paths: str) -> dict[str, Any]:
        """The answer of the first route that this release has."""
        for path in paths:
            status, body = await self._wire.get(path)
            if status == 200 and isinstance(body, dict):
                return body
        return {}

    async def healthy(self) -> bool:
        try:
            status, _ = await self._wire.get("/health", timeout=2.0)
        except EngineError:
            return False
        return status == 200

    async def abort(self, request_id: str) -> None:
        await self._wire.ask("/abort_request", orjson.dumps({"rid": request_id}))

    async def update_weights(self, weights: str, version: str, *, drain: bool) -> None:
        """The engine itself waits for what runs before it loads; in flight, running requests are retracted first."""
        if not drain:
            await self._wire.ask("/pause_generation", orjson.dumps({"mode": "retract"}))
        try:
            call = {"model_path": weights, "weight_version": version, "flush_cache": drain}
            told = await self._wire.ask("/update_weights_from_disk", orjson.dumps(call))
            if isinstance(told, dict) and told.get("success") is False:
                raise EngineRefused(str(told.get("message") or "the engine refused the weights"), 400)
        finally:
            if not drain:
                await self._wire.ask("/continue_generation", b"{}")

    async def close(self) -> None:
        await self._wire.close()


def _schema(form: dict[str, Any]) -> str:
    schema = form["json_schema"]["schema"] if form.get("type") == "json_schema" else {"type": "object"}
    return orjson.dumps(schema).decode()
