"""A full pool where states may leave memory: they come back when needed, and answer exactly as before.

What is refused where they may not is in test_limits.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.engine.api import artifact, body, cancel, error, inherit, ok, send, together
from tests.life.fleet import POOL
from tests.life.living import LOGPROBS, Live, asked_of, begin, begun, decoding, noise, parsed, same

pytestmark = pytest.mark.engine


def push_out(live: Live) -> None:
    """A plain request that nothing fits beside: every idle state leaves memory."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    answer = live.post("/generate", input_ids=noise(99, POOL - 16), sampling_params=sampling)
    assert answer.status_code == 200, answer.text
    stats = live.rest()
    assert stats["evicted_states"] == stats["states"], stats


def all_out(live: Live) -> None:
    """SGLang's own control does the same, to all of them."""
    assert live.flush().status_code == 200
    stats = live.rest()
    assert (stats["free_tokens"], stats["evicted_states"]) == (POOL, stats["states"])


def _chain(live: Live) -> list[str]:
    states: list[str] = []
    for i in range(6):
        refs = [inherit(states[-1])] if states else []
        states.append(ok(live, refs, noise(i, 40), 4).id)
    return states


def _join(live: Live) -> list[str]:
    """Shifted parts, an overlap, a rewind, a state that hands on less than it sees."""
    root = ok(live, text=noise(10, 60), n=3).id
    arms = [ok(live, [inherit(root)], noise(11 + i, 20 + i), 5).id for i in range(3)]
    joined = ok(live, [inherit(arms[0]), inherit(arms[1]), inherit(arms[2], upto=7)], noise(15, 9), 3, place="concat")
    quiet = ok(live, [inherit(joined.id), artifact(arms[2], propagate=False)], noise(16, 5), 4, place="concat")
    last = ok(live, [inherit(quiet.id), artifact(joined.id)], noise(17, 26), 2, place="concat")
    return [root, *arms, joined.id, quiet.id, last.id]


def _explicit(live: Live) -> list[str]:
    root, other = ok(live, text=noise(20, 30), n=2).id, ok(live, text=noise(21, 25), n=4).id
    refs = [inherit(root, base=500), artifact(other, base=100)]
    far = ok(live, refs, noise(22, 8), 3, place={"start": 1000}).id
    return [root, other, far, ok(live, [inherit(far)], noise(23, 23), 2).id]


@pytest.mark.parametrize("push", [push_out, all_out])
@pytest.mark.parametrize("make", [_chain, _join, _explicit])
def test_what_left_memory_answers_as_before(
    lively: Live, make: Callable[[Live], list[str]], push: Callable[[Live], None]
):
    """Every state of a DAG, asked before, and after it left memory with all that it came from; the deepest first.
    (Pushing takes longer than clearing, so that the deepest, which needs all others, is enough there.)"""
    states = make(lively)
    before = {state: asked_of(lively, state) for state in states}
    plans = {state: lively.post("/anabranch/v1/explain", id=state).json() for state in states}
    for state in reversed(states if push is all_out else states[-1:]):
        push(lively)
        assert not lively.info(state).json()["resident"]
        assert lively.post("/anabranch/v1/explain", id=state).json() == plans[state]
        after = asked_of(lively, state)
        same(after, before[state])
        assert after.usage.context_tokens == before[state].usage.context_tokens
        assert after.usage.computed_tokens > before[state].usage.computed_tokens, "it was computed again: said so"
        assert after.usage.reused_tokens + after.usage.computed_tokens >= after.usage.context_tokens + 2
        assert lively.info(state).json()["resident"]


def test_only_what_is_missing_is_computed_again(lively: Live):
    states = _chain(lively)
    all_out(lively)
    assert asked_of(lively, states[3]).usage.computed_tokens == 4 * 44 + 2
    assert asked_of(lively, states[4]).usage.computed_tokens == 44 + 2
    assert asked_of(lively, states[4]).usage.computed_tokens == 2
    assert [lively.info(state).json()["resident"] for state in states] == [True] * 5 + [False]


def test_a_part_of_a_released_parent_comes_back(lively: Live):
    """The parent was given up; its child still sees a span from its middle, and nothing else of it is kept."""
    parent = ok(lively, text=noise(30, 50), n=10)
    child = ok(lively, [artifact(parent.id, span=[20, 45])], noise(31, 5), 3)
    lively.release(parent.id)
    before = asked_of(lively, child.id)
    assert lively.rest()["held_tokens"] == 25 + 8
    all_out(lively)
    after = asked_of(lively, child.id)
    same(after, before)
    assert after.usage.computed_tokens == 45 + 8 + 2, "what comes before the span is computed with it"
    assert lively.rest()["held_tokens"] == 25 + 8


