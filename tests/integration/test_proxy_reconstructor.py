"""What the proxy captures, the reconstructor builds: both on one real log, with nothing in between."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from proxy_engine import Say
from proxy_kit import Kit, user

from polar_common import subjects
from polar_common.events import BuildFailed, BuildReconstructed, SessionArtifacts, SessionExited
from polar_reconstructor.handlers import Reconstructor
from polar_reconstructor.rules import BUILT_IN

pytestmark = pytest.mark.nats


async def built(proxy: Kit, build: str = "live") -> BuildReconstructed | BuildFailed:
    """End the session and build it."""
    key = proxy.key
    about: dict[str, Any] = {"session": key.session, "attempt": key.attempt, "run": key.run, "task": key.task}
    await proxy.seal()
    for event in (SessionExited(**about, exit_code=0), SessionArtifacts(**about)):
        await proxy.bus.once(event)
    end = await proxy.bus.last(subjects.session(key.session, key.attempt, "artifacts"))
    assert end is not None
    await Reconstructor(proxy.bus, build, BUILT_IN["exact"]).on_ended(end)
    fact = await proxy.bus.last(subjects.build(build, key.session, "*"))
    assert fact is not None and isinstance(fact.event, BuildReconstructed | BuildFailed)
    return fact.event


async def test_completions_say_how_large_the_vocabulary_is(proxy: Kit) -> None:
    answer = await proxy.told([user("go")])
    await proxy.told([user("go"), {"role": "assistant", "content": answer["content"]}, user("on")])
    assert {r.event.engine.vocab_size for r in await proxy.agrees()} == {proxy.engine.tokenizer.get_vocab_size()}
    fact = await built(proxy)
    assert isinstance(fact, BuildReconstructed) and (fact.traces, fact.trained_completions) == (1, 2)


async def test_an_id_beyond_the_vocabulary_fails_the_session_and_is_named(proxy: Kit) -> None:
    beyond = proxy.engine.tokenizer.get_vocab_size()
    proxy.engine.say(Say(ids=[10, 11, beyond, proxy.engine.end]))
    await proxy.told([user("go")])
    (call,) = await proxy.agrees()
    fact = await built(proxy)
    assert isinstance(fact, BuildFailed)
    assert fact.reason == (
        f"TraceError: completion {call.completion}: sampled[2] is id {beyond} beyond the vocabulary of {beyond}"
    )


async def test_the_last_id_of_the_vocabulary_is_within_it(proxy: Kit) -> None:
    proxy.engine.say(Say(ids=[10, proxy.engine.tokenizer.get_vocab_size() - 1, proxy.engine.end]))
    await proxy.told([user("go")])
    assert isinstance(await built(proxy), BuildReconstructed)


async def test_the_size_is_in_the_stored_bytes(proxy: Kit) -> None:
    """Defaults are left out of events: this one isn't a default."""
    await proxy.told([user("go")])
    stored = await proxy.bus.read_session(proxy.key.session)
    (body,) = [orjson.loads(s.body) for s in stored if s.subject.endswith(".captured")]
    assert body["engine"]["vocab_size"] == proxy.engine.tokenizer.get_vocab_size()
