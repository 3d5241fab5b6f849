"""Tokenising with a memory gives what tokenising at once gives, and ids decode to what they stand for."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from conftest import QWEN_ADDED, make_tokenizer
from polar_common.errors import RenderError
from polar_render import ModelProfile, load_renderer
from polar_render import vocabulary as module
from polar_render.base import Head
from polar_render.messages import Message, Text
from polar_render.vocabulary import Vocabulary

pieces = st.sampled_from(
    [
        *QWEN_ADDED,
        "<|im_start|>",
        "<|im_end|>",
        "\n",
        "\n\n",
        " ",
        "  x",
        "word " * 40,
        "日本語🙂" * 30,
        "<|im_",
        "a" * 700,
        "\t",
        "'s",
    ]
)


def at_once(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(pieces, max_size=14).map("".join))
def test_remembered_stretches_change_no_id(qwen_dir: Path, text: str) -> None:
    vocabulary = _loaded(qwen_dir)
    for _ in range(2):
        assert vocabulary.encode(text) == at_once(vocabulary, text)
    assert vocabulary.decode(vocabulary.encode(text)) == text


_CACHE: dict[Path, Vocabulary] = {}


def _loaded(directory: Path) -> Vocabulary:
    return _CACHE.setdefault(directory, Vocabulary.load(directory))


def test_the_memory_is_bounded(qwen_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 10_000)
    vocabulary = Vocabulary.load(qwen_dir)
    for number in range(60):
        vocabulary.encode(f"{number} " * 400)
    assert 0 < vocabulary._known_size <= 10_000
    assert vocabulary._known_size == sum(map(len, vocabulary._known))
    assert vocabulary.encode("59 " * 400) == at_once(vocabulary, "59 " * 400)


def test_threads_may_share_it(qwen_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 5_000)
    vocabulary = Vocabulary.load(qwen_dir)
    texts = [f"{n} word" * 200 for n in range(8)]
    expected = [at_once(vocabulary, t) for t in texts]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(15):
            wrong.extend(i for i, text in enumerate(texts) if vocabulary.encode(text) != expected[i])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert vocabulary._known_size == sum(map(len, vocabulary._known))


def test_tokens_that_eat_blanks_switch_the_memory_off(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path, [])
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["added_tokens"][2]["rstrip"] = True
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    vocabulary = Vocabulary.load(directory)
    text = "word " * 200 + "<|im_end|>   \n" + "word " * 200
    assert vocabulary.encode(text) == at_once(vocabulary, text)
    assert not vocabulary._known


def test_half_a_surrogate_pair_is_refused(qwen_dir: Path) -> None:
    with pytest.raises(RenderError, match="surrogate"):
        _loaded(qwen_dir).encode("a\ud800b")


def test_a_normalizer_may_compose_characters(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path, QWEN_ADDED)
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "NFC"}
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    said = Message("user", (Text("cafe\u0301 " * 200),))
    for renderer, template in (("qwen3", "own"), ("template", "chatml_tools")):
        loaded = load_renderer(ModelProfile("m", directory, template, renderer))
        assert "caf\u00e9" in loaded.decode(loaded.render([said], Head()))


def test_metaspace_pieces_and_byte_tokens_decode(tmp_path: Path) -> None:
    words = {"<unk>": 0, "▁hello": 1, "▁": 2, "w": 3, "<0xC3>": 4, "<0xA9>": 5}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.decode([1, 2, 3, 4, 5, 6]) == " hello wé</s>"
    assert vocabulary.decode_tokens([1, 4, 5]) == [" hello", "", "é"]
    assert vocabulary.decode([99]) == "<unknown 99>"