def test_what_cannot_be_computed_again_stays_in_memory(lively: Live):
    """Its context is gone: the child of a non-propagating reference does not keep what it read."""
    parent = ok(lively, text=noise(32, 50), n=10)
    child = ok(lively, [inherit(parent.id, propagate=False)], noise(33, 40), 3)
    lively.release(parent.id)
    before = asked_of(lively, child.id)
    ok(lively, text=noise(34, 3000), keep=False)
    assert lively.info(child.id).json()["resident"]
    same(asked_of(lively, child.id), before)
    assert lively.flush().status_code == 200  # that clears memory, whatever is in it
    assert lively.info(child.id).status_code == 404


def test_two_that_need_the_same_share_one_rebuild(lively: Live):
    big = ok(lively, text=noise(35, 600), n=5)
    expected = asked_of(lively, big.id)
    all_out(lively)
    before = lively.stats()["rebuilds"]
    more = {"n": 6, "keep": False, "sampling": LOGPROBS}
    for answer in together(lively, [body([inherit(big.id)], [65, 66], **more) for _ in range(6)]):
        same(answer, expected)
    assert lively.rest()["rebuilds"] == before + 1


def test_released_while_it_is_computed_again(lively: Live):
    """The child that waits for it keeps what it sees."""
    big = ok(lively, text=noise(36, 1500), n=5)
    expected = asked_of(lively, big.id)
    all_out(lively)
    answer = begun(lively, body([inherit(big.id)], [65, 66], 6, keep=False, sampling=LOGPROBS))
    lively.release(big.id)
    same(parsed(answer.result()), expected)
    assert lively.rest()["held_tokens"] == 0


def test_what_fits_only_one_after_the_other_runs_so(lively: Live):
    """Two states that left memory, and do not fit together: who comes second waits for the first, and not for ever."""
    states = [ok(lively, text=noise(40 + i, 2200), n=2) for i in range(2)]
    all_out(lively)
    answers = [begin(lively, body([inherit(state.id)], [65], 60, keep=False)) for state in states]
    assert [parsed(answer.result(60)).usage.context_tokens for answer in answers] == [2202, 2202]


def test_a_rebuild_that_cannot_fit_is_refused(lively: Live):
    """Beside what a running request reads there is no room for it: said at once, and later it works."""
    big = ok(lively, text=noise(43, 2000), n=2)
    all_out(lively)
    other = ok(lively, text=noise(44, 1900), n=2)
    running = body([inherit(other.id)], [65], 400)
    with decoding(lively, running):
        answer = send(lively, **body([inherit(big.id)], [66], 2))
        assert error(answer).code == "pool_exhausted"
        assert answer.headers["retry-after"]
        cancel(lively, running["id"])
    lively.rest()
    assert ok(lively, [inherit(big.id)], [66], 2).usage.context_tokens == 2002


def test_plain_requests_push_states_out_and_are_not_refused(lively: Live):
    big = ok(lively, text=noise(45, 3000), n=2)
    expected = asked_of(lively, big.id)
    for seed in range(3):
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = lively.post("/generate", input_ids=noise(50 + seed, 2500), sampling_params=sampling)
        assert answer.status_code == 200, answer.text
    assert not lively.info(big.id).json()["resident"]
    same(asked_of(lively, big.id), expected)


def test_a_fork_of_64_delays_nobody_else_for_long(lively: Live):
    """Long outputs of one fork; then a plain request and a single one that makes a state come: they end long before."""
    root = ok(lively, text=noise(60, 50))
    began = time.monotonic()
    ended: list[float] = []
    forks = [begin(lively, body([inherit(root.id)], [i], 40, keep=False)) for i in range(64)]
    for fork in forks:
        fork.add_done_callback(lambda _: ended.append(time.monotonic() - began))
    while lively.stats()["running"] < 48:
        assert time.monotonic() < began + 30
    took = {}
    for what in ("plain", "single"):
        came = time.monotonic()
        if what == "plain":
            sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
            assert lively.post("/generate", input_ids=noise(61, 20), sampling_params=sampling).status_code == 200
        else:
            ok(lively, text=noise(62, 20), n=8)
        took[what] = time.monotonic() - came
    assert [fork.result().status_code for fork in forks] == [200] * 64
    whole = max(ended)
    assert max(took.values()) < whole / 3, f"{took} of {whole}"
