"""The OpenAPI description of the routes under /anabranch/v1, made from the wire contract.

It serves nothing: `engine/routes.py` does, and a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from anabranch import wire

PREFIX = "/anabranch/v1"
_REF = "#/components/schemas/{model}"


class Route(NamedTuple):
    """`answer` is None where the answer has no body (204)."""

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None
    answer: type[BaseModel] | None
    refusals: Sequence[int] = ()


ROUTES = (
    Route(
        "post",
        "/generate",
        "Make a state: references, input, sampling. With `stream`, server-sent events.",
        wire.GenerateRequest,
        wire.GenerateResponse,
        (404, 409, 410, 413, 422, 429, 503),
    ),
    Route(
        "post",
        "/explain",
        "Intervals, positions and start of a state, or of a context that was never run.",
        wire.ExplainRequest,
        wire.Explanation,
        (404, 409, 410, 413),
    ),
    Route("get", "/states", "All states of the caller.", None, wire.StateList),
    Route("post", "/states/renew", "Begin the leases of states anew.", wire.RenewRequest, wire.Renewal, (413,)),
    Route("post", "/states/release", "Give states up.", wire.ReleaseRequest, wire.Released, (413,)),
    Route("get", "/states/{state_id}", "One state.", None, wire.StateInfo, (404, 410)),
    Route("delete", "/states/{state_id}", "Give a state up.", None, None, (404, 410)),
    Route(
        "post",
        "/states/{state_id}/renew",
        "Begin the lease of a state anew.",
        wire.RenewOneRequest,
        wire.StateInfo,
        (404, 410, 413),
    ),
    Route("post", "/states/{state_id}/cancel", "End a generation that waits or runs.", None, None, (404, 410)),
    Route("get", "/stats", "Counts of states and of KV tokens.", None, wire.Stats),
    Route("get", "/health", "The server's versions, once it answers.", None, wire.Health),
)


def description() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    models = {model for route in ROUTES for model in (route.body, route.answer) if model is not None}
    named = [(model, "validation") for model in sorted({*models, wire.ErrorResponse}, key=lambda one: one.__name__)]
    _, schemas = models_json_schema(named, ref_template=_REF)  # pyright: ignore[reportArgumentType]
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(PREFIX + route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "anabranch", "version": version("anabranch")},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    errors = {str(status): _content(wire.ErrorResponse) for status in sorted({400, 401, *route.refusals})}
    good = {"204": {"description": "done"}} if route.answer is None else {"200": _content(route.answer)}
    operation: dict[str, Any] = {"summary": route.summary, "responses": good | errors}
    if route.body is not None:
        operation["requestBody"] = {**_content(route.body), "required": route.body is not wire.RenewOneRequest}
        del operation["requestBody"]["description"]
    if "{state_id}" in route.path:
        operation["parameters"] = [{"name": "state_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _content(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    if model is wire.GenerateResponse:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": (model.__doc__ or model.__name__).strip().split("\n")[0], "content": content}
