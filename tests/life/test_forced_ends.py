"""Ends that nobody asked for: the server's time and queue limits, preemption, retraction, faults, cleared memory, new
weights. The sums are exact, no half state is to be seen, and the parent answers as before.

Out of memory is in test_limits.py.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch import wire
from tests.engine.api import artifact, body, cancel, error, inherit, ok, send, together
from tests.life import faults
from tests.life.living import (
    FOREVER,
    LOGPROBS,
    STATES,
    Live,
    asked_of,
    begin,
    begun,
    codes,
    decoding,
    ending,
    gone,
    noise,
    parsed,
    same,
    until,
)

pytestmark = pytest.mark.engine


# ------------------------------------------------------------ hasty: time and queue limits


@pytest.mark.parametrize("partial", [False, True])
def test_running_for_too_long(hasty: Live, parent: str, partial: bool):
    """A refusal that can be tried again; nobody cancelled it, so that nothing is kept in part either."""
    request = body([inherit(parent)], [65], FOREVER * 2, keep_partial=partial)
    with ending(hasty, failed=1):
        answer = send(hasty, **request)
    assert error(answer).code == "rate_limited"
    assert answer.headers["retry-after"]
    gone(hasty, request["id"])


def test_running_for_too_long_as_a_stream(hasty: Live, parent: str):
    request = body([inherit(parent)], [65], FOREVER * 2)
    with ending(hasty, failed=1), decoding(hasty, request) as events:
        *_, last = events
    assert isinstance(last, wire.ErrorEvent)
    assert last.error.code == "rate_limited"
    gone(hasty, request["id"])


def test_queued_for_too_long(hasty: Live, parent: str):
    late = body([inherit(parent)], [65], 5)
    with ending(hasty, failed=2), decoding(hasty, body(text=[1], n=FOREVER * 2)) as events:
        answer = send(hasty, **late)
        list(events)
    assert error(answer).code == "rate_limited"
    gone(hasty, late["id"])


def test_a_full_queue(hasty: Live, parent: str):
    bodies = [body([inherit(parent)], [65 + i], 5) for i in range(6)]
    running = body(text=[1], n=FOREVER * 2)
    with ending(hasty, cancelled=1, failed=4, created=2), decoding(hasty, running):
        answers = [begin(hasty, one) for one in bodies]
        until(lambda: sum(answer.done() for answer in answers) == 4)
        cancel(hasty, running["id"])
        ended = [answer.result() for answer in answers]
    assert sorted(codes(ended)) == ["length"] * 2 + ["rate_limited"] * 4
    for one, answer in zip(bodies, ended, strict=True):
        if answer.status_code == 200:
            hasty.release(one["id"])
        else:
            gone(hasty, one["id"])


def test_a_full_queue_while_a_parent_is_computed_again(hasty: Live, parent: str):
    """The rebuild itself finds no place in the queue: who waits for it is told to come again, and then it works."""
    big = ok(hasty, text=noise(2, 200))
    before = asked_of(hasty, big.id)
    hasty.flush()
    with decoding(hasty, body(text=[1], n=150, keep=False)) as events:
        filling = [begin(hasty, body(text=[70 + i], n=1, keep=False)) for i in range(2)]
        until(lambda: hasty.stats()["running"] == 3)
        answer = begin(hasty, body([inherit(big.id)], [65], 2, keep=False))
        assert set(codes([answer.result()])) <= {"pool_exhausted", "rate_limited"}
        list(events)
        codes(one.result() for one in filling)
    same(asked_of(hasty, big.id), before)
    hasty.release(big.id)


# ------------------------------------------------------------ shaken: retraction, priorities, faults


def test_retracted_and_resumed(shaken: Live, parent: str):
    """Running requests lose their KV every few steps and are resumed: each says what it says alone, joined parts and
    shifts included, and what they leave is whole."""
    arms = [ok(shaken, [inherit(parent)], noise(i, 10), 3).id for i in range(2)]
    shapes = [
        body([inherit(parent)], noise(5, 20), 24, sampling=LOGPROBS),
        body([inherit(arm) for arm in arms], noise(6, 20), 24, sampling=LOGPROBS, place="concat"),
        body([artifact(arms[0]), inherit(arms[1])], noise(7, 20), 24, sampling=LOGPROBS, place="concat"),
        body(text=noise(8, 20), n=24, sampling=LOGPROBS),
    ]
    alone = [parsed(send(shaken, **{**one, "id": f"{i:032x}"})) for i, one in enumerate(shapes)]
    before = _retractions(shaken)
    at_once = together(shaken, shapes)
    assert _retractions(shaken) > before
    for one, other in zip(at_once, alone, strict=True):
        same(one, other)
        same(asked_of(shaken, one.id), asked_of(shaken, other.id))
    shaken.release(*(shaken.listed() - {parent}))


def _retractions(live: Live) -> int:
    return len(re.findall(r"#retracted_reqs: [1-9]", live.log))


def test_cancelled_while_retracted(shaken: Live, parent: str):
    with ending(shaken, cancelled=8):
        bodies = [body([inherit(parent)], [65 + i], 400) for i in range(8)]
        answers = [begin(shaken, one) for one in bodies]
        until(lambda: shaken.stats()["running"] == 8)
        for one in bodies:
            time.sleep(0.02)
            cancel(shaken, one["id"])
        assert codes(answer.result() for answer in answers) == ["cancelled"] * 8
    for one in bodies:
        gone(shaken, one["id"])


def test_kept_in_part_though_retracted(shaken: Live, parent: str):
    bodies = [body([inherit(parent)], [65 + i], 400, keep_partial=True) for i in range(4)]
    answers = [begin(shaken, one) for one in bodies]
    time.sleep(0.6)
    for one in bodies:
        cancel(shaken, one["id"])
    for i, answer in enumerate(answers):
        made = parsed(answer.result())
        if made.kept:
            whole = ok(shaken, [inherit(parent)], [65 + i, *made.tokens, 66, 67], 6, keep=False, sampling=LOGPROBS)
            same(ok(shaken, [inherit(made.id)], [66, 67], 6, keep=False, sampling=LOGPROBS), whole)
    assert any(parsed(answer.result()).tokens for answer in answers)
    shaken.release(*(shaken.listed() - {parent}))


def _prioritised(live: Live, parent: str, priority: int, n: int) -> dict:
    """Over SGLang's own endpoint: ours has no priorities."""
    spec = {"refs": [inherit(parent)], "keep": False}
    custom = {"anabranch": json.dumps(spec)}
    sampling = {"max_new_tokens": n, "temperature": 0, "ignore_eos": True, "custom_params": custom}
    answer = live.post("/generate", input_ids=[65], sampling_params=sampling, priority=priority)
    return {"at": time.monotonic(), "status": answer.status_code, **answer.json()}


