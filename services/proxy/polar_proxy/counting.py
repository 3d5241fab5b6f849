"""How long a prompt with pictures is: their ids are made by the engine's own processor, so the engine is asked.

It is asked for one token, which nobody is shown and nothing records; a generation of the same prompt finds it cached.
"""

from __future__ import annotations

import numpy as np

from polar_common.events import SamplingUsed
from polar_common.ids import new_id

from .engines.base import GenerateRequest, NativePrompt
from .engines.pool import Replica

__all__ = ["prompt_length"]


async def prompt_length(replica: Replica, native: NativePrompt) -> int:
    """Ids of the prompt, after expansion. Raises EngineError."""
    used = SamplingUsed(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1)
    empty = np.zeros(0, dtype=np.int32)
    request = GenerateRequest(new_id(), empty, used, cache_salt=replica.version, native=native)
    replica.enter()
    try:
        told = await replica.engine.complete(request)
    finally:
        replica.leave()
    return max(told.prompt_tokens, len(told.prompt_ids or ()))
