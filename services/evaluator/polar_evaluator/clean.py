"""The clean copy in which an attempt is judged: made anew from the task, then the agent's patch, then our own files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from polar_common.blobs import Blobs
from polar_common.errors import CommandFailed, ConfigError, EvaluationError, RuntimeFault, RuntimeUnavailable
from polar_common.events import SessionQueued
from polar_common.ids import new_id
from polar_common.task_spec import TaskSpec
from polar_runtime import Limits, Runtime, RuntimeSpec

from .settings import EvaluatorSettings

__all__ = ["Copies", "runtime_spec"]

_log = structlog.get_logger(__name__)


def runtime_spec(settings: EvaluatorSettings, task: TaskSpec, label: str) -> RuntimeSpec:
    """The same kind, image, environment and limits as the agent's, but no model proxy."""
    choice = task.runtime
    return RuntimeSpec(
        kind=choice.kind,
        label=label,
        root=settings.root,
        image=choice.image,
        env=choice.env,
        limits=Limits(
            memory_mb=choice.memory_mb or settings.evaluator_memory_mb,
            pids=choice.pids or settings.evaluator_pids,
            cpus=choice.cpus or 0.0,
            disk_mb=choice.disk_mb or settings.evaluator_disk_mb,
            log_mb=settings.evaluator_log_mb,
        ),
        network="host" if choice.network else "none",
        isolation=settings.evaluator_isolation,
    )


class Copies:
    """Makes and removes the clean copies of one evaluator; `live` holds the labels of those that exist."""

    def __init__(self, settings: EvaluatorSettings, blobs: Blobs, make: Callable[[RuntimeSpec], Runtime]) -> None:
        self._settings = settings
        self._blobs = blobs
        self._make = make
        self.live: set[str] = set()

    async def prepared(self, queued: SessionQueued) -> Runtime:
        """A started copy with the task's files after all prepare steps; to be given to `clean` or `discard`.

        Raises EvaluationError, RuntimeUnavailable or BlobError where it can't be made, ConfigError where the task is
        at fault.
        """
        label = f"{queued.session}.{queued.attempt}.{new_id()[:8]}"
        runtime = self._make(runtime_spec(self._settings, queued.spec, label))
        self.live.add(label)
        try:
            await runtime.start()
            if queued.files is not None:
                await runtime.upload(await self._blobs.get(queued.files))
            for step in (*queued.spec.runtime.prepare, *queued.spec.evaluator.prepare):
                await runtime.check(["/bin/sh", "-c", step.exec], timeout=step.timeout_s)
        except CommandFailed as error:
            await self.discard(runtime)
            raise EvaluationError(f"a prepare step failed in the clean copy: {error}") from error
        except BaseException:
            await self.discard(runtime)
            raise
        return runtime

    @asynccontextmanager
    async def clean(self, queued: SessionQueued, patch: bytes, warm: Runtime | None = None) -> AsyncIterator[Runtime]:
        """`warm`, or a new copy, with the patch and the evaluator's files; removed at the end of the block."""
        runtime = warm or await self.prepared(queued)
        try:
            await _fill(runtime, queued.spec, patch)
            yield runtime
        finally:
            await self.discard(runtime)

    async def discard(self, runtime: Runtime) -> None:
        """Stop and remove."""
        try:
            await runtime.stop()
        except RuntimeFault as error:
            # The reaper tries again; the verdict stands.
            _log.error("a clean copy couldn't be removed", label=runtime.spec.label, error=str(error))
        finally:
            self.live.discard(runtime.spec.label)


async def _fill(runtime: Runtime, task: TaskSpec, patch: bytes) -> None:
    try:
        await runtime.apply_patch(patch)
    except CommandFailed as error:
        # The patch was made against the same files and steps, so these aren't the same any more.
        raise EvaluationError(f"the patch doesn't fit the clean copy: {error}") from error
    try:
        await runtime.upload({path: text.encode() for path, text in task.evaluator.files.items()})
    except RuntimeUnavailable:
        raise
    except RuntimeFault as error:
        raise ConfigError(str(error), "evaluator.files") from error
