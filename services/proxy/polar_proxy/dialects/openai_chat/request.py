"""Chat Completions requests: bytes in, `ChatRequest` out. The answers are in `response.py`."""

from __future__ import annotations

from collections.abc import Mapping

from polar_proxy.dialects import fields as f
from polar_proxy.dialects.base import ChatRequest, Sampling
from polar_proxy.dialects.hints import hints_from
from polar_proxy.dialects.pictures import located
from polar_render.messages import Message, Part, Role, Text, Thinking, ToolCall, ToolSpec

__all__ = ["HONOURED", "NOT_FORWARDED", "json_schema_format", "parse"]

# What a request may say and the engine or the proxy acts on.
HONOURED = f.keys(
    "model messages tools tool_choice parallel_tool_calls response_format stream stream_options max_tokens "
    "max_completion_tokens temperature top_p top_k min_p stop seed presence_penalty frequency_penalty "
    "repetition_penalty logit_bias n logprobs top_logprobs reasoning_effort chat_template_kwargs store "
    "continue_final_message add_generation_prompt functions function_call"
)

# What harnesses send and no engine could use, with the reason. Recorded in `dropped` like every unknown field.
NOT_FORWARDED = {
    "metadata": "the caller's own bookkeeping",
    "user": "an end user's id, for abuse reports",
    "safety_identifier": "an end user's id, for abuse reports",
    "prompt_cache_key": "routing is by conversation",
    "prompt_cache_retention": "the engine keeps its own cache",
    "service_tier": "there is one tier",
    "verbosity": "a property of the provider's own models",
    "prediction": "speculation is the engine's business",
    "modalities": "answers are text",
    "audio": "answers are text",
    "web_search_options": "there is no hosted search",
    "tools[*].function.strict": "grammars are the engine's business",
    "tools[*].name": "a repetition beside the function's own name",
}

_MESSAGE = f.keys("role content name tool_calls tool_call_id reasoning_content reasoning refusal function_call")
_PART = frozenset(("type", "text", "image_url", "refusal"))
_CALL = frozenset(("id", "type", "function", "custom", "index"))
_TOOL = frozenset(("type", "function", "custom"))
_FUNCTION = frozenset(("name", "description", "parameters"))
_CUSTOM = frozenset(("name", "description", "format"))
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def _part(part: f.Obj, path: str, seen: f.Seen) -> Part:
    kind = f.text(part, "type", path)
    seen.extra(part, _PART, "messages[*].content[*]")
    if kind == "text":
        return Text(f.text(part, "text", path))
    if kind == "refusal":
        return Text(f.text(part, "refusal", path))
    if kind == "image_url":
        source, where = part.get("image_url"), f"{path}.image_url"
        if type(source) is str:
            return located(source, where)
        picture = f.table(part, "image_url", path)
        if picture is None:
            raise f.bad(where, "is required")
        return located(f.text(picture, "url", where), f"{where}.url", f.text_or_none(picture, "detail", where) or "")
    raise f.bad(f"{path}.type", f"unknown content part type {kind!r}; this model takes text and image_url")


def _content(message: f.Obj, path: str, seen: f.Seen) -> list[Part]:
    content = message.get("content")
    if type(content) is str:
        return [Text(content)] if content else []
    if content is None:
        return []
    if type(content) is not list:
        raise f.bad(f"{path}.content", "must be a string or an array of content parts")
    return [
        _part(part, f"{path}.content[{index}]", seen) for index, part in enumerate(f.objects(message, "content", path))
    ]


def _arguments(source: f.Obj, key: str, path: str) -> str:
    value = source.get(key)
    if type(value) is dict:
        return f.compact(value)
    return f.text_or_none(source, key, path) or ""


def _call(call: f.Obj, path: str, seen: f.Seen) -> ToolCall:
    seen.extra(call, _CALL, "messages[*].tool_calls[*]")
    kind = f.text_or_none(call, "type", path) or "function"
    if kind not in ("function", "custom"):
        raise f.bad(f"{path}.type", f"unknown tool call type {kind!r}")
    body = f.table(call, kind, path)
    if body is None:
        raise f.bad(f"{path}.{kind}", "is required")
    where = f"{path}.{kind}"
    arguments = _arguments(body, "input" if kind == "custom" else "arguments", where)
    identity = f.text_or_none(call, "id", path) or ""
    return ToolCall(identity, f.text(body, "name", where), arguments, custom=kind == "custom")


