"""A request that is sent again, a generation that is kept in part, and a state that is made once more."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from anabranch import wire
from tests.engine.api import PATH, body, cancel, error, inherit, ok, send, together
from tests.life.living import (
    FOREVER,
    LOGPROBS,
    Live,
    asked_of,
    begun,
    decoding,
    ending,
    gone,
    noise,
    parsed,
    same,
    until,
)

pytestmark = pytest.mark.engine


def test_who_gets_a_state_again_has_it_for_a_whole_lease(lively: Live):
    request = body(text=noise(9, 5), n=2, lease=60.0)
    first = parsed(send(lively, **request))
    until(lambda: lively.info(first.id).json()["lease"] < 60, seconds=10)
    assert parsed(send(lively, **request)).tokens == first.tokens
    assert lively.info(first.id).json()["lease"] == 60


# ------------------------------------------------------------ kept in part


def test_a_cancelled_generation_is_kept_with_exactly_the_tokens_returned(lively: Live, parent: str):
    request = body([inherit(parent)], [65], FOREVER, keep_partial=True, sampling=LOGPROBS)
    with decoding(lively, request) as events:
        time.sleep(0.1)
        cancel(lively, request["id"])
        *deltas, final = events
    assert isinstance(final, wire.FinalEvent)
    made = final.response
    assert (made.finish_reason, made.kept) == ("cancelled", True)
    assert made.logprobs is not None
    assert [one.token for one in made.logprobs] == list(made.tokens)
    assert 0 < len(made.tokens) < FOREVER
    streamed = sum((one.tokens for one in deltas if isinstance(one, wire.DeltaEvent)), ())
    assert made.tokens[-len(streamed) :] == streamed
    info = lively.info(made.id).json()
    assert (info["status"], info["input_tokens"], info["generated_tokens"]) == ("sealed", 1, len(made.tokens))
    whole = ok(lively, [inherit(parent)], [65, *made.tokens, 66, 67], 6, keep=False, sampling=LOGPROBS)
    same(ok(lively, [inherit(made.id)], [66, 67], 6, keep=False, sampling=LOGPROBS), whole)
    lively.release(made.id)


def test_a_child_waits_for_a_parent_that_is_cancelled_and_kept_in_part(lively: Live, parent: str):
    request = body([inherit(parent)], [65], FOREVER, keep_partial=True)
    with decoding(lively, request):
        child = begun(lively, body([inherit(request["id"])], [66], 2, keep=False), "waiting")
        cancel(lively, request["id"])
        usage = parsed(child.result()).usage
    assert usage.context_tokens == 36 + 1 + lively.info(request["id"]).json()["generated_tokens"]
    lively.release(request["id"])


def test_what_a_disconnected_client_left_in_part_can_be_asked_for(lively: Live, parent: str):
    request = body([inherit(parent)], [65], FOREVER, keep_partial=True)
    with decoding(lively, request):
        pass
    until(lambda: lively.info(request["id"]).json()["status"] == "sealed")
    made = parsed(send(lively, **request))
    assert (made.finish_reason, made.kept) == ("cancelled", True)
    assert lively.info(made.id).json()["generated_tokens"] == len(made.tokens) > 0
    lively.release(made.id)


def test_a_request_that_was_cancelled_and_left_nothing_can_be_sent_again(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 200)
    answer = begun(lively, request)
    cancel(lively, request["id"])
    assert parsed(answer.result()).kept is False
    with ending(lively, created=1):
        assert len(parsed(send(lively, **request)).tokens) == 200
    lively.release(request["id"])


# ------------------------------------------------------------ sent twice


def test_the_same_request_sent_at_once_is_one_generation(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 30, sampling={"temperature": 1.0})
    with ending(lively, created=1):
        first, *others = together(lively, [request] * 6)
        after = parsed(send(lively, **request))
    assert [*others, after] == [first] * 6
    lively.release(request["id"])


def test_a_stream_and_a_whole_answer_of_one_request(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 60, sampling={"temperature": 1.0})
    with ending(lively, created=1):
        with decoding(lively, request) as events:
            whole = parsed(send(lively, **request))
            final = [*events][-1]
        with lively.http.stream("POST", PATH, json={**request, "stream": True}) as again:
            lines = [json.loads(line.removeprefix("data: ")) for line in again.iter_lines() if line]
    assert isinstance(final, wire.FinalEvent)
    assert final.response == whole
    assert wire.FinalEvent.model_validate(lines[-1]).response == whole
    lively.release(request["id"])


def test_another_request_of_the_same_id_is_refused(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 150)
    others = [{**request, "input": [{"tokens": [66]}]}, {**request, "refs": []}, {**request, "lease": 77.0}]
    with ending(lively, created=1):
        answer = begun(lively, request)
        while_it_runs = [error(send(lively, **other)) for other in others]
        made = parsed(answer.result())
        afterwards = [error(send(lively, **other)) for other in others]
    assert {(one.code, one.param) for one in (*while_it_runs, *afterwards)} == {("invalid_request", "id")}
    assert len(made.tokens) == 150
    lively.release(request["id"])


def test_an_answer_without_a_state_is_repeated_too(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 5, keep=False, sampling={"temperature": 1.0})
    with ending(lively, created=1):
        assert send(lively, **request).json() == send(lively, **request).json()


def test_a_request_of_a_released_state_makes_no_second_one(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 5)
    made = parsed(send(lively, **request))
    lively.release(made.id)
    answer = send(lively, **request)
    assert error(answer).code in ("state_released", "invalid_request")
    gone(lively, made.id)


def test_a_request_of_an_expired_state_makes_it_anew(lively: Live, parent: str):
    """As if it had never been: that is what a lease is for."""
    request = body([inherit(parent)], [65], 5, lease=0.5)
    first = parsed(send(lively, **request))
    until(lambda: lively.info(first.id).status_code == 404, seconds=10)
    with ending(lively, created=1):
        assert parsed(send(lively, **request)).tokens == first.tokens
    lively.release(first.id)


# ------------------------------------------------------------ made once more


def _again(live: Live, request: dict, made: wire.GenerateResponse, **more: object) -> httpx.Response:
    sampling = {"max_tokens": 0}
    return send(live, **{**request, "sampling": sampling, "again": True, "generated": made.tokens, **more})


@pytest.mark.parametrize("lost", ["released", "expired"])
def test_a_lost_state_is_made_again_under_its_id(lively: Live, parent: str, lost: str):
    request = body([inherit(parent)], noise(2, 9), 7, **({"lease": 1.0} if lost == "expired" else {}))
    made = parsed(send(lively, **request))
    before = asked_of(lively, made.id)
    info = lively.info(made.id).json()
    if lost == "released":
        lively.release(made.id)
    until(lambda: lively.info(made.id).status_code in (404, 410), seconds=10)
    with ending(lively, created=1):
        again = parsed(_again(lively, request, made, lease=60.0))
    assert (again.id, again.tokens) == (made.id, made.tokens)
    assert (again.usage.computed_tokens, again.usage.generated_tokens) == (9 + 7, 0), "nothing was generated now"
    after = lively.info(made.id).json()
    assert {**after, "lease": None} == {**info, "lease": None}
    same(asked_of(lively, made.id), before)
    lively.release(made.id)


def test_made_again_it_is_the_same_to_its_descendants(lively: Live, parent: str):
    """The child still sees the first; a join of both sees the tokens once."""
    request = body([inherit(parent)], noise(3, 9), 7)
    made = parsed(send(lively, **request))
    child = ok(lively, [inherit(made.id)], [65], 2)
    lively.release(made.id)
    held = lively.rest()["held_tokens"]
    assert _again(lively, request, made).status_code == 200
    joined = ok(lively, [inherit(child.id), inherit(made.id)], [66], 1, keep=False)
    assert joined.usage.context_tokens == 36 + 16 + 3
    lively.release(made.id)
    assert lively.rest()["held_tokens"] == held
    lively.release(child.id)


def test_made_again_with_other_tokens_it_is_refused_while_the_first_is_seen(lively: Live, parent: str):
    """A token instance has one content."""
    request = body([inherit(parent)], noise(4, 9), 7)
    made = parsed(send(lively, **request))
    child = ok(lively, [inherit(made.id)], [65], 2)
    lively.release(made.id)
    other = {**request, "input": [{"tokens": noise(5, 9)}]}
    assert error(_again(lively, other, made)).code == "invalid_request"
    lively.release(child.id)
    assert _again(lively, other, made).status_code == 200
    lively.release(made.id)


def test_again_of_a_state_that_is_there_is_refused(lively: Live, parent: str):
    request = body([inherit(parent)], noise(6, 9), 7)
    made = parsed(send(lively, **request))
    before = asked_of(lively, made.id)
    assert error(_again(lively, request, made)).code == "invalid_request"
    same(asked_of(lively, made.id), before)
    lively.release(made.id)
