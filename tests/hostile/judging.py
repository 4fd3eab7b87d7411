"""Whether an answer to a hostile request is one that the contract allows.

`ours`: of the routes under /anabranch/v1. `theirs`: of SGLang's endpoints, whose error bodies are SGLang's.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import jsonschema_rs

from anabranch import wire
from anabranch_server.openapi import description

DEADLINE = 60.0
"""Seconds for any answer, the slowest grammar's included."""


def ours(answer: httpx.Response, method: str | None = None, path: str | None = None) -> None:
    """`method` and `path`, as the description names it: its answers are checked too."""
    told = f"{answer.request.method} {answer.request.url} -> {answer.status_code}: {answer.text[:2000]}"
    if answer.status_code >= 400:
        error = wire.ErrorResponse.model_validate_json(answer.content).error
        assert wire.HTTP_STATUS[error.code] == answer.status_code, told
        assert error.code != "internal", told
        assert error.message, told
        assert (answer.headers.get("retry-after") is not None) == (answer.status_code in (429, 503)), told
    if path is not None and method is not None:
        responses = description()["paths"][path][method.lower()]["responses"]
        assert str(answer.status_code) in responses, f"the description does not know of this: {told}"
        described = responses[str(answer.status_code)].get("content")
        if described is None:
            assert not answer.content, told
            return
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in described, told
        if kind == "application/json":
            fault = next(_validator(json.dumps(described[kind]["schema"])).iter_errors(answer.json()), None)
            assert fault is None, f"{fault}: {told}"
        else:
            events(answer.text)


def theirs(answer: httpx.Response) -> None:
    told = f"{answer.request.method} {answer.request.url} -> {answer.status_code}: {answer.text[:2000]}"
    assert answer.status_code < 500 or (answer.status_code == 503 and "pool_exhausted" in answer.text), told
    assert '"internal"' not in answer.text and "internal:" not in answer.text, told
    answer.json() if not answer.headers.get("content-type", "").startswith("text/event-stream") else None


def events(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream: deltas, and then one final or one error that is not `internal`."""
    found = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
    assert [one["type"] for one in found[:-1]] == ["delta"] * (len(found) - 1), text
    assert found[-1]["type"] in ("final", "error"), text
    if found[-1]["type"] == "error":
        assert wire.ErrorEvent.model_validate(found[-1]).error.code != "internal", text
    else:
        wire.FinalEvent.model_validate(found[-1])
    return found


@cache
def _validator(schema: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for({**json.loads(schema), "components": description()["components"]})
