"""What the operator allows, and a small pool whose states stay in memory: refused by name, at once, with what to do.

The `limited` server: 600 tokens; of one key 12 states, 400 tokens, 5 unfinished requests; leases of 60 s, at most 120.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import httpx
import pytest

from anabranch import wire
from tests.engine.api import body, error, inherit, ok, send
from tests.life.living import FOREVER, STATES, Live, asked_of, begin, begun, codes, decoding, gone, noise, parsed, same

pytestmark = pytest.mark.engine
_fresh = count()


@pytest.fixture
def mine(limited: Live) -> Live:
    """In the name of a key that nobody used before."""
    return limited.named(f"key-{next(_fresh)}")


def _limited(answer: httpx.Response) -> str:
    """It was refused for a limit of its key; returns the message."""
    found = error(answer)
    assert found.code == "rate_limited"
    assert int(answer.headers["retry-after"]) > 0
    assert found.hint
    return found.message


def test_states_of_one_key(limited: Live, mine: Live):
    states = [ok(mine, text=[i]).id for i in range(12)]
    assert "12 states" in _limited(send(mine, **body(text=[65])))
    assert "12 states" in _limited(send(mine, **body(text=[65], keep=False))), "it might become one"
    ok(limited.named("another"), text=[65])
    mine.release(states[0])
    ok(mine, text=[65])


def test_tokens_of_one_key(limited: Live, mine: Live):
    """Asked for, not only held: input and what may be generated."""
    first = ok(mine, text=noise(1, 250))
    assert "holds 250, and asks for 151" in _limited(send(mine, **body(text=noise(2, 51), n=100)))
    assert ok(mine, text=noise(2, 51), n=100, keep=False).usage.generated_tokens == 100
    ok(mine, text=noise(2, 50), n=100)
    ok(limited.named("another"), text=noise(3, 50))
    mine.release(first.id)
    ok(mine, text=noise(4, 51))


def test_tokens_that_only_descendants_keep_count_too(mine: Live):
    first = ok(mine, text=noise(1, 250))
    child = ok(mine, [inherit(first.id)], [65])
    mine.release(first.id)
    _limited(send(mine, **body(text=noise(2, 160))))
    mine.release(child.id)
    ok(mine, text=noise(2, 160))


@contextmanager
def _unfinished(live: Live, requests: int) -> Iterator[list[dict]]:
    with ExitStack() as streams:
        bodies = [body(text=[40 + i], n=60, keep=False) for i in range(requests)]
        for one in bodies:
            streams.enter_context(decoding(live, one))
        yield bodies


def test_unfinished_requests_of_one_key(limited: Live, mine: Live):
    """Those that run and those that wait."""
    with decoding(mine, body(text=[1], n=400, keep=False)) as events:
        running = next(iter(mine.listed()))
        waiting = [begun(mine, body([inherit(running)], [i], 1, keep=False), "waiting") for i in range(4)]
        assert "5 unfinished requests" in _limited(send(mine, **body(text=[65])))
        ok(limited.named("another"), text=[65])
        del events
    ended = codes(one.result() for one in waiting)
    assert set(ended) == {"state_not_found"}, ended
    ok(mine, text=[65])


def test_leases_are_given_and_cut(mine: Live):
    plain, short, long = (ok(mine, text=[65], **more) for more in ({}, {"lease": 7.0}, {"lease": 9000.0}))
    left = [mine.info(state.id).json()["lease"] for state in (plain, short, long)]
    for seconds, given in zip(left, (60, 7, 120), strict=True):
        assert given - 6 < seconds <= given
    assert 110 < mine.post(f"{STATES}/{plain.id}/renew", lease=9000.0).json()["lease"] <= 120


def test_states_stay_in_memory(limited: Live):
    """`--anabranch-evict 0`: what is refused pushed nothing out."""
    states = [ok(limited.named(f"part-{i}"), text=noise(i, 120), n=2) for i in range(4)]
    before = [asked_of(limited.named(f"part-{i}"), state.id) for i, state in enumerate(states)]
    answer = send(limited, **body(text=noise(9, 60), n=20))
    assert error(answer).code == "pool_exhausted"
    assert answer.headers["retry-after"]
    plain = {"input_ids": noise(9, 150), "sampling_params": {"max_new_tokens": 10}}
    refused = limited.post("/generate", **plain)
    assert refused.status_code == 503
    assert "pool_exhausted" in refused.text
    stats = limited.rest()
    assert (stats["evictions"], stats["evicted_states"], stats["held_tokens"]) == (0, 0, 4 * 122)
    for i, state in enumerate(states):
        same(asked_of(limited.named(f"part-{i}"), state.id), before[i])


def test_clearing_the_pool_loses_them(limited: Live):
    """They cannot be computed again here: they are gone, as if they had never been, and nothing is left."""
    state = ok(limited, text=noise(1, 50), n=2)
    assert limited.flush().status_code == 200
    stats = limited.rest()
    assert (stats["states"], stats["held_tokens"], stats["free_tokens"]) == (0, 0, 600)
    assert limited.info(state.id).status_code == 404


def test_decoding_out_of_memory(limited: Live):
    """Admitted when there was room; others left states meanwhile. One is told so, in our words; the rest is exact."""
    long = body(text=noise(1, 20), n=370)
    with decoding(limited.named("long"), long) as events:
        answers = []
        for i in range(12):
            key = limited.named(f"short-{i}")
            answers.append(send(key, **body(text=noise(i, 30), n=10)))
        *_, ended = events
    assert [answer.status_code for answer in answers].count(200) > 6
    assert isinstance(ended, wire.ErrorEvent), "it had room after all"
    assert ended.error.code == "pool_exhausted"
    gone(limited.named("long"), long["id"])
    limited.rest()


def test_more_requests_than_fit_are_refused_or_answered(limited: Live):
    """Each fits alone; those that finish hold what the others need. Nobody waits for ever."""
    answers = [begin(limited.named(f"many-{i}"), body(text=noise(i, 60), n=30)) for i in range(12)]
    ended = codes(answer.result(60) for answer in answers)
    assert set(ended) == {"length", "pool_exhausted"}
    assert 4 <= ended.count("length") <= 6
    stats = limited.rest()
    assert stats["held_tokens"] == 90 * ended.count("length")


def test_a_refused_request_can_be_sent_again_after_a_release(limited: Live):
    """What the SDK does: the same id and body, until there is room."""
    states = [ok(limited.named(f"part-{i}"), text=noise(i, 120), n=2) for i in range(4)]
    request = body(text=noise(9, 60), n=20)
    for _ in range(3):
        assert error(send(limited, **request)).code == "pool_exhausted"
    limited.named("part-0").release(states[0].id)
    assert parsed(send(limited, **request)).usage.generated_tokens == 20


def test_a_request_that_no_release_would_help(limited: Live):
    """Larger than all that there is: another code, because waiting is of no use."""
    assert error(send(limited, **body(text=[65], n=FOREVER, keep=False))).code == "context_too_long"
