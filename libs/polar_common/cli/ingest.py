"""The HTTP client of ingest."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import httpx

from polar_common.errors import ConfigError, PolarError
from polar_common.house.layout import Endpoint
from polar_common.task_spec import TaskSpec

__all__ = ["Ingest"]

_CHUNK = 50


class Ingest:
    """The HTTP client of ingest."""

    def __init__(self, where: Endpoint) -> None:
        if not where.ingest:
            raise ConfigError("a remote house's tasks and sessions are reached by POLAR_URL", "url")
        self._client = httpx.Client(base_url=where.ingest, headers=where.headers, timeout=60)

    def get(self, path: str, **params: str) -> dict[str, Any]:
        return self._body(self._client.get(path, params=params))

    def post(self, path: str, body: object) -> dict[str, Any]:
        return self._body(self._client.post(path, json=body))

    def find(self, path: str) -> dict[str, Any] | None:
        """None where ingest knows no such thing."""
        answer = self._client.get(path)
        return None if answer.status_code == 404 else self._body(answer)

    def tasks_of(self, run: str) -> int:
        """How many tasks a run has; 0 where there is no such run."""
        found = self.find(f"/v1/runs/{quote(run, safe='')}")
        return 0 if found is None else int(found["tasks"])

    def submit(self, run: str, tasks: list[TaskSpec], wait_s: float = 600) -> list[dict[str, Any]]:
        """Hand in all tasks; a full house is asked again after the time it names."""
        done: list[dict[str, Any]] = []
        deadline = time.monotonic() + wait_s
        for start in range(0, len(tasks), _CHUNK):
            body = {"run": run, "tasks": [t.model_dump(mode="json") for t in tasks[start : start + _CHUNK]]}
            while True:
                answer = self._client.post("/v1/tasks", json=body)
                if answer.status_code != 429 or time.monotonic() > deadline:
                    break
                time.sleep(min(30.0, float(answer.headers.get("retry-after", "1"))))
            done += self._body(answer)["tasks"]
        return done

    @staticmethod
    def _body(answer: httpx.Response) -> dict[str, Any]:
        try:
            body: dict[str, Any] = answer.json()
        except ValueError as error:
            raise PolarError(f"{answer.request.url}: {answer.status_code} {answer.text[:200]}") from error
        if answer.is_success:
            return body
        told = body.get("error", {})
        raise ConfigError(f"{told.get('message', answer.text)} ({answer.status_code})", str(told.get("where", "")))
