"""Google generateContent requests: bytes in, `ChatRequest` out. Contents are read in `contents.py`."""

from __future__ import annotations

from collections.abc import Mapping

from polar_proxy.dialects import fields as f
from polar_proxy.dialects.base import ChatRequest, Route, Sampling
from polar_proxy.dialects.google.contents import Contents, camel
from polar_proxy.dialects.google.schema import json_schema
from polar_proxy.dialects.hints import hints_from
from polar_proxy.dialects.openai_chat.request import json_schema_format
from polar_render.messages import ToolSpec

__all__ = ["HONOURED", "NOT_FORWARDED", "parse"]

# What a request may say and the engine or the proxy acts on.
HONOURED = f.keys("contents systemInstruction tools toolConfig generationConfig cachedContent model store")

# What harnesses send and no engine could use, with the reason. Recorded in `dropped` like every unknown field.
NOT_FORWARDED = {
    "safetySettings": "there is no content filter",
    "labels": "the caller's own bookkeeping",
    "serviceTier": "there is one tier",
    "generationConfig.speechConfig": "answers are text",
    "generationConfig.mediaResolution": "the engine's own image processor decides",
    "generationConfig.logprobs": "alternatives aren't recorded",
    "contents[*].parts[*].thoughtSignature": "another provider's signature",
}

_GENERATION = f.keys(
    "temperature topP topK maxOutputTokens candidateCount stopSequences seed presencePenalty frequencyPenalty "
    "responseMimeType responseSchema responseJsonSchema responseLogprobs thinkingConfig responseModalities"
)
_DECLARATION = f.keys("name description parameters parametersJsonSchema")
_MODES = {"AUTO": "auto", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}


def _tools(body: f.Obj, seen: f.Seen) -> tuple[ToolSpec, ...]:
    out: list[ToolSpec] = []
    for index, raw in enumerate(f.objects(body, "tools")):
        path, tool = f"tools[{index}]", camel(raw)
        seen.extra(tool, frozenset(("functionDeclarations",)), "tools[*]")
        for key in tool.keys() - {"functionDeclarations"}:
            seen.add(f"tools[*].{key[:64]}")
        for number, declared in enumerate(f.objects(tool, "functionDeclarations", path)):
            out.append(_declaration(camel(declared), f"{path}.functionDeclarations[{number}]", seen))
    return tuple(out)


def _declaration(declared: f.Obj, path: str, seen: f.Seen) -> ToolSpec:
    seen.extra(declared, _DECLARATION, "tools[*].functionDeclarations[*]")
    schema = f.table(declared, "parametersJsonSchema", path)
    if schema is None:
        given = f.table(declared, "parameters", path)
        converted = json_schema(given)
        schema = converted if isinstance(converted, dict) else None
    return ToolSpec(f.text(declared, "name", path), f.text_or_none(declared, "description", path) or "", schema)


def _tool_choice(body: f.Obj) -> str | f.Obj:
    config = camel(f.table(body, "toolConfig") or {})
    path = "toolConfig.functionCallingConfig"
    calling = camel(f.table(config, "functionCallingConfig", "toolConfig") or {})
    told = f.text_or_none(calling, "mode", path) or "AUTO"
    mode = _MODES.get(told.upper())
    if mode is None:
        raise f.bad(f"{path}.mode", f"unknown mode {told!r}")
    allowed = f.strings(calling, "allowedFunctionNames", path, limit=1024)
    if not allowed or mode == "none":
        return mode
    if len(allowed) == 1 and mode == "required":
        return {"name": allowed[0]}
    return {"mode": mode, "allowed": list(allowed)}


def _format(config: f.Obj) -> f.Obj | None:
    path = "generationConfig"
    mime = f.text_or_none(config, "responseMimeType", path) or "text/plain"
    if mime not in ("text/plain", "application/json", "text/x.enum"):
        raise f.bad(f"{path}.responseMimeType", f"answers can't be {mime!r}")
    plain, native = f.table(config, "responseJsonSchema", path), f.table(config, "responseSchema", path)
    if plain is not None or native is not None:
        return json_schema_format(plain if plain is not None else json_schema(native))
    return {"type": "json_object"} if mime == "application/json" else None


def _thinking(config: f.Obj, seen: f.Seen) -> f.Obj | None:
    path = "generationConfig.thinkingConfig"
    asked = camel(f.table(config, "thinkingConfig", "generationConfig") or {})
    seen.extra(asked, f.keys("includeThoughts thinkingBudget thinkingLevel"), path)
    out: f.Obj = {}
    show = f.flag(asked, "includeThoughts", path)
    if show is not None:
        out["show"] = show
    budget = f.integer_or_none(asked, "thinkingBudget", path, low=-1)
    if budget is not None:
        out["enabled"] = budget != 0
        if budget > 0:
            out["budget"] = budget
    if level := f.text_or_none(asked, "thinkingLevel", path):
        out["effort"] = level.lower()
    return out or None


def _sampling(config: f.Obj, seen: f.Seen) -> Sampling:
    path = "generationConfig"
    seen.extra(config, _GENERATION, path)
    for index, kind in enumerate(f.strings(config, "responseModalities", path)):
        if kind.upper() != "TEXT":
            raise f.bad(f"{path}.responseModalities[{index}]", "answers are text")
    return Sampling(
        max_tokens=f.integer_or_none(config, "maxOutputTokens", path, low=1),
        temperature=f.number(config, "temperature", path, low=0, high=2),
        top_p=f.number(config, "topP", path, low=0, high=1),
        top_k=f.integer_or_none(config, "topK", path, low=-1),
        stop=f.strings(config, "stopSequences", path),
        seed=f.integer_or_none(config, "seed", path, low=-(2**63)),
        presence_penalty=f.number(config, "presencePenalty", path, low=-2, high=2),
        frequency_penalty=f.number(config, "frequencyPenalty", path, low=-2, high=2),
        n=f.integer_or_none(config, "candidateCount", path, low=1, high=128) or 1,
        logprobs=bool(f.flag(config, "responseLogprobs", path)),
    )


def _body(raw: bytes, counting: bool) -> f.Obj:
    """The request; a token count may carry it whole under `generateContentRequest`."""
    body = camel(f.load(raw))
    if counting and (whole := f.table(body, "generateContentRequest")) is not None:
        return camel(whole)
    return body


def parse(route: Route, headers: Mapping[str, str], raw: bytes) -> ChatRequest:
    """Raises RequestError with the offending path."""
    body, seen = _body(raw, route.kind == "count_tokens"), f.Seen()
    if body.get("cachedContent"):
        raise f.bad("cachedContent", "there is no store of cached contents; send the contents")
    contents = Contents(seen)
    turns = [
        message
        for index, content in enumerate(f.objects(body, "contents"))
        for message in contents.messages(content, f"contents[{index}]", index)
    ]
    if not turns:
        raise f.bad("contents", "is required and must hold at least one content")
    messages = tuple(contents.system(body) + turns)
    config = camel(f.table(body, "generationConfig") or {})
    tools, choice, form = _tools(body, seen), _tool_choice(body), _format(config)
    sampling, thinking = _sampling(config, seen), _thinking(config, seen)
    seen.extra(body, HONOURED)
    prefill = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return ChatRequest(
        dialect="google",
        model=route.model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        response_format=form,
        sampling=sampling,
        stream=route.stream,
        sse=route.sse,
        thinking=thinking,
        hints=hints_from(headers),
        prefill=prefill,
        dropped=seen.paths(),
        raw_hash=f.fingerprint(route.model, messages, tools, choice, form, sampling, thinking, prefill),
    )
