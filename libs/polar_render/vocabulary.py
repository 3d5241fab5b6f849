"""A model's tokenizer as the renderer needs it: text to ids, ids to bytes, and which ids end a turn.

It sits directly on the `tokenizers` backend, because wrapping it costs more than tokenising a short tail. Ids become
bytes through a table, not through `decode`: that is lossless for any split of the ids, also inside a character.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from polar_common.errors import ConfigError, RenderError

from .messages import Json

__all__ = ["TextDecoder", "Vocabulary", "eos_ids", "id_bound", "read_json"]

_LONG = 512
"""Characters from which a stretch between two added tokens is worth remembering."""
_REMEMBERED = 4_000_000
"""Characters that one tokenizer remembers at most. System prompts and tool lists are the same in every session of a
task, and the history of a chain that has to be rendered anew is mostly known."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def read_json(path: Path) -> dict[str, Json]:
    """The JSON object in a file, `{}` if the file isn't there. Raises ConfigError on anything but an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", str(path.name)) from error
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", str(path.name))
    return value


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes (GPT-2's `bytes_to_unicode`), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    table.update({chr(256 + n): b for n, b in enumerate(rest)})
    return table


def _decoder_kinds(decoder: Json) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders")
    kinds = {str(decoder.get("type"))}
    for item in inner if isinstance(inner, list) else []:
        kinds |= _decoder_kinds(item)
    return kinds


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for any of the tokens, the longest where several fit."""
    words = sorted((re.escape(t) for t in tokens), key=len, reverse=True)
    return re.compile("|".join(words)) if words else None


def _splits_cleanly(spec: dict[str, Json], added: list[dict[str, Json]]) -> bool:
    """Whether text between added tokens is tokenised on its own: byte-level, as it stands, and no token eats blanks."""
    greedy = any(t.get(flag) for t in added for flag in ("lstrip", "rstrip", "single_word"))
    first = spec.get("pre_tokenizer")
    prefixed = 'add_prefix_space": true' in json.dumps(first)
    return not greedy and not prefixed and spec.get("normalizer") is None and "ByteLevel" in json.dumps(first)


def _ids_of(value: Json) -> list[int]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [value]
    return [v for v in value if isinstance(v, int)] if isinstance(value, list) else []


