"""A GRPO trainer on a house's trace stream, as small as it goes: one update per closed group, on this machine's CPU.

    polar up --detach --setting POLAR_INGEST_OBEY_DEMAND=true
    python examples/trainer/grpo.py --run words --steps 40 &
    polar submit examples/trainer/tasks.yaml --run words

Each step: take a group, make its advantages, one clipped policy-gradient step, save weights with the stream's state,
offer the weights to the engine. Killed at any instant and started again it goes on from its last checkpoint: no group
is lost, none is trained twice. `demand` keeps admission, which obeys it, from running ahead of what is trained; so the
trainer comes first. Groups whose sessions all got the same reward teach nothing and are dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from polar_engine.models import ensure_model
from polar_train import Acceptance, Group, TraceStream, collate, group_advantages

CLIP, MOST_RATIO = 0.2, 5.0
KEPT = 3
"""Checkpoints: an engine may still be loading the one before the last."""
TAKEN = Acceptance(staleness=8, zero_variance="drop")


def loss_of(model: Any, group: Group) -> torch.Tensor:
    """Clipped surrogate over the tokens that were sampled; each session weighs the same, however long."""
    batch = collate(group.traces, group_advantages(group, normalise=True).by_trace, weighting="session")
    ids, attention = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)
    old, gain, weight = (torch.from_numpy(x)[:, 1:] for x in (batch.logprobs, batch.advantages, batch.weights))
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
    # Sampled at temperature 1 without truncation (what training tasks pin): the engine's log-probs are the model's.
    new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (new - old).exp().clamp(max=MOST_RATIO)
    return -(weight * torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)).sum()


def newest(out: Path) -> Path | None:
    return max(out.glob("step-*"), default=None)


def save(out: Path, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
    """Weights and the stream's state as one directory, there wholly or not at all. Older ones go."""
    draft, target = out / f".step-{state['step']:05}", out / f"step-{state['step']:05}"
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    torch.save({**state, "optimizer": optimizer.state_dict()}, draft / "trainer.pt")
    draft.rename(target)
    for old in sorted(out.glob("step-*"))[:-KEPT]:
        shutil.rmtree(old)
    return target


async def train(options: argparse.Namespace) -> None:
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    last = newest(out)
    base = ensure_model(options.model).path
    model = AutoModelForCausalLM.from_pretrained(last or base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    stream = await TraceStream.connect(trainer=options.run, run=options.run, accept=TAKEN)
    done, first = 0, 0
    if last is not None:
        checkpoint = torch.load(last / "trainer.pt", weights_only=True)
        optimizer.load_state_dict(checkpoint["optimizer"])
        stream.load_state_dict(checkpoint["stream"])
        done, first = checkpoint["step"], checkpoint["first"]
        await hand_over(stream, last, options, done, first)
    elif (others := await stream.newest_policy()) is not None:
        # Someone trained here before: the engine has other weights than those that we begin with.
        first = others.policy_seq + (others.version != version(options, 0))
        await hand_over(stream, base, options, done, first)
    await stream.demand(groups=2, staleness=1)
    while done < options.steps and (group := await stream.next(timeout=options.patience)) is not None:
        loss = loss_of(model, group)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stream.used([group], step=done + 1, policy_version=version(options, done), policy_seq=first + done)
        done += 1
        path = save(out, model, optimizer, {"step": done, "first": first, "stream": stream.state_dict()})
        await hand_over(stream, path, options, done, first)
        rewards = [m.reward for m in group.members if m.reward is not None]
        mean = sum(rewards) / max(1, len(rewards))
        print(f"step {done}: reward {mean:.2f} of {len(rewards)} sessions, loss {loss.item():+.4f}", flush=True)
    for reason, count in stream.dropped.items():
        print(f"{count} groups weren't trained on: {reason}")
    await stream.close()


def version(options: argparse.Namespace, step: int) -> str:
    return f"{options.run}-{step}"


async def hand_over(stream: TraceStream, path: Path, options: argparse.Namespace, step: int, first: int) -> None:
    """What follows a checkpoint: its groups are done with, its weights are the engine's. Harmless when repeated."""
    await stream.saved(stream.state_dict())
    await stream.publish(str(path), version=version(options, step), policy_seq=first + step, step=step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="the run whose groups are trained on; also the trainer's name")
    parser.add_argument("--model", default="smollm2-135m", help="what `polar up --model` was given")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="where checkpoints go; engines read them")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds without a group after which it ends")
    asyncio.run(train(parser.parse_args()))
