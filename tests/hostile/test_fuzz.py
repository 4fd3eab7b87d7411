"""Requests made from our OpenAPI description, right and wrong ones, many at a time, against the real server.

Each kind of request is drawn from fixed seeds, so a failure repeats; some of the ids in them are made real.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from anabranch_server.openapi import PREFIX, ROUTES, description
from tests.engine.api import PATH, body, new_id
from tests.hostile import judging
from tests.serving import Served

pytestmark = pytest.mark.engine

SCALE = float(os.environ.get("FUZZ_SCALE", "1"))
TOGETHER = 8
"""Requests that are sent at the same time."""
BATCHES = {"/generate": 66, "/explain": 24}
"""Of `TOGETHER` requests, for each mode; of the other routes ten."""
SCHEMA = schemathesis.openapi.from_dict(description())
ID = re.compile(r"[0-9a-f]{32}")
UNCHECKED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
sent: Counter[str] = Counter()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=judging.DEADLINE, limits=httpx.Limits(max_connections=TOGETHER)) as client:
        yield client


def operations() -> list[Any]:
    """Every route with right requests, and with wrong ones where a request has a body."""
    return [
        pytest.param(route.method, route.path, mode, id=f"{mode.value}-{route.method}-{route.path}")
        for route in ROUTES
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or route.body is not None
    ]


@pytest.mark.parametrize(("method", "path", "mode"), operations())
def test_whatever_is_sent_is_answered_by_the_contract(
    besieged: Served, client: httpx.Client, method: str, path: str, mode: GenerationMode
):
    operation = SCHEMA[PREFIX + path][method.upper()]
    known = [_state(client, besieged) for _ in range(4)]
    count = max(1, int(BATCHES.get(path, 10) * SCALE))

    @seed(0)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=UNCHECKED,
    )
    @given(st.lists(operation.as_strategy(generation_mode=mode), min_size=TOGETHER, max_size=TOGETHER), st.data())
    def batch(drawn: list[Case], data: st.DataObject) -> None:
        wanted = [_request(case, known, data) for case in drawn]
        answers = pool.map(lambda one: client.request(method, besieged.url + one[0], **one[1]), wanted)
        for (where, _), answer in zip(wanted, answers, strict=True):
            sent[f"{path} {answer.status_code}"] += 1
            meant = where.count("/") == (PREFIX + path).count("/") and "%2F" not in where
            judging.ours(answer, *((method, PREFIX + path) if meant else ()))

    with ThreadPoolExecutor(TOGETHER) as pool:
        batch()


def test_that_was_enough():
    """Runs after the above: at least 2,000 requests, and of every kind of answer many."""
    if SCALE < 1 or not sent:
        pytest.skip("not all of it ran")
    print("\n" + "\n".join(f"{count:5d} {kind}" for kind, count in sorted(sent.items())))
    assert sum(sent.values()) >= 2000, sent
    assert sent["/generate 200"] > 50 and sent["/generate 400"] > 200, sent


def _request(case: Case, known: list[str], data: st.DataObject) -> tuple[str, dict[str, Any]]:
    """A drawn case as the path and the arguments of a request. Every second id that looks real is made real, and every
    second generate is made short."""
    drawn = case.as_transport_kwargs(base_url="http://none")
    path = httpx.URL(drawn["url"]).raw_path.decode()
    if "{state_id}" in case.operation.path and data.draw(st.booleans()):
        path = case.operation.path.replace("{state_id}", data.draw(st.sampled_from(known)))
    headers = {name: value for name, value in (drawn.get("headers") or {}).items() if name == "Content-Type"}
    if "json" in drawn:
        fields = _made_real(drawn["json"], known, data)
        if path == PATH and isinstance(fields, dict) and data.draw(st.booleans()):
            fields = _runnable(fields)
        return path, {"headers": headers, "json": fields}
    text = drawn.get("data")
    return path, {"headers": headers, "content": text if isinstance(text, bytes | str | None) else repr(text)}


def _runnable(fields: dict[str, Any]) -> dict[str, Any]:
    """The same request with what a drawn one hardly ever has right: an input, and lengths and a placement that fit."""
    refs = fields.get("refs")
    based = (
        any(isinstance(one, dict) and one.get("base") is not None for one in refs) if isinstance(refs, list) else False
    )
    sampling = fields["sampling"] if isinstance(fields.get("sampling"), dict) else {}
    short = {"max_tokens": 3, "min_tokens": 0, "stop_token_ids": [], "regex": None, "json_schema": None, "ebnf": None}
    return {
        **fields,
        "id": new_id(),
        "input": [{"text": "x"}],
        "generated": None,
        "again": False,
        "place": fields.get("place") if based else None,
        "sampling": {**sampling, **short},
    }


def _made_real(value: Any, known: list[str], data: st.DataObject) -> Any:
    if isinstance(value, dict):
        new = "input" in value or "sampling" in value  # its id is that of a state to be made
        return {name: one if new and name == "id" else _made_real(one, known, data) for name, one in value.items()}
    if isinstance(value, list):
        return [*(_made_real(one, known, data) for one in value[:64]), *value[64:]]
    if isinstance(value, str) and ID.fullmatch(value) and data.draw(st.booleans()):
        return data.draw(st.sampled_from(known))
    return value


def _state(client: httpx.Client, served: Served) -> str:
    answer = client.post(served.url + PATH, json=body(text="known", n=3))
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]
