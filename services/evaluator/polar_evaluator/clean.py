"""The clean copy in which an attempt is judged: made anew from the task, then the agent's patch, then our own files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from polar_common.errors import CommandFailed, ConfigError, EvaluationError, RuntimeFault, RuntimeUnavailable
from polar_common.task_spec import TaskSpec
from polar_runtime import Limits, Runtime, RuntimeSpec

from .settings import EvaluatorSettings

__all__ = ["clean_copy", "runtime_spec"]

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


@asynccontextmanager
async def clean_copy(runtime: Runtime, task: TaskSpec, files: bytes, patch: bytes) -> AsyncIterator[Runtime]:
    """`runtime`, started and filled; stopped and removed at the end of the block.

    Raises EvaluationError or RuntimeUnavailable where the copy can't be made, ConfigError where the task is at fault.
    """
    try:
        await _fill(runtime, task, files, patch)
        yield runtime
    finally:
        try:
            await runtime.stop()
        except RuntimeFault as error:
            # The reaper tries again; the verdict stands.
            _log.error("a clean copy couldn't be removed", label=runtime.spec.label, error=str(error))


async def _fill(runtime: Runtime, task: TaskSpec, files: bytes, patch: bytes) -> None:
    await runtime.start()
    if files:
        await runtime.upload(files)
    try:
        for step in (*task.runtime.prepare, *task.evaluator.prepare):
            await runtime.check(["/bin/sh", "-c", step.exec], timeout=step.timeout_s)
    except CommandFailed as error:
        raise EvaluationError(f"a prepare step failed in the clean copy: {error}") from error
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