def test_preempted_by_a_higher_priority(shaken: Live, parent: str):
    alone = _prioritised(shaken, parent, 0, 100)
    with ThreadPoolExecutor(5) as pool, ending(shaken, created=5):
        low = [pool.submit(_prioritised, shaken, parent, 0, 100) for _ in range(4)]
        until(lambda: shaken.stats()["running"] == 4)
        high = pool.submit(_prioritised, shaken, parent, 100, 5).result()
        assert high["status"] == 200
        for one in low:
            assert one.result()["text"] == alone["text"]
            assert one.result()["at"] > high["at"], "it did not have to wait"


@pytest.mark.parametrize("at", [faults.BEFORE, faults.AFTER], ids=["before it was opened", "after"])
def test_an_exception_in_admission(shaken: Live, parent: str, at: list[int]):
    """One request fails, the server goes on, and what was opened for it is closed."""
    request = body([inherit(parent)], [*noise(9, 20), *at], 5)
    with ending(shaken, failed=at == faults.AFTER):
        answer = send(shaken, **request)
        assert error(answer).code == "internal"
        assert "broken on purpose" not in answer.text
        assert "broken on purpose" in shaken.log
    gone(shaken, request["id"])


def test_an_exception_in_a_request_that_others_wait_for(shaken: Live, parent: str):
    first = body([inherit(parent)], [65], 500)
    broken = body([inherit(first["id"])], [*faults.AFTER], 5)
    child = body([inherit(broken["id"])], [66], 5)
    answers = [begun(shaken, first), begun(shaken, broken, "waiting"), begun(shaken, child, "waiting")]
    assert codes(answer.result() for answer in answers) == ["length", "internal", "state_not_found"]
    shaken.release(first["id"])


