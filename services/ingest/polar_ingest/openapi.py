"""The OpenAPI 3.1 document, generated from the endpoint table and the pydantic models."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .endpoints import ENDPOINTS, Endpoint
from .views import ErrorView

__all__ = ["openapi"]

_REF = "#/components/schemas/{model}"
_MEANINGS = {
    200: "Done",
    202: "Accepted",
    400: "The request is wrong; `where` names the field",
    401: "A bearer token is required",
    404: "Not there",
    409: "The id is used with another body",
    413: "Too large; `where` names the field",
    429: "The queue is full; wait for Retry-After seconds",
    503: "The log doesn't answer or hasn't been read to its end; wait for Retry-After seconds",
}


def openapi() -> dict[str, Any]:
    """The document as a JSON value, the same for the same code."""
    bodies = sorted({m for e in ENDPOINTS for m in e.body}, key=lambda m: m.__name__)
    answers = sorted({e.answer for e in ENDPOINTS if e.answer is not None} | {ErrorView}, key=lambda m: m.__name__)
    wanted: list[tuple[type[BaseModel], Any]] = [(m, "validation") for m in bodies]
    wanted += [(m, "serialization") for m in answers]
    refs, definitions = models_json_schema(wanted, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polar ingest", "version": "1", "description": "Submit tasks, ask for their state, cancel."},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, refs: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": endpoint.name, "summary": endpoint.summary}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", endpoint.path)
    ]
    if endpoint.query_run:
        parameters.append({"name": "run", "in": "query", "schema": {"type": "string", "default": "default"}})
    if parameters:
        found["parameters"] = parameters
    if endpoint.body:
        schemas = [refs[(m, "validation")] for m in endpoint.body]
        schema = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
        found["requestBody"] = {"required": endpoint.body_required, "content": {"application/json": {"schema": schema}}}
    responses: dict[str, Any] = {str(endpoint.status): {"description": _MEANINGS[endpoint.status]}}
    if endpoint.answer is not None:
        schema = refs[(endpoint.answer, "serialization")]
        responses[str(endpoint.status)]["content"] = {"application/json": {"schema": schema}}
    for status in endpoint.errors:
        schema = refs[(ErrorView, "serialization")]
        responses[str(status)] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": schema}},
        }
    found["responses"] = responses
    found["security"] = [] if endpoint.open else [{"token": []}]
    return found