def eos_ids(directory: Path, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The end-of-turn ids that the model itself declares: generation config, model config, tokenizer; in this order.

    Empty where it declares none: an end of turn is never guessed.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found += _ids_of(read_json(directory / name).get("eos_token_id"))
    token = read_json(directory / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        found += [i for i in [vocabulary.id_of(token)] if i is not None]
    return tuple(dict.fromkeys(found))


def id_bound(directory: Path, vocabulary: Vocabulary) -> int:
    """Every id that the model can be shown or can sample is below this.

    The model's own size where its configuration tells it (rows that pad the embedding count: an engine may sample
    them), and never less than what the tokenizer knows.
    """
    config = read_json(directory / "config.json")
    nested = config.get("text_config")
    told = [c.get("vocab_size") for c in (config, nested) if isinstance(c, dict)]
    sizes = [size for size in told if isinstance(size, int)]
    return max([vocabulary.size, *sizes])


class TextDecoder:
    """Bytes of ids in, text out; holds back a character that isn't complete yet. Invalid bytes become U+FFFD."""

    __slots__ = ("_decode", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._vocabulary.bytes_of(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class Vocabulary:
    """One tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, fingerprint: str = "") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._known_size = 0
        self._lock = threading.Lock()
        spec = cast(dict[str, Json], json.loads(tokenizer.to_str()))
        self.fingerprint = fingerprint or hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        added = cast(list[dict[str, Json]], spec.get("added_tokens") or [])
        self.added: dict[str, int] = {str(t["content"]): cast(int, t["id"]) for t in added}
        self.special: frozenset[str] = frozenset(str(t["content"]) for t in added if t.get("special"))
        self.special_ids: frozenset[int] = frozenset(self.added[t] for t in self.special)
        self._added_by_id = {i: text for text, i in self.added.items()}
        kinds = _decoder_kinds(spec.get("decoder"))
        self._byte_level = "ByteLevel" in kinds
        self._metaspace = bool(kinds & {"Metaspace", "ByteFallback", "Replace"})
        self._table: dict[int, bytes] = {}
        # Not the number of tokens: some vocabularies have gaps.
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._specials = _alternatives(self.special)
        self._borders = _alternatives(self.added) if _splits_cleanly(spec, added) else None

    @classmethod
    def load(cls, directory: Path) -> Vocabulary:
        """From a directory with `tokenizer.json`. Raises ConfigError if it is missing or can't be read."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError("no tokenizer.json: convert the tokenizer to the fast format first", str(directory))
        body = path.read_bytes()
        try:
            tokenizer = Tokenizer.from_buffer(body)
        except Exception as error:  # the backend raises bare Exception
            raise ConfigError(f"the tokenizer can't be read: {error}", str(path)) from error
        return cls(tokenizer, hashlib.sha256(body).hexdigest())

    def encode(self, text: str) -> list[int]:
        """Ids of the text, special tokens in it recognised, none added. Raises RenderError if it isn't Unicode text."""
        if len(text) < _LONG or self._borders is None:
            return self._ids(text)
        ids: list[int] = []
        done = 0
        for start, end in self._long_stretches(text, self._borders):
            if done < start:
                ids += self._ids(text[done:start])
            ids += self._remembered(text[start:end])
            done = end
        if done < len(text):
            ids += self._ids(text[done:])
        return ids

    def _ids(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # how the backend refuses a string that isn't Unicode text
            raise RenderError("a text holds half a surrogate pair, which no tokenizer can encode") from error

    def normalized(self, text: str) -> str:
        """The text as ids of it decode: some tokenizers compose characters first."""
        normalizer = self._tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer is not None else text

    @staticmethod
    def _long_stretches(text: str, borders: re.Pattern[str]) -> Iterator[tuple[int, int]]:
        """Long stretches of text between added tokens, which the tokenizer never looks across."""
        at = 0
        for match in borders.finditer(text):
            if match.start() - at >= _LONG:
                yield at, match.start()
            at = match.end()
        if len(text) - at >= _LONG:
            yield at, len(text)

    def _remembered(self, text: str) -> array[int]:
        with self._lock:
            if (known := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return known
        ids = array("i", self._ids(text))
        with self._lock:
            if text not in self._known and len(text) <= _REMEMBERED // 4:
                self._known[text] = ids
                self._known_size += len(text)
                while self._known_size > _REMEMBERED:
                    self._known_size -= len(self._known.popitem(last=False)[0])
        return ids

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def text_of_id(self, token: int) -> str:
        """The text of one id alone; an incomplete character shows as U+FFFD."""
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def is_added(self, token: int) -> bool:
        """Whether the id is an added token: one that stands for itself and is never merged with its neighbours."""
        return token in self._added_by_id

    def bytes_of(self, token: int) -> bytes:
        """The bytes an id stands for. Ids outside the vocabulary show as `<unknown id>`, so that nothing vanishes."""
        known = self._table.get(token)
        if known is None:
            known = self._table[token] = self._bytes_of(token)
        return known

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added_by_id:
            return self._added_by_id[token].encode()
        piece = self._tokenizer.id_to_token(token) if 0 <= token < 2**31 else None
        if piece is None:
            return f"<unknown {token}>".encode()
        if self._byte_level:
            alphabet = _byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)
        if self._metaspace:
            match = _BYTE_TOKEN.match(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens shown."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="replace")

    def decode_tokens(self, ids: Sequence[int]) -> list[str]:
        """One text per id; joined they are exactly `decode(ids)`.

        A character that several ids share is shown at the id that completes it, the ids before it show "".
        """
        decoder = TextDecoder(self)
        pieces = [decoder.feed(i) for i in ids]
        if pieces:
            pieces[-1] += decoder.finish()
        return pieces

    def control_tokens(self, text: str) -> list[str]:
        """Special tokens spelled out in a text, which would become control tokens when it is rendered."""
        return self._specials.findall(text) if self._specials else []
