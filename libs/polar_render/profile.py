"""Which format a model speaks, and the renderer for it.

A profile is made from a model's directory (`profile_for`) or written out in configuration; `load_renderer` makes the
renderer, proves it, and says in its provenance what was used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Literal

from polar_common.errors import ConfigError

from .base import Provenance, Renderer
from .bridge import TemplateRenderer
from .jinja import compile_template
from .messages import Json
from .packaged import PackagedRenderer, known_name
from .vocabulary import Vocabulary, eos_ids, id_bound, read_json

__all__ = ["CHATML_TOOLS", "ModelProfile", "load_renderer", "profile_for"]

CHATML_TOOLS = "chatml_tools"
"""Name of our own template for ChatML models whose template renders no tools."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """How a model is prompted.

    `directory` holds tokenizer.json and the configuration files. `template`: `own` (the tokenizer's), the name of a
    template of this package, or a path to a Jinja file. `renderer`: `auto` (hand-coded where the model is known and
    the proof holds, else the template bridge), `template`, or a name of the `renderers` package. `stop_tokens` adds
    end-of-turn tokens that the model's configuration forgets. `context_window` is in tokens, 0 if unknown.
    `late_system`: the role in which a system message in mid conversation is shown; `user` serves templates that drop or
    refuse it there. `template_args` are defaults that a call's own arguments override.
    """

    model: str
    directory: Path
    template: str = "own"
    renderer: str = "auto"
    tool_format: Literal["auto", "hermes", "qwen3_coder"] = "auto"
    thinking: Literal["keep", "follow"] = "keep"
    late_system: Literal["system", "user"] = "system"
    context_window: int = 0
    stop_tokens: tuple[str, ...] = ()
    template_args: dict[str, Json] = field(default_factory=dict)


def _own_template(directory: Path) -> str:
    """The tokenizer's chat template, "" if it has none."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(value, list):
        named = {str(v["name"]): str(v["template"]) for v in value if isinstance(v, dict) and "template" in v}
        return named.get("default", "")
    return value if isinstance(value, str) else ""


def _shipped(name: str) -> str:
    """A template of this package, "" if it has none of that name."""
    path = resources.files(__package__) / "templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8") if name.isidentifier() and path.is_file() else ""


def _template(profile: ModelProfile) -> str:
    if profile.template == "own":
        if source := _own_template(profile.directory):
            return source
        raise ConfigError("the tokenizer has no chat template: name one", "template")
    if shipped := _shipped(profile.template):
        return shipped
    path = Path(profile.template)
    if not path.is_file():
        raise ConfigError(f"no template {profile.template!r}: neither shipped nor a file", "template")
    return path.read_text(encoding="utf-8")


def _special_names(directory: Path) -> dict[str, str]:
    """`bos_token` and so on, as templates use them."""
    names = {}
    for key, value in read_json(directory / "tokenizer_config.json").items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                names[key] = text
    return names


def profile_for(directory: Path | str, *, model: str = "") -> ModelProfile:
    """The profile of a model directory.

    A ChatML tokenizer whose own template doesn't mention tools (or that has none) gets our ChatML template. The
    context window is the model configuration's. Raises ConfigError if there is no usable tokenizer.
    """
    directory = Path(directory)
    config = read_json(directory / "config.json")
    window = next((config[k] for k in ("max_position_embeddings", "n_positions", "n_ctx") if k in config), 0)
    own = _own_template(directory)
    profile = ModelProfile(
        model=model or directory.name,
        directory=directory,
        context_window=window if isinstance(window, int) else 0,
    )
    if "tool" not in own:
        added = Vocabulary.load(directory).added
        if "<|im_start|>" in added and "<|im_end|>" in added:
            return replace(profile, template=CHATML_TOOLS)
    return profile


def load_renderer(profile: ModelProfile) -> Renderer:
    """The proven renderer of a profile. Takes a fraction of a second: make it once.

    Raises ConfigError where tokenizer, template, stop tokens or renderer are unusable.
    """
    vocabulary = Vocabulary.load(profile.directory)
    stops = _stop_ids(profile, vocabulary)
    name = known_name(profile.model) if profile.renderer == "auto" else profile.renderer
    if name and name != "template":
        try:
            packaged = _packaged(profile, vocabulary, stops, name)
            if profile.renderer != "auto" or packaged.prove().exact:
                return packaged
        except ConfigError:
            if profile.renderer != "auto":
                raise
    return _bridged(profile, vocabulary, stops)


def _stop_ids(profile: ModelProfile, vocabulary: Vocabulary) -> tuple[int, ...]:
    stops = list(eos_ids(profile.directory, vocabulary))
    for token in profile.stop_tokens:
        if (found := vocabulary.id_of(token)) is None:
            raise ConfigError(f"{token!r} is no token of this model", "stop_tokens")
        stops.append(found)
    return tuple(dict.fromkeys(stops))


def _provenance(profile: ModelProfile, vocabulary: Vocabulary, source: str, renderer: str) -> Provenance:
    return Provenance(
        model=profile.model,
        tokenizer_hash=vocabulary.fingerprint,
        template_hash=hashlib.sha256(source.encode()).hexdigest(),
        renderer=renderer,
        renderer_version=_version("polar-rl" if renderer == "template" else "renderers"),
        vocab_size=id_bound(profile.directory, vocabulary),
    )


def _packaged(profile: ModelProfile, vocabulary: Vocabulary, stops: tuple[int, ...], name: str) -> PackagedRenderer:
    source = _own_template(profile.directory)
    provenance = _provenance(profile, vocabulary, source, f"renderers/{name}")
    return PackagedRenderer(vocabulary, name, source, stops, provenance, profile.thinking == "keep", _late(profile))


def _bridged(profile: ModelProfile, vocabulary: Vocabulary, stops: tuple[int, ...]) -> TemplateRenderer:
    source = _template(profile)
    names: dict[str, Json] = dict(_special_names(profile.directory))
    return TemplateRenderer(
        vocabulary,
        compile_template(source, names | profile.template_args, trusted=source == _shipped(profile.template)),
        source,
        stops,
        _provenance(profile, vocabulary, source, "template"),
        keep_thinking=profile.thinking == "keep",
        tool_format=None if profile.tool_format == "auto" else profile.tool_format,
        late_system=_late(profile),
    )


def _late(profile: ModelProfile) -> str:
    return "" if profile.late_system == "system" else profile.late_system


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unreleased"
