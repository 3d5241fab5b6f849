"""A scripted engine on the wire: says what a test tells it to, in any tokenisation, and journals every id it received.

It has the structure of vLLM's token endpoint. Answers are given as text and split into ids in ways that a tokenizer
wouldn't choose, so that only ids carried over verbatim can make a later prompt exact.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog and writes a file named notes.txt to the disk.",
    '{"name": "write", "arguments": {"path": "a.txt", "content": "hello", "command": "ls -la"}}',
    "user assistant system tool developer\n\nfunction arguments name description parameters object string",
    "naïve café 日本語 emoji 🙂 and more: é ü ñ turn number answer question result",
] * 8


def make_model_dir(directory: Path) -> Path:
    """A byte-level BPE tokenizer with Qwen3's control tokens and a context window of 32,768."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": "<|im_end|>"}))
    (directory / "config.json").write_bytes(orjson.dumps({"max_position_embeddings": 32768, "eos_token_id": 2}))
    return directory


def _flat(content: str | list[dict[str, Any]] | None) -> str:
    """A message's content as this engine's template shows it."""
    if not isinstance(content, list):
        return content or ""
    return "".join(p["text"] if p["type"] == "text" else "<|endoftext|>" * 3 for p in content)


@dataclass
class Say:
    """One answer. `finish`: `stop` ends with the end-of-turn id, `length` without, `string` at a stop string.

    `ids` overrides the text. `delay_s` lies between chunks, `hold` is awaited before the first. `status` answers with
    an error instead, `cut` breaks the stream off after so many ids. `edit` changes the body that goes out.
    """

    text: str = "ok"
    finish: str = "stop"
    ids: list[int] | None = None
    seed: int = 0
    delay_s: float = 0.0
    hold: asyncio.Event | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: str = "scripted"
    cut: int | None = None
    chunk: int = 3
    versions: list[dict[str, Any]] | None = None
    edit: Callable[[dict[str, Any]], None] | None = None


@dataclass
class Heard:
    """One request as it arrived, and what was answered."""

    request_id: str
    prompt: list[int]
    body: dict[str, Any]
    sampled: list[int] = field(default_factory=list)
    aborted: bool = False
    finished: bool = False


Script = Callable[[Heard], "Say | Awaitable[Say]"]