def test_an_exception_in_a_question(shaken: Live, parent: str):
    assert error(shaken.info(faults.CONTROL)).code == "internal"
    assert shaken.info(parent).status_code == 200


# ------------------------------------------------------------ lively: memory is cleared, weights change


def test_memory_is_cleared(lively: Live, parent: str):
    """SGLang's /flush_cache: states stay known, are computed again when they are needed, and say so."""
    child = ok(lively, [inherit(parent)], noise(3, 10), 4)
    before = asked_of(lively, child.id)
    assert lively.flush().status_code == 200
    stats = lively.rest()
    assert (stats["held_tokens"], stats["evicted_states"], stats["evicted_tokens"]) == (0, 2, 36 + 14)
    after = asked_of(lively, child.id)
    same(after, before)
    assert (before.usage.computed_tokens, after.usage.computed_tokens) == (2, 36 + 14 + 2)
    lively.release(child.id)


def test_memory_is_not_cleared_while_something_runs(lively: Live, parent: str):
    request = body([inherit(parent)], [65], 300)
    answer = begun(lively, request)
    assert lively.post("/flush_cache").status_code == 400
    assert len(parsed(answer.result()).tokens) == 300
    lively.release(request["id"])


@pytest.mark.parametrize("flush", [False, True])
def test_new_weights(lively: Live, flush: bool):
    """States of the weights before are refused, in memory or not, as parents; they can be looked at and released."""
    old = [ok(lively, text=noise(i, 20), n=3).id for i in range(2)]
    update = lively.post("/update_weights_from_disk", model_path=lively.model_dir, flush_cache=flush)
    assert update.status_code == 200, update.text
    assert lively.rest()["states"] == 2
    for state in old:
        answer = send(lively, **body([inherit(state)], [65], 1))
        assert answer.status_code == 409
        assert error(answer).code == "state_incompatible"
        assert lively.info(state).status_code == 200
    mixed = send(lively, **body([inherit(ok(lively, text=[65]).id), artifact(old[0])], [65], 1))
    assert error(mixed).code == "state_incompatible"
    assert sorted(lively.release(*old)["released"]) == sorted(old)
    assert lively.post(f"{STATES}/renew", ids=old).json() == {"renewed": [], "lost": old}


def test_new_weights_while_a_request_runs(lively: Live):
    """SGLang lets it end first; what it leaves belongs to the weights that it began under."""
    request = body(text=noise(4, 20), n=300)
    answer = begun(lively, request)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(lively.post, "/update_weights_from_disk", model_path=lively.model_dir)
        assert parsed(answer.result()).kept
        assert update.result().status_code == 200
    assert error(send(lively, **body([inherit(request["id"])], [65], 1))).code == "state_incompatible"


def test_new_weights_while_a_rebuild_is_left_over(lively: Live):
    """Who needed it was cancelled, and it goes on. SGLang ends a server whose memory cannot be cleared then."""
    big = ok(lively, text=noise(5, 3000))
    lively.flush()
    request = body([inherit(big.id)], [65], 3)
    answer = begun(lively, request)
    cancel(lively, request["id"])
    assert parsed(answer.result()).finish_reason == "cancelled"
    update = lively.post("/update_weights_from_disk", model_path=lively.model_dir, flush_cache=True)
    assert update.status_code == 200, update.text