def _assistant(message: f.Obj, path: str, seen: f.Seen) -> list[Part]:
    parts: list[Part] = []
    for key in ("reasoning_content", "reasoning"):
        thought = f.text_or_none(message, key, path)
        if thought:
            parts.append(Thinking(thought))
            break
    parts += _content(message, path, seen)
    if refusal := f.text_or_none(message, "refusal", path):
        parts.append(Text(refusal))
    for index, call in enumerate(f.objects(message, "tool_calls", path)):
        parts.append(_call(call, f"{path}.tool_calls[{index}]", seen))
    legacy = f.table(message, "function_call", path)
    if legacy is not None:
        where = f"{path}.function_call"
        parts.append(ToolCall("", f.text(legacy, "name", where), _arguments(legacy, "arguments", where)))
    return parts


def _message(message: f.Obj, path: str, seen: f.Seen) -> Message:
    told = f.text(message, "role", path)
    role = _ROLES.get(told)
    if role is None:
        raise f.bad(f"{path}.role", f"unknown role {told!r}")
    seen.extra(message, _MESSAGE, "messages[*]")
    parts = _assistant(message, path, seen) if role == "assistant" else _content(message, path, seen)
    call_id = f.text(message, "tool_call_id", path) if told == "tool" else ""
    return Message(role, tuple(parts), call_id=call_id, name=f.text_or_none(message, "name", path) or "")


def _tool(tool: f.Obj, path: str, seen: f.Seen) -> ToolSpec:
    seen.extra(tool, _TOOL, "tools[*]")
    kind = f.text_or_none(tool, "type", path) or "function"
    if kind not in ("function", "custom"):
        raise f.bad(f"{path}.type", f"unknown tool type {kind!r}; hosted tools aren't served")
    body = f.table(tool, kind, path)
    if body is None:
        raise f.bad(f"{path}.{kind}", "is required")
    where = f"{path}.{kind}"
    name, description = f.text(body, "name", where), f.text_or_none(body, "description", where) or ""
    if kind == "function":
        seen.extra(body, _FUNCTION, "tools[*].function")
        return ToolSpec(name, description, f.table(body, "parameters", where))
    seen.extra(body, _CUSTOM, "tools[*].custom")
    form = f.table(body, "format", where) or {}
    grammar = f.table(form, "grammar", f"{where}.format")
    return ToolSpec(name, description, custom=True, grammar=grammar)


def _tool_choice(body: f.Obj) -> str | f.Obj:
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if type(choice) is str:
        if choice not in ("auto", "none", "required"):
            raise f.bad("tool_choice", f"unknown choice {choice!r}")
        return choice
    if type(choice) is not dict:
        raise f.bad("tool_choice", "must be a string or an object")
    kind = f.text(choice, "type", "tool_choice")
    if kind in ("function", "custom"):
        named = f.table(choice, kind, "tool_choice") or {}
        return {"name": f.text(named, "name", f"tool_choice.{kind}")}
    if kind == "allowed_tools":
        return _allowed(f.table(choice, "allowed_tools", "tool_choice") or {})
    raise f.bad("tool_choice.type", f"unknown choice {kind!r}")


def _allowed(choice: f.Obj) -> f.Obj:
    path = "tool_choice.allowed_tools"
    names: list[f.Json] = []
    for index, tool in enumerate(f.objects(choice, "tools", path)):
        where = f"{path}.tools[{index}]"
        named = f.table(tool, "function", where) or f.table(tool, "custom", where) or tool
        names.append(f.text(named, "name", where))
    return {"mode": f.text_or_none(choice, "mode", path) or "auto", "allowed": names}


def json_schema_format(schema: f.Json, name: str = "answer", strict: bool | None = None) -> f.Obj:
    """`ChatRequest.response_format` for a JSON schema."""
    inner: f.Obj = {"name": name, "schema": schema}
    if strict is not None:
        inner["strict"] = strict
    return {"type": "json_schema", "json_schema": inner}


