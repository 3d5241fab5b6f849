"""What ingest answers, as data: the routes and the OpenAPI document are both made from this table."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from polar_common.task_spec import TaskSpec

from .intake import TaskBatch
from .views import CancelView, RunView, SessionView, SubmittedView, TaskView

__all__ = ["ENDPOINTS", "CancelBody", "Endpoint"]


class CancelBody(BaseModel):
    """May be left out."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`name` is the operation's id and the method of `Api` that answers."""

    name: str
    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None = None
    status: int = 200
    body: tuple[type[BaseModel], ...] = ()
    body_required: bool = False
    query_run: bool = False
    errors: tuple[int, ...] = ()
    open: bool = False
    """Answered without a token."""


ENDPOINTS = (
    Endpoint(
        "submit_tasks", "POST", "/v1/tasks",
        "Submit one task, or several of a run. All are checked before any is taken; the same body again gets the same "
        "answer, another body under a known id 409.",
        SubmittedView, 202, (TaskSpec, TaskBatch), True, True, (400, 401, 409, 413, 429, 503),
    ),
    Endpoint(
        "get_task", "GET", "/v1/tasks/{task}",
        "A task with its sessions' phases, outcomes and rewards; by Polar's id, or by the submitted one within `run`.",
        TaskView, query_run=True, errors=(401, 404, 503),
    ),
    Endpoint(
        "cancel_task", "POST", "/v1/tasks/{task}/cancel", "Ask all sessions of a task to end.",
        CancelView, body=(CancelBody,), query_run=True, errors=(400, 401, 404, 503),
    ),
    Endpoint(
        "get_session", "GET", "/v1/sessions/{session}",
        "A session: every attempt with its times, exit and cause, its evaluation, completions and builds.",
        SessionView, errors=(401, 404, 503),
    ),
    Endpoint(
        "cancel_session", "POST", "/v1/sessions/{session}/cancel", "Ask a session to end.",
        CancelView, body=(CancelBody,), errors=(400, 401, 404, 503),
    ),
    Endpoint("get_run", "GET", "/v1/runs/{run}", "Counts of a run.", RunView, errors=(401, 404, 503)),
    Endpoint(
        "cancel_run", "POST", "/v1/runs/{run}/cancel", "Ask all sessions of a run to end.",
        CancelView, body=(CancelBody,), errors=(400, 401, 404, 503),
    ),
    Endpoint("health", "GET", "/health", "The process answers; `full`: the log has no room for new tasks.", open=True),
    Endpoint("ready", "GET", "/ready", "The log is read to its end; tasks are taken.", errors=(503,), open=True),
    Endpoint("metrics", "GET", "/metrics", "Prometheus metrics.", errors=(401,)),
    Endpoint("openapi_document", "GET", "/openapi.json", "This document.", errors=(401,)),
)  # fmt: skip
