"""How a call is sampled: what the harness asked, what the task pins, what fits. Pure functions.

Training pins EXACT §5's defaults over the harness (`pin`); otherwise the harness's own win where it gives any
(`follow`). Both what was asked and what was used are recorded.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields

from polar_common.errors import EngineOverflow
from polar_common.events import SamplingUsed
from polar_common.task_spec import SamplingSpec
from polar_proxy.dialects.base import Sampling

__all__ = ["asked_fields", "derived_seed", "max_tokens", "sampling_used", "used_json"]


_ASKED = tuple(f.name for f in fields(Sampling))
_USED = tuple((name, f.default) for name, f in SamplingUsed.model_fields.items() if not f.is_required())


def asked_fields(asked: Sampling) -> dict[str, object]:
    """What the harness said, silent fields left out."""
    found = {}
    for name in _ASKED:
        value = getattr(asked, name)
        if value is not None and value != () and value is not False and not (name == "n" and value == 1):
            found[name] = value
    return found


def used_json(used: SamplingUsed) -> dict[str, object]:
    """As it is recorded: defaults left out."""
    found: dict[str, object] = {
        "temperature": used.temperature, "top_p": used.top_p, "top_k": used.top_k, "min_p": used.min_p,
        "max_tokens": used.max_tokens,
    }  # fmt: skip
    for name, default in _USED:
        value = getattr(used, name)
        if value != default:
            found[name] = value
    return found


def derived_seed(*parts: object) -> int:
    """A 31-bit seed that depends on all parts."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def max_tokens(asked: int | None, cap: int | None, window: int, prompt: int, default: int) -> int:
    """Tokens the answer may have. `window` 0: unknown. Raises EngineOverflow where the prompt fills the window."""
    wanted = default if asked is None else asked
    if cap is not None:
        wanted = min(wanted, cap)
    if window:
        room = window - prompt
        if room < 1:
            raise EngineOverflow(
                f"This model's maximum context length is {window} tokens. However, your messages resulted in {prompt} "
                "tokens. Please reduce the length of the messages.",
                400,
            )
        wanted = min(wanted, room)
    return wanted


def sampling_used(
    spec: SamplingSpec, asked: Sampling, *, tokens: int, session: str, request_hash: str, repeat: int, choice: int
) -> SamplingUsed:
    """Every field the engine is told. `repeat`: how many identical requests came before.

    A seed is mixed with the session, so that the samples of a group differ whatever a harness sends with each.
    """
    if spec.mode == "pin":
        seed = None
        if spec.seed is not None:
            seed = derived_seed(spec.seed, session, request_hash, repeat, choice)
        elif asked.seed is not None:
            seed = derived_seed(asked.seed, session, choice)
        # All values were checked where they came from; this is done for every call.
        return SamplingUsed.model_construct(
            temperature=spec.temperature, top_p=spec.top_p, top_k=spec.top_k, min_p=spec.min_p, max_tokens=tokens,
            seed=seed, stop=asked.stop,
        )  # fmt: skip
    seed = spec.seed if asked.seed is None else asked.seed
    return SamplingUsed(
        temperature=_first(asked.temperature, spec.temperature),
        top_p=_first(asked.top_p, spec.top_p) or 1.0,
        top_k=max(0, int(_first(asked.top_k, spec.top_k))),
        min_p=_first(asked.min_p, spec.min_p),
        max_tokens=tokens,
        seed=None if seed is None else (seed + choice) & 0x7FFFFFFFFFFFFFFF,
        stop=asked.stop,
        presence_penalty=_first(asked.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, 0.0),
        repetition_penalty=_first(asked.repetition_penalty, 1.0) or 1.0,
        logit_bias=asked.logit_bias or None,
    )


def _first(asked: float | None, otherwise: float) -> float:
    return otherwise if asked is None else asked