def _response_format(body: f.Obj) -> f.Obj | None:
    wanted = f.table(body, "response_format")
    if wanted is None:
        return None
    kind = f.text(wanted, "type", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise f.bad("response_format.type", f"unknown format {kind!r}")
    path = "response_format.json_schema"
    inner = f.table(wanted, "json_schema", "response_format")
    if inner is None:
        raise f.bad(path, "is required")
    schema = f.table(inner, "schema", path)
    if schema is None:
        raise f.bad(f"{path}.schema", "is required")
    return json_schema_format(schema, f.text_or_none(inner, "name", path) or "answer", f.flag(inner, "strict", path))


def _logit_bias(body: f.Obj) -> dict[str, float] | None:
    bias = f.table(body, "logit_bias")
    if not bias:
        return None
    out: dict[str, float] = {}
    for token in bias:
        if not (token.isascii() and token.isdigit()):
            raise f.bad(f"logit_bias.{token}", "must be a token id")
        value = f.number(bias, token, "logit_bias", -100, 100)
        if value is not None:
            out[token] = value
    return out


def _sampling(body: f.Obj) -> Sampling:
    limit = f.integer_or_none(body, "max_completion_tokens", low=1)
    older = f.integer_or_none(body, "max_tokens", low=1)
    return Sampling(
        max_tokens=older if limit is None else limit,
        temperature=f.number(body, "temperature", low=0, high=2),
        top_p=f.number(body, "top_p", low=0, high=1),
        top_k=f.integer_or_none(body, "top_k", low=-1),
        min_p=f.number(body, "min_p", low=0, high=1),
        stop=f.strings(body, "stop"),
        seed=f.integer_or_none(body, "seed", low=-(2**63)),
        presence_penalty=f.number(body, "presence_penalty", low=-2, high=2),
        frequency_penalty=f.number(body, "frequency_penalty", low=-2, high=2),
        repetition_penalty=f.number(body, "repetition_penalty", low=0, high=10),
        logit_bias=_logit_bias(body),
        n=f.integer_or_none(body, "n", low=1, high=128) or 1,
        logprobs=bool(f.flag(body, "logprobs")),
        top_logprobs=f.integer_or_none(body, "top_logprobs", high=20),
    )


def _noted(body: f.Obj, sampling: Sampling, seen: f.Seen) -> None:
    seen.extra(body, HONOURED)
    if sampling.top_logprobs:
        seen.add("top_logprobs")
    limit = body.get("max_completion_tokens")
    if limit is not None and body.get("max_tokens") not in (None, limit):
        seen.add("max_tokens")
    for key in ("functions", "function_call"):
        if body.get(key) not in (None, [], "auto", "none"):
            raise f.bad(key, "is the retired form; use tools and tool_choice")


def _template_args(body: f.Obj) -> f.Obj:
    """Arguments for the template. What the request itself says isn't told otherwise beside it."""
    args = f.table(body, "chat_template_kwargs") or {}
    for key in ("messages", "tools"):
        if key in args:
            raise f.bad(f"chat_template_kwargs.{key}", f"is taken from the request's own {key}")
    return args


def _prefill(body: f.Obj, messages: tuple[Message, ...]) -> bool:
    """An assistant turn at the end is to be continued, unless the request says that a new turn shall follow it."""
    if f.flag(body, "continue_final_message") is False or messages[-1].role != "assistant":
        return False
    return not messages[-1].tool_calls and f.flag(body, "add_generation_prompt") is not True


def parse(headers: Mapping[str, str], raw: bytes) -> ChatRequest:
    """Raises RequestError with the offending path."""
    body, seen = f.load(raw), f.Seen()
    model = f.text(body, "model")
    messages = tuple(
        _message(message, f"messages[{index}]", seen) for index, message in enumerate(f.objects(body, "messages"))
    )
    if not messages:
        raise f.bad("messages", "is required and must hold at least one message")
    tools = tuple(_tool(tool, f"tools[{index}]", seen) for index, tool in enumerate(f.objects(body, "tools")))
    sampling = _sampling(body)
    _noted(body, sampling, seen)
    choice, form = _tool_choice(body), _response_format(body)
    effort = f.text_or_none(body, "reasoning_effort")
    args = _template_args(body)
    options = f.table(body, "stream_options") or {}
    seen.extra(options, frozenset(("include_usage",)), "stream_options")
    parallel, prefill = f.flag(body, "parallel_tool_calls"), _prefill(body, messages)
    return ChatRequest(
        dialect="openai_chat",
        model=model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=form,
        sampling=sampling,
        stream=bool(f.flag(body, "stream")),
        include_usage=bool(f.flag(options, "include_usage", "stream_options")),
        thinking={"effort": effort} if effort else None,
        template_args=args,
        hints=hints_from(headers),
        prefill=prefill,
        dropped=seen.paths(),
        raw_hash=f.fingerprint(model, messages, tools, choice, parallel, form, sampling, effort, args, prefill),
        store=f.flag(body, "store") is not False,
    )
