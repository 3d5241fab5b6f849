"""Groups made by hand."""

from __future__ import annotations

import numpy as np

from polar_train import Group, Member, TrainTrace


def trace(session: str, number: int = 0, *, reward: float = 0.0, response: int = 3, mask: str = "") -> TrainTrace:
    mask = mask or "1" * response
    loss_mask = np.array([int(c) for c in mask], dtype=np.uint8)
    return TrainTrace(
        trace_id=f"{session}/{number}",
        session=session,
        number=number,
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.arange(10, 10 + len(mask), dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -0.5, 0.0).astype(np.float32),
        spans=(),
        status="complete",
        agent_role="main",
        action_tokens=int(loss_mask.sum()),
        policy_seq_min=0,
        policy_seq_max=0,
        reward=reward,
    )


def member(session: str, rewards: list[float], *, trainable: bool = True, reward: float | None = None) -> Member:
    traces = tuple(trace(session, n, reward=r) for n, r in enumerate(rewards)) if trainable else ()
    return Member(session, "passed", reward if reward is not None else (rewards or [0.0])[0], trainable, "", traces)


def group(*members: Member) -> Group:
    return Group("run", "live", "task", 1, "complete", len(members), len(members), members)
