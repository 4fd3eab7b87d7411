"""Bad input over HTTP: the right typed error, before anything runs, and a server that keeps serving."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from anabranch import wire
from tests.engine.api import PATH, artifact, body, error, inherit, new_id, ok, send
from tests.serving import Served

pytestmark = pytest.mark.engine

HUGE = 2**31


@pytest.fixture
def state(stepped: Served) -> str:
    """A state with 6 input and 2 generated tokens."""
    return ok(stepped, text=[300, 301, 302, 303, 304, 305], n=2).id


def refused(served: Served, code: wire.ErrorCode, **request: Any) -> wire.ErrorBody:
    before = served.stats()
    found = error(send(served, **request))
    assert found.code == code, found
    assert found.message
    after = served.stats()
    assert (after["states"], after["held_tokens"]) == (before["states"], before["held_tokens"])
    return found


def test_unknown_state(stepped: Served):
    assert refused(stepped, "state_not_found", **body([inherit(new_id())], "x", 1)).hint


def test_released_state(stepped: Served, state: str):
    stepped.delete(f"/anabranch/v1/states/{state}")
    refused(stepped, "state_released", **body([inherit(state)], "x", 1))
    assert error(stepped.delete(f"/anabranch/v1/states/{state}")).code == "state_released"


def test_foreign_id_of_a_plain_request(stepped: Served):
    plain = stepped.post("/generate", text="Hello", sampling_params={"max_new_tokens": 1}).json()["meta_info"]["id"]
    refused(stepped, "state_not_found", **body([inherit(plain)], "x", 1))


def test_duplicate_id(stepped: Served, state: str):
    refused(stepped, "invalid_request", **{**body(text="x", n=1), "id": state})
    assert stepped.get(f"/anabranch/v1/states/{state}").json()["generated_tokens"] == 2


def test_the_id_of_a_running_state_disturbs_nobody(stepped: Served):
    request = body(text="x", n=40)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, stepped, **request)
        while stepped.get(f"/anabranch/v1/states/{request['id']}").status_code != 200:
            assert not first.done()
        assert error(send(stepped, **{**request, "input": [{"text": "y"}]})).code == "invalid_request"
        again = send(stepped, **request)
        assert len(first.result().json()["tokens"]) == 40
        assert again.json() == first.result().json(), "the same request joins the first"


def test_id_of_a_released_state_is_not_used_again(stepped: Served, state: str):
    stepped.delete(f"/anabranch/v1/states/{state}")
    refused(stepped, "state_released", **{**body(text="x", n=1), "id": state})


@pytest.mark.parametrize(
    "name", ["", "x", "../../etc/passwd", "A" * 32, "a" * 33, "\u0661" * 32, "a" * 31 + "\n", None]
)
def test_hostile_ids(stepped: Served, name: Any):
    """sglang#24638: an id is 32 hexadecimal digits and nothing else."""
    refused(stepped, "invalid_request", **{**body(text="x", n=1), "id": name})
    refused(stepped, "invalid_request", **body([inherit(name)], "x", 1))


@pytest.mark.parametrize(
    "reference",
    [
        lambda s: artifact(s, span=[0, 9]),
        lambda s: artifact(s, span=[5, 3]),
        lambda s: artifact(s, span=[-1, 3]),
        lambda s: artifact(s, span=[0, HUGE]),
        lambda s: artifact(s, span=[0.5, 3]),
        lambda s: artifact(s, span=[1]),
        lambda s: artifact(s, upto=3),
        lambda s: inherit(s, upto=9),
        lambda s: inherit(s, upto=-1),
        lambda s: inherit(s, span=[0, 3]),
        lambda s: inherit(s, base=3),
        lambda s: {"kind": "copy", "id": s},
        lambda s: {"id": s},
    ],
    ids=lambda reference: str(reference("id")),
)
def test_bad_reference(stepped: Served, state: str, reference: Any):
    fault = refused(stepped, "invalid_request", **body([reference(state)], "x", 1))
    assert fault.param or "base" in fault.message


def test_reference_to_itself(stepped: Served):
    request = body(text="x", n=1)
    refused(stepped, "invalid_request", **{**request, "refs": [inherit(request["id"])]})


