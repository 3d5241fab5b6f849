"""A real engine behind the real proxy: exact by construction, and how far a plain engine would be from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_engine import Say, make_model_dir
from proxy_kit import Kit, kit, running, session_key, settings, user

pytest.importorskip("torch")
from polar_common import subjects
from polar_common.bus import Bus
from polar_common.events import SessionArtifacts, SessionExited, SessionInitialized, SessionSealed
from polar_common.keys import SessionKey
from polar_common.nats_server import NatsServer
from polar_common.task_spec import SamplingSpec
from polar_common.traces import Provenance
from polar_engine.models import ensure_model
from polar_engine.testing import EngineThread, engine_thread
from polar_proxy.app import Proxy
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN
from polar_render import load_renderer, profile_for
from polar_render.base import Head, Renderer
from polar_render.messages import Message, Text
from polar_train.fidelity import GapReport, Options, Policies, check, deployment_gap

pytestmark = pytest.mark.nats
TINY = ensure_model("tiny").path


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with engine_thread(model="tiny", max_model_len=4096) as made:
        yield made


@asynccontextmanager
async def real(engine: EngineThread, server: NatsServer, bus: Bus, data: Path) -> AsyncIterator[Kit]:
    """A proxy before the real engine."""
    chosen = settings(TINY, server.url, data, engine.url, proxy_max_tokens=32)
    proxy = Proxy(chosen.model_copy(update={"proxy_model": ""}))
    async with running(proxy) as url, httpx.AsyncClient(timeout=30) as client:
        yield Kit(proxy, None, bus, url, client)  # type: ignore[arg-type]


def plain(directory: Path) -> Renderer:
    return load_renderer(replace(profile_for(directory), thinking="follow"))


async def ended(bus: Bus, key: SessionKey, build: str = "live", harness: str = "command") -> None:
    """The session's end after its calls, and its build."""
    common: dict[str, Any] = {"run": key.run, "task": key.task, "session": key.session, "attempt": key.attempt}
    made = {"runtime": "local", "isolation": "none", "harness_version": "1", "harness_config_hash": "c", "init_s": 0.1}
    await bus.once(SessionInitialized(**common, harness=harness, **made))
    await bus.once(SessionSealed(**common, reason="exited"))
    await bus.once(SessionExited(**common, exit_code=0))
    await bus.once(SessionArtifacts(**common))
    end = await bus.last(subjects.session(key.session, 1, "artifacts"))
    assert end is not None
    await Reconstructor(bus, build, BUILT_IN["exact"]).on_ended(end)


async def gaps_of(bus: Bus, renderer: Renderer | None, build: str = "live") -> GapReport:
    def find(_: Provenance) -> Renderer | None:
        return renderer

    return await deployment_gap(bus, Options(build), find)


async def test_what_the_proxy_captures_recomputes_and_the_gap_is_what_a_plain_rendering_shows(
    engine: EngineThread, nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    renderer = plain(TINY)
    expected = calls = 0
    async with real(engine, nats_server, bus, tmp_path) as proxy:
        for index, temperature in enumerate((1.0, 0.7, 1.0)):
            key = session_key(
                f"s1-abcdefghij0123456789-{index}", sampling=SamplingSpec(temperature=temperature, seed=7)
            )
            messages: list[dict[str, Any]] = []
            prompts: list[list[int]] = []
            for turn in range(4):
                messages.append(user(f"question number {turn} of {index}?"))
                said = [Message(m["role"], (Text(m["content"]),)) for m in messages]
                prompts.append(renderer.render(said, Head()))
                message = await proxy.told(messages, key=key)
                messages.append({"role": "assistant", "content": message["content"]})
            captured = await proxy.captured(key)
            assert [c.event.chain_class for c in captured] == ["root", "continued", "continued", "continued"]
            expected += sum(c.prompt.tolist() != p for c, p in zip(captured, prompts, strict=True))
            calls += len(captured)
            await ended(bus, key, harness="pi" if index == 2 else "command")
    report = await check(bus, Options(), Policies({}, TINY))
    assert report.in_scope.share == 1.0 and report.in_scope.spans == calls == 12 and report.contexts == ["exact"]
    found = await gaps_of(bus, renderer)
    total = found.total
    assert (total.calls, total.later) == (12, 9) and not found.unreadable
    # Random samples are nearly never the tokenizer's own choice.
    assert total.different == expected >= 6
    assert total.other_template == 0 and len(total.first) == total.different
    assert [(g.harness, g.model, g.calls) for g in found.gaps.values()] == [("command", "tiny", 8), ("pi", "tiny", 4)]


@asynccontextmanager
async def scripted(directory: Path, server: NatsServer, bus: Bus, data: Path) -> AsyncIterator[Kit]:
    async with kit(make_model_dir(directory), server.url, bus, data) as made:
        yield made


CALL = '<tool_call>\n{"name": "write",   "arguments": {"path":   "a.txt"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}]


async def told_twice(proxy: Kit, key: SessionKey, text: str, *, odd: bool = False, **body: Any) -> None:
    """One answer in the tokenizer's own or in odd ids, echoed as it was given, and a second call behind it."""
    ids = None if odd else proxy.engine.tokenizer.encode(text, add_special_tokens=False).ids
    proxy.engine.say(Say(text, ids=ids, seed=3))
    first = await proxy.told([user("Go on.")], key=key, **body)
    echoed = {"role": "assistant", **{k: v for k, v in first.items() if k in ("content", "tool_calls")}}
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "done"} for c in first.get("tool_calls") or ()]
    proxy.engine.say(Say("Well."))
    await proxy.told([user("Go on."), echoed, *(results or [user("And then?")])], key=key, **body)
    await ended(proxy.bus, key)