class ScriptedEngine:
    """Serve with `start`; `say` queues answers, `script` decides where the queue is empty."""

    def __init__(self, model_dir: Path, script: Script | None = None) -> None:
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.journal: list[Heard] = []
        self.queue: list[Say] = []
        self.script: Script = script or (lambda heard: Say())
        self.url = ""
        self.paused = False
        self.version = "v0"
        self.calls: list[str] = []
        self.down = False
        self.loading: asyncio.Event | None = None
        """Loading weights takes until it is set."""
        self.refuses = ""
        """Why it can't load weights."""
        self.names_version = True
        """Whether it says by itself which weights it has."""
        self.window = 32768
        self.local = False
        """Calls itself the local engine, which takes no grammars."""
        self.sees = False
        """Takes pictures: each is shown to the model as three `<|endoftext|>`."""
        self._runner: web.AppRunner | None = None

    def say(self, *answers: Say | str) -> None:
        self.queue += [Say(a) if isinstance(a, str) else a for a in answers]

    def split(self, text: str, seed: int) -> list[int]:
        """Ids that decode to `text`, cut at random places, control tokens kept whole."""
        rng = random.Random(seed)
        ids: list[int] = []
        for piece in self._pieces(text):
            if piece in (*CONTROL, *MARKUP):
                ids.append(self.tokenizer.token_to_id(piece))
                continue
            at = 0
            while at < len(piece):
                size = rng.randint(1, 6)
                ids += self.tokenizer.encode(piece[at : at + size], add_special_tokens=False).ids
                at += size
        return ids

    @staticmethod
    def _pieces(text: str) -> list[str]:
        for mark in (*CONTROL, *MARKUP):
            text = text.replace(mark, f"\0{mark}\0")
        return [p for p in text.split("\0") if p]

    async def start(self, port: int = 0) -> str:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/is_paused", self._is_paused)
        for path in ("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/abort_requests"):
            app.router.add_post(path, self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        sockets = site._server.sockets  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": self.window}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.down else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.0-scripted", **({"engine": "polar"} if self.local else {})})

    async def _weight_info(self, _: web.Request) -> web.Response:
        told = {"weight_version": self.version if self.names_version else None}
        return web.json_response(told | {"weights_sha256": hashlib.sha256(self.version.encode()).hexdigest()})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.calls.append(request.path_qs)
        if request.path == "/collective_rpc" and self.loading is not None:
            await self.loading.wait()
        if request.path == "/collective_rpc" and self.refuses:
            return web.json_response({"error": {"message": self.refuses}}, status=500)
        if request.path == "/update_weight_version":
            self.version = orjson.loads(body)["new_version"]
        return web.json_response({"status": "ok", "success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        heard = Heard(body.get("request_id", ""), body["token_ids"], body)
        if not heard.request_id:
            return web.json_response(self._answer(heard, Say("x", "length")))
        self.journal.append(heard)
        say = self.queue.pop(0) if self.queue else self.script(heard)
        if not isinstance(say, Say):
            say = await say
        try:
            return await self._said(request, heard, say)
        except (asyncio.CancelledError, ConnectionResetError):
            heard.aborted = True
            raise

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """vLLM's chat API with ids: a template of this engine's own makes the prompt."""
        body = orjson.loads(await request.read())
        if any(isinstance(m["content"], list) for m in body["messages"]) and not self.sees:
            error = {"error": {"message": "policy is not a multimodal model", "type": "BadRequestError", "code": 400}}
            return web.json_response(error, status=400)
        text = "".join(f"{m['role']}> {_flat(m['content'])}\n" for m in body["messages"])
        sampling = {"max_tokens": body.get("max_tokens") or 16, "stop": body.get("stop") or []}
        heard = Heard(
            request.headers.get("x-request-id", ""),
            self.tokenizer.encode(text, add_special_tokens=False).ids,
            {**body, "sampling_params": sampling, "return_token_ids": True},
        )
        if heard.request_id:
            self.journal.append(heard)
        whole = self._answer(heard, self.queue.pop(0) if heard.request_id and self.queue else Say())
        choice = whole["choices"][0]
        said = self.tokenizer.decode(heard.sampled)
        told = {**choice, "message": {"role": "assistant", "content": said}}
        if not body.get("stream"):
            return web.json_response({**whole, "choices": [told]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        # The last chunk has an empty delta, and ids all the same.
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        last = {**choice, "delta": {} if choice["token_ids"] else {"content": said}}
        for event in (
            {"choices": [opening], "prompt_token_ids": heard.prompt},
            {"choices": [last]},
            {"choices": [], "usage": whole["usage"]},
        ):
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _said(self, request: web.Request, heard: Heard, say: Say) -> web.StreamResponse:
        if say.hold is not None:
            await say.hold.wait()
        if say.status != 200:
            error = {"error": {"message": say.error, "type": "Scripted", "code": say.status}}
            return web.json_response(error, status=say.status, headers=say.headers)
        if not heard.body.get("stream"):
            if say.delay_s:
                await asyncio.sleep(say.delay_s)
            answer = self._answer(heard, say)
            heard.finished = True
            return web.Response(body=orjson.dumps(answer), content_type="application/json")
        return await self._stream(request, heard, say)

    async def _stream(self, request: web.Request, heard: Heard, say: Say) -> web.StreamResponse:
        whole = self._answer(heard, say)
        choice = whole["choices"][0]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        ids, content = choice["token_ids"], (choice["logprobs"] or {}).get("content")
        for at in range(0, max(1, len(ids)), say.chunk):
            if say.cut is not None and at >= say.cut:
                request.transport.close()  # type: ignore[union-attr]
                return response
            last = at + say.chunk >= len(ids)
            piece = {**choice, "token_ids": ids[at : at + say.chunk]}
            piece["logprobs"] = None if content is None else {"content": content[at : at + say.chunk]}
            if not last:
                piece |= {"finish_reason": None, "stop_reason": None, "weight_versions": None}
            event: dict[str, Any] = {"request_id": whole["request_id"], "usage": None, "choices": [piece]}
            if at == 0:
                event["prompt_token_ids"] = whole["prompt_token_ids"]
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            if say.delay_s:
                await asyncio.sleep(say.delay_s)
        await response.write(b"data: " + orjson.dumps({"usage": whole["usage"], "choices": []}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        heard.finished = True
        return response

    def _answer(self, heard: Heard, say: Say) -> dict[str, Any]:
        sampling = heard.body["sampling_params"]
        ids = list(say.ids) if say.ids is not None else self.split(say.text, say.seed)
        finish, stop_reason = "stop", None
        if say.finish == "stop":
            ids.append(self.end)
        elif say.finish == "length":
            finish = "length"
        else:
            stop_reason = next((s for s in sampling.get("stop") or () if s in say.text), None)
        if len(ids) > sampling["max_tokens"]:
            ids, finish, stop_reason = ids[: sampling["max_tokens"]], "length", None
        heard.sampled = ids
        count = len(heard.prompt)
        body: dict[str, Any] = {
            "request_id": f"generate-tokens-{heard.request_id}",
            "model": "policy",
            "usage": {
                "prompt_tokens": count,
                "completion_tokens": len(ids),
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "prompt_token_ids": heard.prompt if heard.body.get("return_token_ids") else None,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": finish,
                    "stop_reason": stop_reason,
                    "token_ids": ids,
                    "weight_versions": say.versions or [{"version": self.version, "start": 0, "end": len(ids)}],
                    "logprobs": {"content": [{"token_id": t, "logprob": -0.25 - (t % 7) / 8, "rank": 1} for t in ids]},
                }
            ],
        }
        if say.edit is not None:
            say.edit(body)
        return body
