"""The trainer's side: closed groups as a stream, advantages, weights and batches. Needs no torch."""

from .advantages import Advantages, group_advantages, session_advantages
from .collate import Batch, collate, microbatches
from .groups import Group, Member, TrainTrace
from .stream import Acceptance, TraceStream
from .weights import token_weights

__all__ = [
    "Acceptance", "Advantages", "Batch", "Group", "Member", "TraceStream", "TrainTrace", "collate", "group_advantages",
    "microbatches", "session_advantages", "token_weights",
]  # fmt: skip