async def test_differences_are_named_and_placed(
    nats_server: NatsServer, bus: Bus, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    directory = tmp_path_factory.mktemp("scripted")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("", "A plain answer.", {}),
        ("retokenised", "A plain answer.", {"odd": True}),
        ("thinking", "<think>\nhm\n</think>\n\nThought over.", {}),
        ("template", CALL, {"tools": TOOLS}),
    ]
    async with scripted(directory, nats_server, bus, tmp_path) as proxy:
        renderer = plain(directory)
        for index, (_, text, body) in enumerate(cases):
            await told_twice(proxy, session_key(f"s1-abcdefghij0123456789-{index}"), text, **body)
        found = await gaps_of(bus, renderer)
        (gap,) = found.gaps.values()
        assert (gap.calls, gap.later) == (8, 4), found
        assert dict(gap.kinds) == {kind: 1 for kind, _, _ in cases if kind}
        for index, (kind, _, _) in enumerate(cases):
            key = session_key(f"s1-abcdefghij0123456789-{index}")
            first, second = await proxy.captured(key)
            if not kind:
                continue
            example = gap.examples[kind]
            assert example.session == key.session and example.completion == second.completion
            # The first difference lies in what was sampled before, or right behind it.
            assert first.event.prompt.length <= example.at <= first.context_length
            assert example.seen != "" and (kind == "retokenised") == (example.seen[:4] == example.native[:4])


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FORGETFUL = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}")


def formatted(directory: Path, template: str) -> Renderer:
    """The directory's tokenizer with a template of its own."""
    path = directory / "own.jinja"
    path.write_text(template)
    return load_renderer(replace(profile_for(directory), template=str(path)))


async def test_another_template_a_refusal_and_no_tokenizer_are_counted(
    nats_server: NatsServer, bus: Bus, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    directory = tmp_path_factory.mktemp("scripted")
    async with scripted(directory, nats_server, bus, tmp_path) as proxy:
        await told_twice(proxy, session_key(), "A plain answer.")
    nobody = await gaps_of(bus, None)
    assert nobody.unreadable == {"no_tokenizer": 2} and nobody.total.calls == 0
    same_text = (await gaps_of(bus, formatted(directory, CHATML))).total
    assert (same_text.calls, same_text.other_template, same_text.different) == (2, 2, 0)
    forgetful = await gaps_of(bus, formatted(directory, FORGETFUL))
    (gap,) = forgetful.gaps.values()
    assert gap.kinds == {"refused": 1} and not gap.first and "drops this message" in gap.examples["refused"].native


async def test_a_stop_string_and_a_billing_header_are_told_apart(
    nats_server: NatsServer, bus: Bus, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    directory = tmp_path_factory.mktemp("scripted")
    async with scripted(directory, nats_server, bus, tmp_path) as proxy:
        stopped, billed = (session_key(f"s1-abcdefghij0123456789-{i}") for i in range(2))
        text = "A plain answer END"
        ids = proxy.engine.tokenizer.encode(text, add_special_tokens=False).ids
        proxy.engine.say(Say(text, ids=ids, finish="string"))
        first = await proxy.told([user("Go on.")], key=stopped, stop=["END"])
        proxy.engine.say(Say("Well."))
        echoed = {"role": "assistant", "content": first["content"]}
        await proxy.told([user("Go on."), echoed, user("And then?")], key=stopped, stop=["END"])
        await ended(bus, stopped)
        proxy.engine.say(Say("Well."))
        body = {
            "model": "claude", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}],
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12\nBe brief."}],
        }  # fmt: skip
        answer = await proxy.client.post(f"{proxy.base(billed)}/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        await ended(bus, billed, harness="claude")
        (call,) = await proxy.captured(billed)
    found = await gaps_of(bus, plain(directory))
    assert found.gaps["command", "policy"].kinds == {"close": 1}
    gap = found.gaps["claude", "policy"]
    assert gap.kinds == {"stripped_header": 1} and call.event.billing
    (example,) = gap.examples.values()
    assert example.seen.startswith("Be brief") and example.native.startswith("x-")
    assert gap.first == [example.at] and 0 < example.at < call.event.prompt.length
