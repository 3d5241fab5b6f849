"""From a request body to facts: validation that names the field, ids, the files' archive, the batch of a task.

Pure but for nothing: storing and publishing is done by `handlers.py`.
"""

from __future__ import annotations

import hashlib
import io
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from polar_common.built_in import check_arguments, check_names
from polar_common.errors import ConfigError, RequestError
from polar_common.events import Event, SessionAccepted, TaskAccepted
from polar_common.ids import sessions_of, task_id
from polar_common.packing import BlobRef
from polar_common.task_spec import TaskSpec

__all__ = ["DEFAULT_RUN", "MAX_SAMPLES", "Submission", "TaskBatch", "pack_files", "parse", "task_events"]

DEFAULT_RUN = "default"
MAX_SAMPLES = 499
"""A task and its sessions are one atomic batch of at most 500 events."""
_MAX_SECONDS = 10 * 365 * 86_400.0


class TaskBatch(BaseModel):
    """Several tasks of one run."""

    model_config = ConfigDict(extra="forbid")

    run: str = DEFAULT_RUN
    tasks: list[TaskSpec]


@dataclass(frozen=True, slots=True)
class Submission:
    """One valid task. `where` names it in messages about the request."""

    where: str
    run: str
    spec: TaskSpec
    task: str
    spec_hash: str


def parse(body: bytes, *, run: str, segment: str, work_classes: Sequence[str], spec_limit: int) -> list[Submission]:
    """All tasks of a request, each checked. `run` is used where the body names none.

    Raises RequestError whose `path` names the offending field.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error}", path="body") from error
    if not isinstance(value, dict):
        raise RequestError("must be a task or {run, tasks}", path="body")
    if "tasks" in value:
        run, found = _many(value, run)
    else:
        found = [("", _spec(value, ""))]
    if not 1 <= len(run) <= 512:
        raise RequestError("must have 1 to 512 characters", path="run")
    checked = [_checked(spec, where, run, segment, work_classes, spec_limit) for where, spec in found]
    _no_conflicts(checked)
    return checked


def _many(value: dict[str, Any], run: str) -> tuple[str, list[tuple[str, TaskSpec]]]:
    for key in value:
        if key not in ("run", "tasks"):
            raise RequestError("unknown field", path=key)
    run = value.get("run", run)
    if not isinstance(run, str):
        raise RequestError("must be a string", path="run")
    tasks = value["tasks"]
    if not isinstance(tasks, list) or not tasks:
        raise RequestError("must be a list of at least one task", path="tasks")
    return run, [(f"tasks[{i}]", _spec(task, f"tasks[{i}]")) for i, task in enumerate(tasks)]


def _spec(value: Any, where: str) -> TaskSpec:
    try:
        return TaskSpec.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        unknown = first["type"] == "extra_forbidden"
        message = "unknown field" if unknown else first["msg"]
        if (more := error.error_count() - 1) > 0:
            message += f" (and {more} more)"
        raise RequestError(message, path=_path(where, first["loc"])) from error


def _path(where: str, loc: tuple[int | str, ...]) -> str:
    text = where
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "body"


def _checked(
    spec: TaskSpec, where: str, run: str, segment: str, work_classes: Sequence[str], spec_limit: int
) -> Submission:
    """What the model alone doesn't say."""
    if spec.samples > MAX_SAMPLES:
        raise RequestError(f"at most {MAX_SAMPLES}", path=_path(where, ("samples",)))
    if spec.runtime.queue_class not in work_classes:
        field = "work_class" if spec.runtime.work_class else "kind"
        raise RequestError(
            f"no gateway serves {spec.runtime.queue_class!r}; there are: {', '.join(work_classes)}",
            path=_path(where, ("runtime", field)),
        )
    for name, value in spec.limits:
        if isinstance(value, float) and not (math.isfinite(value) and value <= _MAX_SECONDS):
            raise RequestError("at most ten years", path=_path(where, ("limits", name)))
    try:
        check_names(spec)
        check_arguments(spec)
    except ConfigError as error:
        message = str(error).removeprefix(f"{error.where}: ")
        raise RequestError(message, path=_path(where, (error.where,))) from error
    if spec.callback and (problem := _bad_url(spec.callback)):
        raise RequestError(problem, path=_path(where, ("callback",)))
    _check_files(spec.files, where)
    lean = spec.model_copy(update={"files": {}})
    sizes = {name: len(orjson.dumps(value)) for name, value in lean.model_dump(mode="json").items()}
    if sum(sizes.values()) > spec_limit:
        largest = max(sizes, key=lambda n: sizes[n])
        raise RequestError(
            f"the task without its files has {sum(sizes.values())} bytes, more than {spec_limit}; "
            f"{largest} alone has {sizes[largest]}",
            413,
            _path(where, (largest,)),
        )
    # Defaults are left out, so that a field that a later version adds doesn't make an old task look changed.
    said = orjson.dumps(spec.model_dump(mode="json", exclude_defaults=True), option=orjson.OPT_SORT_KEYS)
    return Submission(where, run, spec, task_id(segment, run, spec.id), hashlib.sha256(said).hexdigest())


def _bad_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"not a URL: {error}"
    if parts.scheme not in ("http", "https"):
        return "must be an http or https URL"
    if not parts.hostname or len(url) > 2048:
        return "must name a host, in at most 2,048 characters"
    return "must not contain a user name or password" if parts.username or parts.password else ""


def _check_files(files: Mapping[str, str], where: str) -> None:
    folders = {"/".join(parts[:i]) for parts in (n.split("/") for n in files) for i in range(1, len(parts))}
    for name in files:
        parts = name.split("/")
        path = f"{_path(where, ('files',))}[{name[:80]!r}]"
        if any(p in ("", ".", "..") for p in parts) or any(len(p.encode()) > 255 for p in parts):
            raise RequestError("must be a plain relative path, each part of at most 255 bytes", path=path)
        if name in folders:
            raise RequestError("is a file and a folder at once", path=path)


def _no_conflicts(found: Sequence[Submission]) -> None:
    seen: dict[str, Submission] = {}
    for one in found:
        other = seen.setdefault(one.task, one)
        if other.spec_hash != one.spec_hash:
            raise RequestError(f"the same id as {other.where}, with another body", 409, _path(one.where, ("id",)))


def pack_files(files: Mapping[str, str]) -> bytes:
    """A tar of the files that is the same for the same files: sorted, no times, no owners.

    What starts with `#!` is executable.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            body = files[name].encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            entry.mode = 0o755 if body.startswith(b"#!") else 0o644
            tar.addfile(entry, io.BytesIO(body))
    return out.getvalue()


def task_events(submission: Submission, files: BlobRef | None) -> list[Event]:
    """The batch: `task.accepted`, then each session's `accepted`."""
    spec, task, run = submission.spec, submission.task, submission.run
    sessions = sessions_of(task, spec.samples)
    accepted = TaskAccepted(
        run=run,
        task=task,
        spec=spec.model_copy(update={"files": {}}),
        spec_hash=submission.spec_hash,
        files=files,
        sessions=tuple(sessions),
    )
    return [
        accepted,
        *(
            SessionAccepted(
                run=run,
                task=task,
                session=session,
                attempt=0,
                index=index,
                work_class=spec.runtime.queue_class,
                causation=accepted.event_id,
            )
            for index, session in enumerate(sessions)
        ),
    ]
