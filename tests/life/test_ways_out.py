"""Every way in which a request can end by itself or by its client: the sums are exact, no half state is to be seen, and
the parent answers as before (the `parent` fixture).

Ends that the server decides are in test_forced_ends.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.engine.api import PATH, body, cancel, error, inherit, ok, send
from tests.life.fleet import POOL
from tests.life.living import (
    FOREVER,
    LOGPROBS,
    Live,
    asked_of,
    begin,
    begun,
    decoding,
    ending,
    gone,
    noise,
    occupied,
    parsed,
    same,
    until,
)
from tests.soak import tiny

pytestmark = pytest.mark.engine

STAGES = ["queued", "waiting", "parked", "prefill", "decode"]


def test_length(lively: Live, parent: str):
    with ending(lively, created=1):
        made = ok(lively, [inherit(parent)], [65], 12)
    assert (made.finish_reason, len(made.tokens)) == ("length", 12)
    assert _seen_of(lively, made.id) == 36 + 1 + 12


def test_nothing_to_generate(lively: Live, parent: str):
    with ending(lively, created=1):
        made = ok(lively, [inherit(parent)], noise(2, 70))
    assert (made.finish_reason, made.tokens) == ("length", ())
    assert _seen_of(lively, made.id) == 36 + 70


def test_stop_token(lively: Live, parent: str):
    plain = ok(lively, [inherit(parent)], [65], 12, keep=False)
    at = next(i for i in range(1, 12) if plain.tokens[i] not in plain.tokens[:i])
    sampling = {"stop_token_ids": [plain.tokens[at]], "ignore_eos": False}
    with ending(lively, created=1):
        made = ok(lively, [inherit(parent)], [65], 12, sampling=sampling)
    assert (made.finish_reason, made.tokens) == ("stop", plain.tokens[:at])
    assert _seen_of(lively, made.id) == 36 + 1 + at


def test_stop_string(lively: Live, parent: str):
    plain = ok(lively, [inherit(parent)], [65], 40, keep=False)
    stop, at = next((chr(t), i) for i, t in enumerate(plain.tokens) if i and 32 < t < 127 and t not in plain.tokens[:i])
    with ending(lively, created=1):
        made = ok(lively, [inherit(parent)], [65], 40, sampling={"stop": [stop]})
    assert (made.finish_reason, made.tokens) == ("stop", plain.tokens[:at])
    assert stop not in made.text
    assert _seen_of(lively, made.id) == 36 + 1 + at


def test_end_of_a_grammar(lively: Live, parent: str):
    with ending(lively, created=1):
        made = ok(lively, [inherit(parent)], [65], 10, sampling={"regex": "[0-9]{3}", "ignore_eos": False})
    assert (made.finish_reason, len(made.tokens)) == ("stop", 3)
    assert made.text.isdigit()
    assert _seen_of(lively, made.id) == 36 + 1 + 3


def test_a_grammar_that_is_none(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 10, sampling={"regex": "([", "ignore_eos": False})
    with ending(lively, failed=1):
        assert error(send(lively, **request)).code == "invalid_request"
    gone(lively, request["id"])


def test_a_state_that_is_not_kept(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 5, keep=False)
    with ending(lively, created=1):
        assert parsed(send(lively, **request)).kept is False
    gone(lively, request["id"])


@pytest.mark.parametrize("bad", ["tokens outside the vocabulary", "too long", "nothing new"])
def test_refused_before_anything_ran(lively: Live, parent: str, bad: str):
    requests = {
        "tokens outside the vocabulary": body([inherit(parent)], [100_000], 1),
        "too long": body([inherit(parent)], [65], tiny.POSITIONS + 1000),
        "nothing new": body([inherit(parent)], [], 1),
    }
    with ending(lively):
        assert send(lively, **requests[bad]).status_code in (400, 413)
    gone(lively, requests[bad]["id"])


@pytest.mark.parametrize("bad", ["too long in all", "unknown parent"])
def test_refused_by_admission(lively: Live, parent: str, bad: str):
    requests = {
        "too long in all": body([inherit(parent)], [65], POOL - 36),
        "unknown parent": body([inherit(parent), inherit("0" * 32)], [65], 3),
    }
    with ending(lively, rejected=1):
        assert send(lively, **requests[bad]).status_code in (404, 413)
    gone(lively, requests[bad]["id"])


@pytest.mark.parametrize("form", ["stream", "whole"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_client_disconnects(lively: Live, parent: str, form: str, stage: str):
    with _at_stage(lively, parent, stage) as request:
        with httpx.Client(base_url=lively.url, timeout=0.3) as client, ExitStack() as connection:
            asking = client.stream("POST", PATH, json={**request, "stream": form == "stream"})
            with pytest.raises(httpx.ReadTimeout):
                stream = connection.enter_context(asking)
                line = next(stream.iter_lines())
                assert stage == "decode", f"it ended before its client went away: {line}"
                raise httpx.ReadTimeout("that is enough")
        until(lambda: lively.info(request["id"]).status_code == 404, seconds=10)
    gone(lively, request["id"])


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_cancelled_at_each_stage(lively: Live, parent: str, stage: str, partial: bool):
    """By our own route. The answer says what was generated; before its first token there is nothing to keep in part."""
    stays = stage == "decode" and partial
    with _at_stage(lively, parent, stage, stays) as request:
        request["keep_partial"] = partial
        answer = begun(lively, request, "waiting" if stage == "waiting" else "running")
        if stage == "decode":
            time.sleep(0.1)
        assert cancel(lively, request["id"]).status_code == 204
        made = parsed(answer.result())
    assert made.finish_reason == "cancelled"
    if stays:
        assert made.kept
        assert made.tokens
        assert _seen_of(lively, made.id) == 36 + 1 + len(made.tokens)
    else:
        assert (made.kept, bool(made.tokens)) == (False, stage == "decode")
        gone(lively, request["id"])


def test_cancelled_together_by_sglangs_own_abort(lively: Live, parent: str):
    """`/abort_request` with `abort_all` reaches those that wait for a parent and those that are parked, too."""
    long = ok(lively, [inherit(parent)], noise(6, 1800))
    lively.flush()
    running = body([inherit(parent)], [65], FOREVER)
    waiting, parked = body([inherit(running["id"])], [65], 3), body([inherit(long.id)], [65], 3)
    with ending(lively, cancelled=3):
        answers = [begun(lively, running), begun(lively, waiting, "waiting"), begun(lively, parked)]
        assert lively.post("/abort_request", rid="", abort_all=True).status_code == 200
        ended = [answer.result() for answer in answers]
    assert [parsed(one).finish_reason for one in ended] == ["cancelled"] * 3
    for one in (running, waiting, parked):
        gone(lively, one["id"])
    lively.release(long.id)


def test_cancelled_before_it_came_and_after_it_ended(lively: Live, parent: str):
    """There is nothing to cancel: said so before; after, nothing happens to the state."""
    request = body([inherit(parent)], [65], 6, sampling=LOGPROBS)
    assert cancel(lively, request["id"]).status_code == 404
    with ending(lively, created=1):
        made = parsed(send(lively, **request))
        assert cancel(lively, request["id"]).status_code == 204
    before = asked_of(lively, made.id)
    assert cancel(lively, request["id"]).status_code == 204
    same(asked_of(lively, made.id), before)
    lively.release(made.id)


def test_a_disconnected_client_leaves_the_others_of_the_same_request(lively: Live, parent: str):
    """Two clients sent the same; one goes away: the other is answered."""
    request = body([inherit(parent)], noise(3, 30), 60)
    with ending(lively, created=1), decoding(lively, request):
        other = begin(lively, request)
        until(lambda: lively.stats()["running"] == 1)
        time.sleep(0.1)  # the other is attached, too
    assert len(parsed(other.result()).tokens) == 60
    lively.release(request["id"])


@contextmanager
def _at_stage(live: Live, parent: str, stage: str, stays: bool = False) -> Iterator[dict]:
    """A request that, once it is sent, is at `stage` long enough to be cancelled there; and what it takes for that."""
    with ExitStack() as until_then:
        made = int(stage == "parked" or stays)
        others = {"queued": 8, "waiting": 1}.get(stage, 0)
        until_then.enter_context(ending(live, created=made, cancelled=others + (not stays)))
        if stage == "decode":
            yield body([inherit(parent)], [65], FOREVER)
        elif stage == "prefill":
            yield body([inherit(parent)], noise(5, 3000), 5)
        elif stage == "queued":
            until_then.enter_context(occupied(live))
            yield body([inherit(parent)], [65], 5)
        elif stage == "waiting":
            before = body([inherit(parent)], [65], FOREVER)
            until_then.enter_context(decoding(live, before))
            yield body([inherit(before["id"])], [65], 5)
        else:
            long = ok(live, [inherit(parent)], noise(6, 3000))
            live.flush()
            until_then.callback(live.release, long.id)
            yield body([inherit(long.id)], [65], 5)


def _seen_of(live: Live, state: str) -> int:
    """How much a child of it sees; gives the state up."""
    seen = ok(live, [inherit(state)], [66], 1, keep=False).usage.context_tokens
    live.release(state)
    return seen
