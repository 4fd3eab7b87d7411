"""The HTTP contract in a few short words, for tests that look at single requests.

Not a client: no retries, no checks. `ok` fails a test on anything but success.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from anabranch import wire
from tests.serving import Served

PATH = "/anabranch/v1/generate"


def new_id() -> str:
    return secrets.token_hex(16)


def inherit(state: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "inherit", "id": state, **fields}


def artifact(state: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "artifact", "id": state, **fields}


def body(
    refs: Sequence[dict[str, Any]] = (), text: str | Sequence[int] | None = None, n: int = 0, **more: Any
) -> dict[str, Any]:
    """A request with one piece of text or tokens that generates `n` tokens, greedily and past any stop token."""
    pieces = [] if text is None else [{"text": text} if isinstance(text, str) else {"tokens": list(text)}]
    sampling = {"max_tokens": n, "temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
    return {"id": new_id(), "refs": list(refs), "input": pieces, "sampling": sampling, **more}


def send(served: Served, **fields: Any) -> httpx.Response:
    return served.post(PATH, **fields)


def ok(served: Served, *args: Any, **more: Any) -> wire.GenerateResponse:
    answer = send(served, **body(*args, **more))
    assert answer.status_code == 200, answer.text
    return wire.GenerateResponse.model_validate_json(answer.content)


def cancel(served: Served, state: str) -> httpx.Response:
    return served.post(f"/anabranch/v1/states/{state}/cancel")


def together(served: Served, bodies: Sequence[dict[str, Any]]) -> list[wire.GenerateResponse]:
    """All at the same time, as concurrent clients."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda one: send(served, **one), bodies))
    assert [answer.status_code for answer in answers] == [200] * len(bodies), [a.text for a in answers]
    return [wire.GenerateResponse.model_validate_json(answer.content) for answer in answers]


def error(answer: httpx.Response) -> wire.ErrorBody:
    assert answer.status_code >= 400, f"expected an error, got {answer.text}"
    found = wire.ErrorResponse.model_validate_json(answer.content).error
    assert answer.status_code == wire.HTTP_STATUS[found.code]
    return found
