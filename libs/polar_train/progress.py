"""How far a trainer is, as values that go into its checkpoint, and the durable consumer that follows it.

`floor`: every closing up to this stream sequence is settled; `done`: settled ones above it. Steps stay in the state
until their `trainer.consumed` is published, so that a crash between saving and publishing loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nats.js.api import DeliverPolicy
from nats.js.errors import NotFoundError

from polar_common import subjects
from polar_common.bus import Bus
from polar_common.errors import ConfigError
from polar_common.ids import new_id
from polar_common.topology import ConsumerSpec

__all__ = ["Progress", "Step", "open_consumer"]

_VERSION = 1
_HOLDER = "polar-holder"


@dataclass(frozen=True, slots=True)
class Step:
    """What one update used. `epoch` counts the trainer's returns to an older checkpoint."""

    step: int
    epoch: int
    policy_version: str
    policy_seq: int
    sequences: tuple[int, ...]
    tasks: tuple[str, ...]
    traces: tuple[tuple[str, str, int], ...]
    build: str


class Progress:
    """Settled closings of one trainer's stream. What a saved checkpoint covers is `saved`."""

    def __init__(self, trainer: str, run: str | None, build: str | None) -> None:
        self.trainer = trainer
        self.epoch = 0
        self.floor = 0
        self.last_step = -1
        self.holder, self.opened = new_id(), False
        """Who reads, as its consumer names it, and whether it has had that consumer."""
        self._run, self._build = run, build
        self._open: set[int] = set()
        """Delivered, neither used nor dropped."""
        self._done: set[int] = set()
        self._saved: set[int] = set()
        self._seen = 0
        self._steps: dict[int, Step] = {}

    def arrived(self, sequence: int) -> bool:
        """Note a delivered closing; False if it is settled already."""
        self._seen = max(self._seen, sequence)
        if sequence <= self.floor or sequence in self._done:
            return False
        self._open.add(sequence)
        return True

    def saved(self, sequence: int) -> bool:
        """Whether a saved checkpoint covers the closing."""
        return sequence <= self.floor or sequence in self._saved

    def drop(self, sequence: int) -> None:
        self._open.discard(sequence)
        self._done.add(sequence)

    def add(self, step: Step) -> None:
        """Raises ConfigError if the step isn't newer, or one of its groups was settled before."""
        if step.step <= self.last_step:
            raise ConfigError(f"step {step.step} isn't after {self.last_step}", "step")
        for sequence, task in zip(step.sequences, step.tasks, strict=True):
            if sequence not in self._open:
                raise ConfigError(f"{task} isn't waiting to be used: each group is used once", "groups")
        for sequence in step.sequences:
            self.drop(sequence)
        self._steps[step.step] = step
        self.last_step = step.step

    def state(self) -> dict[str, Any]:
        floor = min(self._open) - 1 if self._open else max(self._seen, self.floor)
        return {
            "version": _VERSION,
            "trainer": self.trainer,
            "run": self._run,
            "build": self._build,
            "epoch": self.epoch,
            "last_step": self.last_step,
            "floor": floor,
            "done": sorted(s for s in self._done if s > floor),
            "steps": [asdict(s) for s in self._steps.values()],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Raises ConfigError for the state of another trainer, run, build or format."""
        for key, mine in (
            ("version", _VERSION),
            ("trainer", self.trainer),
            ("run", self._run),
            ("build", self._build),
        ):
            if state.get(key) != mine:
                raise ConfigError(f"the state says {state.get(key)!r}, the stream {mine!r}", f"state.{key}")
        self.epoch, self.last_step = int(state["epoch"]), int(state["last_step"])
        self.floor = self._seen = int(state["floor"])
        self._done = {int(s) for s in state["done"]}
        self._saved = set(self._done)
        self._open = set()
        self._steps = {s.step: s for s in _steps(state["steps"])}

    def unpublished(self, state: dict[str, Any]) -> list[Step]:
        """Steps of a saved state that haven't been told to the log."""
        return [s for s in _steps(state["steps"]) if s.step in self._steps]

    def published(self, step: Step) -> None:
        self._steps.pop(step.step, None)

    def settle(self, state: dict[str, Any]) -> list[int]:
        """Sequences that a saved state covers and that may be acknowledged now."""
        floor = int(state["floor"])
        covered = sorted({int(s) for s in state["done"]} | {s for s in self._done if s <= floor})
        self.floor = max(self.floor, floor)
        self._done = {s for s in self._done if s > self.floor}
        self._saved = {s for s in self._saved | set(covered) if s > self.floor}
        return covered


def _steps(values: Iterable[dict[str, Any]]) -> list[Step]:
    return [
        Step(
            int(v["step"]),
            int(v["epoch"]),
            str(v["policy_version"]),
            int(v["policy_seq"]),
            tuple(v["sequences"]),
            tuple(v["tasks"]),
            tuple((t[0], t[1], int(t[2])) for t in v["traces"]),
            str(v["build"]),
        )
        for v in values
    ]


async def open_consumer(bus: Bus, spec: ConsumerSpec, progress: Progress, segment: str) -> None:
    """Make the durable consumer stand at the checkpoint: anew behind its floor.

    A trainer takes it from its predecessor, and opens it again if nobody has taken it since: raises ConfigError where
    somebody has.

    Steps that the log knows and the checkpoint doesn't mean a return to an older one: a new epoch begins, so that their
    numbers can be used again.
    """
    known = await bus.last(subjects.trainer(segment, progress.trainer, "*", "*", "consumed"))
    if known is not None:
        epoch, step = (int(t) for t in known.subject.split(".")[5:7])
        if epoch > progress.epoch or step > progress.last_step:
            progress.epoch = epoch + 1
    try:
        found = await bus.js.consumer_info(spec.stream, spec.durable)
        if progress.opened and (found.config.metadata or {}).get(_HOLDER) != progress.holder:
            raise ConfigError(f"another trainer runs as {progress.trainer!r}: give each a name of its own", "trainer")
        await bus.js.delete_consumer(spec.stream, spec.durable)
    except NotFoundError:
        pass
    config = spec.config()
    config.metadata = {_HOLDER: progress.holder}
    if progress.floor:
        config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, progress.floor + 1
    await bus.js.add_consumer(spec.stream, config)
    progress.opened = True