def test_a_cycle_cannot_be_sent(stepped: Served):
    """The first of two states that name each other names one that does not exist."""
    one, other = body(text="x", n=1), body(text="x", n=1)
    refused(stepped, "state_not_found", **{**one, "refs": [inherit(other["id"])]})
    refused(stepped, "state_not_found", **{**other, "refs": [inherit(one["id"])]})


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e300", "1e300", '"x"'])
def test_numbers_that_are_none(stepped: Served, field: str, value: str):
    text = f'{{"id": "{new_id()}", "input": [{{"text": "x"}}], "sampling": {{"{field}": {value}}}}}'
    assert error(httpx.post(stepped.url + PATH, content=text)).code == "invalid_request"


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": -1},
        {"max_tokens": HUGE},
        {"max_tokens": True},
        {"max_tokens": 1.5},
        {"top_k": 0},
        {"stop": [""]},
        {"n": 2},
        {"regex": "[", "max_tokens": 2},
        {"regex": "a", "json_schema": "{}"},
        {"min_tokens": 5, "max_tokens": 2},
        {"stop_token_ids": [HUGE]},
    ],
    ids=str,
)
def test_bad_sampling(stepped: Served, sampling: dict[str, Any]):
    refused(stepped, "invalid_request", **{**body(text="x"), "sampling": sampling})


@pytest.mark.parametrize("pieces", [[], [{"text": ""}], [{"tokens": []}], [{"text": ""}, {"tokens": []}]], ids=str)
def test_empty_input(stepped: Served, state: str, pieces: list[Any]):
    assert refused(stepped, "invalid_request", **{**body(n=1), "input": pieces}).param == "input"
    assert refused(stepped, "invalid_request", **{**body([inherit(state)], n=1), "input": pieces}).param == "input"


@pytest.mark.parametrize(
    "piece", [{"tokens": [10**6]}, {"tokens": [-1]}, {"tokens": "ab"}, {"text": 3}, {"role": "user"}, {}, None], ids=str
)
def test_bad_input_piece(stepped: Served, piece: Any):
    refused(stepped, "invalid_request", **{**body(n=1), "input": [piece]})


@pytest.mark.parametrize("place", ["same", "explicit", {"start": -1}, {"start": HUGE}, {"begin": 3}, 7], ids=str)
def test_unknown_or_impossible_placement(stepped: Served, state: str, place: Any):
    refused(stepped, "invalid_request", **body([inherit(state)], "x", 1, place=place))


def test_strict_rules(stepped: Served, state: str):
    request = body([inherit(state), artifact(state)], "x", 1)
    refused(stepped, "invalid_request", **request, rules="strict")
    assert send(stepped, **request).status_code == 200


def test_position_overflow(stepped: Served, state: str):
    refused(stepped, "position_overflow", **body([inherit(state)], "x", 1, place={"start": 8191}))
    refused(stepped, "position_overflow", **body([inherit(state, base=8185)], "x", 1, place={}))
    ok(stepped, [inherit(state)], [400], 1, place={"start": 8190})


def test_context_overflow(stepped: Served, state: str):
    refused(stepped, "context_too_long", **body([inherit(state)], "x", 8179))
    refused(stepped, "context_too_long", **body(text="x", n=100_000))
    refused(stepped, "context_too_long", **body(text=[300] * 8300, n=1))


def test_ten_megabytes(stepped: Served):
    answer = httpx.post(stepped.url + PATH, content=b"x" * 10_000_000, timeout=60)
    assert error(answer).code == "context_too_long"
    refused(stepped, "context_too_long", **body(text="word " * 1_000_000, n=1))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"id": NaN}', b'{"id": 1, "id": 2}'])
def test_malformed_json(stepped: Served, text: bytes):
    assert error(httpx.post(stepped.url + PATH, content=text)).code == "invalid_request"


def test_a_refused_stream_is_an_http_error(stepped: Served):
    answer = send(stepped, **body([inherit(new_id())], "x", 1, stream=True))
    assert error(answer).code == "state_not_found"


def test_explaining_what_is_not_there(stepped: Served, state: str):
    explain = "/anabranch/v1/explain"
    assert error(stepped.post(explain, id=new_id())).code == "state_not_found"
    assert error(stepped.post(explain)).code == "invalid_request"
    assert error(stepped.post(explain, spec={"refs": [artifact(state, span=[0, 99])]})).code == "invalid_request"
