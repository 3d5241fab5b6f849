"""Puts an engine together: model, tokenizer, scheduler. Needs torch."""

from __future__ import annotations

from functools import partial

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from polar_common.errors import ConfigError
from polar_engine.forward import Model, load_weights
from polar_engine.host import EngineHost, text_stream
from polar_engine.models import ensure_model
from polar_engine.requests import Served
from polar_engine.scheduler import Limits, Scheduler
from polar_engine.settings import EngineSettings

__all__ = ["load_engine"]


def load_engine(settings: EngineSettings) -> EngineHost:
    """Find or build the model, load it, start its scheduler. Raises ConfigError."""
    torch.set_num_threads(settings.threads)
    # A service's standard error is its log, one JSON object a line.
    transformers_logging.disable_progress_bar()
    model = ensure_model(settings.model, settings.cache)
    weights = load_weights(model.path, settings.dtype)
    tokenizer = AutoTokenizer.from_pretrained(str(model.path), local_files_only=True)
    length = settings.max_model_len or weights.max_positions
    if length > weights.max_positions:
        raise ConfigError(f"the model has {weights.max_positions} positions", "max_model_len")
    scheduler = Scheduler(
        Model(weights),
        settings.model_version,
        weights.ends,
        partial(text_stream, tokenizer.backend_tokenizer),
        Limits(
            max_batch=settings.max_batch,
            kv_bytes=settings.kv_cache_mb << 20,
            chunk_alone=settings.chunk_alone,
            chunk_beside_decodes=settings.chunk_beside_decodes,
        ),
    )
    scheduler.start()
    # The vocabulary is the network's: ids that the tokenizer doesn't know can be sampled and sent back.
    served = Served(settings.served_name or model.name, weights.vocab, length)
    return EngineHost(settings, model, served, tokenizer, scheduler)
