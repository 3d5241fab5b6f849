"""Profiles are read from a model's own files, and what can't be used says where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from polar_common.errors import ConfigError
from polar_render import CHATML_TOOLS, ModelProfile, load_renderer, profile_for
from polar_render.base import Head
from polar_render.messages import Message, Text
from polar_render.vocabulary import Vocabulary, id_bound

ASK = [Message("user", (Text("hi"),))]


@pytest.fixture
def model(chatml_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny tokenizer with other configuration files."""

    def make(**files: object) -> Path:
        target = tmp_path / "model"
        shutil.copytree(chatml_dir, target)
        for name, content in files.items():
            path = target / {"template": "chat_template.jinja"}.get(name, f"{name}.json")
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return target

    return make


def test_a_chatml_model_without_tools_gets_our_template(model: Callable[..., Path]) -> None:
    profile = profile_for(model(template="{{ messages[0].content }}<|im_end|>"))
    assert (profile.template, profile.context_window, profile.model) == (CHATML_TOOLS, 4096, "model")


def test_a_template_that_knows_tools_is_kept(model: Callable[..., Path]) -> None:
    assert profile_for(model(template="{{ tools }}")).template == "own"


def test_the_template_may_be_in_the_tokenizer_configuration(model: Callable[..., Path]) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    for value in (source, [{"name": "rag", "template": "x"}, {"name": "default", "template": source}]):
        directory = model(tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "chat_template": value})
        renderer = load_renderer(ModelProfile("m", directory))
        assert renderer.decode(renderer.render(ASK, Head())) == "<|im_start|>user:hi<|im_end|><|im_start|>assistant:"
        shutil.rmtree(directory)


def test_ends_of_turn_come_from_every_declaration(model: Callable[..., Path]) -> None:
    directory = model(generation_config={"eos_token_id": [2, 0]}, config={"eos_token_id": 0})
    renderer = load_renderer(profile_for(directory))
    assert renderer.stop_ids == (2, 0) and renderer.close_ids == (2,)


def test_no_declared_end_of_turn_is_never_guessed(model: Callable[..., Path]) -> None:
    directory = model(config={}, tokenizer_config={})
    renderer = load_renderer(profile_for(directory))
    assert renderer.stop_ids == () and not renderer.prove().exact
    assert {c.feature: c.ok for c in renderer.prove().checks}["stop ids"] is False
    assert renderer.tail(ASK, Message("assistant", (Text("yes"),)), ASK, Head()) is None
    mended = load_renderer(ModelProfile("m", directory, CHATML_TOOLS, stop_tokens=("<|im_end|>",)))
    assert mended.prove().exact


def test_provenance_names_what_was_used(chatml_dir: Path, qwen_dir: Path) -> None:
    ours = load_renderer(ModelProfile("m", chatml_dir, CHATML_TOOLS)).provenance
    packaged = load_renderer(ModelProfile("m", qwen_dir, renderer="qwen3")).provenance
    assert (ours.renderer, packaged.renderer) == ("template", "renderers/qwen3")
    assert len({ours.tokenizer_hash, packaged.tokenizer_hash, ours.template_hash, packaged.template_hash}) == 4
    assert all(len(h) == 64 for h in (ours.tokenizer_hash, ours.template_hash))


def test_a_published_models_name_finds_its_hand_coded_format(qwen_dir: Path) -> None:
    assert load_renderer(ModelProfile("Qwen/Qwen3-8B", qwen_dir)).provenance.renderer == "renderers/qwen3"
    bridged = load_renderer(ModelProfile("Qwen/Qwen3-8B", qwen_dir, CHATML_TOOLS, renderer="template"))
    assert bridged.provenance.renderer == "template"


@pytest.mark.parametrize(
    ("files", "fields", "named"),
    [
        ({}, {"template": "no_such"}, "template"),
        ({}, {"template": "own"}, "template"),
        ({"template": "{% if %}"}, {"template": "own"}, "chat template"),
        ({}, {"stop_tokens": ("<|nope|>",)}, "stop_tokens"),
        ({}, {"renderer": "no_such"}, "renderer"),
        ({}, {"renderer": "qwen3"}, "renderer"),
        ({"tokenizer": "{"}, {}, "tokenizer"),
        ({"config": "[]"}, {}, "config.json"),
    ],
)
def test_unusable_profiles_name_the_field(
    model: Callable[..., Path], files: dict[str, object], fields: dict[str, object], named: str
) -> None:
    profile = ModelProfile(**{"model": "m", "directory": model(**files), "template": CHATML_TOOLS, **fields})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=named):
        load_renderer(profile)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        profile_for(tmp_path)


def test_the_template_runs_in_a_sandbox(model: Callable[..., Path]) -> None:
    directory = model(template="{{ messages.__class__.__mro__ }}<|im_end|>")
    renderer = load_renderer(ModelProfile("m", directory))
    assert not renderer.prove().exact
    assert all(not c.ok for c in renderer.prove().checks if c.feature == "user")


@pytest.mark.parametrize(
    ("config", "bound"),
    [({"vocab_size": 5_000}, 5_000), ({"text_config": {"vocab_size": 6_000}}, 6_000), ({"vocab_size": 7}, None)],
)
def test_ids_are_below_the_models_own_size_and_never_below_the_tokenizers(
    model: Callable[..., Path], config: dict[str, object], bound: int | None
) -> None:
    directory = model(config=config)
    vocabulary = Vocabulary.load(directory)
    highest = max(vocabulary.encode("ab é <|im_end|>"))
    found = load_renderer(ModelProfile("m", directory, template=CHATML_TOOLS)).provenance.vocab_size
    assert found == (bound or vocabulary.size) and found > highest


def test_a_token_beyond_a_gap_counts(model: Callable[..., Path]) -> None:
    directory = model()
    spec = json.loads((directory / "tokenizer.json").read_bytes())
    spec["model"]["vocab"]["beyond"] = 9_000
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    assert id_bound(directory, Vocabulary.load(directory)) == 9_001
