"""The proxy end to end against a real log: contexts are exact, both ways of answering record the same."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from proxy_engine import Say
from proxy_kit import Kit, user

pytestmark = pytest.mark.nats

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "description": "write a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_continues_on_the_sampled_ids(proxy: Kit, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(4):
        proxy.engine.say(Say(f"answer number {turn}", seed=turn))
        messages.append(user(f"question {turn}"))
        message = await proxy.told(messages, stream=stream)
        assert message["content"] == f"answer number {turn}"
        messages.append({"role": "assistant", "content": message["content"]})
    resolved = await proxy.agrees()
    assert [r.event.chain_class for r in resolved] == ["root", "continued", "continued", "continued"]
    for before, after in pairwise(resolved):
        assert after.event.parent == before.completion
        assert after.prompt[: before.context_length].tolist() == before.context.tolist()
        assert after.event.context_exact is True and after.event.context_faithful
        canonical = proxy.engine.tokenizer.encode("answer number", add_special_tokens=False).ids
        assert before.sampled[: len(canonical)].tolist() != canonical
    text = proxy.engine.tokenizer.decode(resolved[-1].prompt.tolist(), skip_special_tokens=False)
    assert text.count("<|im_start|>assistant") == 4 and "answer number 2<|im_end|>\n<|im_start|>user" in text
    assert all(e.event.untrainable == "" and e.event.logprobs is not None for e in resolved)


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_thinking_and_their_results_continue_exactly(proxy: Kit, stream: bool) -> None:
    spaced = '{"path":  "a.txt",   "content": "x"}'
    proxy.engine.say(
        Say(
            f"<think>\nI should write\n</think>\n\nWriting.\n{call_text('write', spaced)}\n{call_text('write', '{}')}",
            seed=3,
        ),
        Say("done", seed=4),
    )
    messages: list[dict[str, Any]] = [user("write a file")]
    first = await proxy.told(messages, stream=stream, tools=TOOLS)
    assert first["reasoning_content"] == "I should write" and first["content"] == "Writing."
    calls = first["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == [spaced, "{}"]
    assert len({c["id"] for c in calls}) == 2
    # Harnesses write arguments anew and may drop the thinking.
    calls[0]["function"]["arguments"] = '{"path":"a.txt","content":"x"}'
    messages.append({"role": "assistant", "content": "Writing.", "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": c["id"], "content": f"ok {n}"} for n, c in enumerate(calls)]
    second = await proxy.told(messages, stream=stream, tools=TOOLS)
    assert second["content"] == "done"
    one, two = await proxy.agrees()
    assert two.event.chain_class == "continued" and two.event.parent_by == "minted"
    assert two.prompt[: one.context_length].tolist() == one.context.tolist()
    assert two.event.additions == ("kept_thinking",)
    assert one.event.finish == "tool_calls" and one.event.closed
    assert two.event.head.at == one.completion and two.head.tools[0].name == "write"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_cut_by_length_is_closed_in_the_context(proxy: Kit, stream: bool) -> None:
    proxy.engine.say(Say("a long answer that is cut", finish="length", seed=1), Say("more"))
    message = await proxy.told([user("go")], stream=stream)
    await proxy.told([user("go"), {"role": "assistant", "content": message["content"]}, user("on")], stream=stream)
    one, two = await proxy.agrees()
    assert one.event.finish == "length" and not one.event.closed
    assert two.prompt[: one.context_length].tolist() == one.context.tolist()
    assert two.prompt[one.context_length] == proxy.engine.end
    assert two.event.additions == ("synthesised_close",)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_cut_from_the_answer_and_kept_in_the_context(proxy: Kit, stream: bool) -> None:
    proxy.engine.say(Say("first STOPPED", finish="string", seed=2, chunk=1), Say("next"))
    response = await proxy.chat([user("go")], stream=stream, stop=["STOP", "never"])
    text = response.text
    assert "STOP" not in text and "PED" not in text
    said = "first "
    await proxy.told([user("go"), {"role": "assistant", "content": said}, user("on")], stop=["STOP", "never"])
    one, two = await proxy.agrees()
    assert one.event.finish == "stop_string"
    assert two.event.chain_class == "continued"
    assert set(two.event.additions) == {"synthesised_close", "kept_stop_string"}
    assert proxy.engine.tokenizer.decode(one.sampled.tolist()).endswith("STOPPED")


async def test_parallel_choices_are_completions_of_their_own(proxy: Kit) -> None:
    proxy.engine.say(*(Say(f"choice {n}", seed=n) for n in range(3)))
    response = await proxy.chat([user("go")], n=3)
    texts = [c["message"]["content"] for c in response.json()["choices"]]
    assert sorted(texts) == ["choice 0", "choice 1", "choice 2"]
    found = await proxy.agrees()
    assert sorted(r.event.choice for r in found) == [0, 1, 2]
    first = next(r for r in found if r.event.choice == 0)
    assert all(r.event.parallel_of == first.completion for r in found if r.event.choice)
    await proxy.told([user("go"), {"role": "assistant", "content": texts[1]}, user("on")])
    last = (await proxy.captured())[-1]
    assert proxy.engine.tokenizer.decode(last.prompt.tolist()).count(texts[1]) == 1
    parent = next(r for r in found if r.completion == last.event.parent)
    assert parent.event.choice == 1


async def test_streamed_choices_come_interleaved_and_whole(proxy: Kit) -> None:
    proxy.engine.say(*(Say(f"choice number {n}", seed=n, delay_s=0.005, chunk=1) for n in range(2)))
    response = await proxy.chat([user("go")], n=2, stream=True)
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n")
    assert len(await proxy.agrees()) == 2


async def test_parallel_identical_requests_are_samples_of_their_own(proxy: Kit) -> None:
    proxy.engine.say(*(Say(f"sample {n}", seed=n, delay_s=0.05) for n in range(3)))
    answers = await asyncio.gather(*(proxy.told([user("go")]) for _ in range(3)))
    assert {a["content"] for a in answers} == {"sample 0", "sample 1", "sample 2"}
    found = await proxy.agrees()
    assert len(found) == 3 and len({r.event.request_hash for r in found}) == 1


async def test_what_was_asked_and_what_was_used_are_recorded(proxy: Kit) -> None:
    await proxy.told([user("go")], temperature=0.3, top_p=0.5, presence_penalty=1.0, max_tokens=7)
    event = (await proxy.captured())[0].event
    assert event.sampling.temperature == 1.0 and event.sampling.top_p == 1.0 and event.sampling.max_tokens == 7
    assert event.sampling.presence_penalty == 0.0 and event.untrainable == ""
    assert event.sampling_asked == {"temperature": 0.3, "top_p": 0.5, "presence_penalty": 1.0, "max_tokens": 7}
    sent = proxy.engine.journal[0].body["sampling_params"]
    fields = {
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "max_tokens", "stop", "stop_token_ids", "logprobs",
    }  # fmt: skip
    assert fields <= set(sent)
    assert sent["stop_token_ids"] == [proxy.engine.end]


async def test_another_head_begins_a_new_chain(proxy: Kit) -> None:
    first = await proxy.told([user("go")], tools=TOOLS)
    await proxy.told([user("go"), {"role": "assistant", "content": first["content"]}, user("on")])
    one, two = await proxy.agrees()
    assert two.event.chain_class == "head_changed" and two.event.parent == ""
    assert (one.head.tools, two.head.tools) != ((), ())


async def test_an_edited_answer_begins_a_new_chain(proxy: Kit) -> None:
    await proxy.told([user("go")])
    await proxy.told([user("go"), {"role": "assistant", "content": "something else"}, user("on")])
    two = (await proxy.agrees())[1]
    assert two.event.chain_class == "edited" and two.event.context_exact is True


async def test_unrelated_conversations_of_a_session_are_roots(proxy: Kit) -> None:
    await proxy.told([user("go")], tools=TOOLS)
    await proxy.told([user("give this conversation a title")])
    assert [r.event.chain_class for r in await proxy.agrees()] == ["root", "root"]


async def test_finished_items_of_a_broken_responses_stream_are_adopted(proxy: Kit) -> None:
    """Codex keeps every item that was done, runs its tool, and goes on from there."""
    two = "\n".join(["Both.", call_text("write", '{"path": "a"}'), call_text("write", '{"path": "b"}')])
    proxy.engine.say(Say(two, seed=6), Say("done", seed=7))
    tools = [{"type": "function", "name": "write", "parameters": {"type": "object"}}]
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}
    url = f"{proxy.base()}/v1/responses"
    first = await proxy.client.post(url, json={"model": "m", "input": [question], "tools": tools})
    items = first.json()["output"]
    kept = [i for i in items if i["type"] == "message"] + [i for i in items if i["type"] == "function_call"][:1]
    output = {"type": "function_call_output", "call_id": kept[-1]["call_id"], "output": "ok"}
    body = {"model": "m", "input": [question, *kept, output], "tools": tools}
    assert (await proxy.client.post(url, json=body)).status_code == 200
    one, adopted = await proxy.agrees()
    assert adopted.event.parent == one.completion and adopted.event.parent_by == "adopted"
    assert "adopted_partial" in adopted.event.additions
    text = proxy.engine.tokenizer.decode(adopted.prompt.tolist(), skip_special_tokens=False)
    assert '"path": "a"' in text and '"path": "b"' not in text
    assert adopted.event.prompt.shared > len(one.prompt)
