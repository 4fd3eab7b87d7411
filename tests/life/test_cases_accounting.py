"""Failures that users of systems like this reported, as tests: leaks, aborts, accounting (CASES.md).

Each is named after where it was reported; what is tested is the whole kind, not only the instance. Numbers are smaller
here than in the reports, so that CI stays quick; the full ones are marked slow.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.engine.api import PATH, artifact, body, cancel, error, inherit, ok, send, together
from tests.life.fleet import POOL
from tests.life.living import (
    FOREVER,
    LOGPROBS,
    Live,
    asked_of,
    begin,
    begun,
    codes,
    decoding,
    ending,
    gone,
    noise,
    occupied,
    parsed,
    same,
    until,
)

pytestmark = pytest.mark.engine


def test_sglang_27024_open_states_until_the_pool_is_full_and_release_none(lively: Live):
    """Sessions pinned KV without a cap until every worker waited for ever. Here what is idle leaves memory instead,
    and each state, in memory or not, still answers."""
    states = [ok(lively, text=noise(i, 100), n=4) for i in range(2 * POOL // 100)]
    stats = lively.rest()
    assert stats["states"] == len(states)
    assert stats["evicted_states"] > 0
    assert stats["held_tokens"] <= POOL
    for state in random.Random(0).sample(states, 8):
        assert ok(lively, [inherit(state.id)], [65], 2, keep=False).usage.context_tokens == 104


def test_sglang_27024_a_full_pool_refuses_at_once_and_release_unblocks_it(limited: Live):
    """The same where states stay in memory: the next one is refused with a typed error; after a release it runs."""
    held = [ok(limited.named(f"tenant-{i}"), text=noise(i, 100), n=4).id for i in range(4)]
    started = time.monotonic()
    answer = send(limited, **body(text=noise(9, 100), n=40))
    assert error(answer).code == "pool_exhausted"
    assert int(answer.headers["retry-after"]) > 0
    assert time.monotonic() - started < 10
    assert limited.named("tenant-0").release(held[0])["released"] == [held[0]]
    assert ok(limited, text=noise(9, 100), n=40).usage.generated_tokens == 40


def test_sglang_18701_cancel_at_random_stages(lively: Live, parent: str):
    """Aborting while KV was copied or given back leaked slots, rows and pages. Every pool returns to its baseline."""
    _cancel_at_random(lively, parent, 120)


@pytest.mark.slow
def test_sglang_18701_cancel_1000_times_at_random_stages(lively: Live, parent: str):
    _cancel_at_random(lively, parent, 1000)


def test_sglang_18701_cancel_what_was_retracted(shaken: Live, parent: str):
    """The same where running requests lose their KV every few steps and wait to be resumed."""
    _cancel_at_random(shaken, parent, 60)


def _cancel_at_random(live: Live, parent: str, times: int) -> None:
    """Requests of all shapes, each cancelled after a random time by one of three means."""
    before, dropped = live.rest(), []

    def one(seed: int) -> str:
        dice = random.Random(seed)
        refs = [dice.choice([inherit, artifact])(parent)] if dice.random() < 0.7 else []
        own = noise(seed, dice.choice([1, 5, 60, 300]))
        request = body(refs, own, dice.choice([0, 1, 3, 40]), keep=dice.random() < 0.8)
        if dice.random() < 0.3:
            request |= {"keep_partial": True}
        pause, means = dice.random() * dice.choice([0.02, 0.2]), dice.choice(["cancel", "cancel", "release", "drop"])
        if means == "drop":
            try:
                live.http.post(PATH, json=request, timeout=0.02 + pause)
                live.release(request["id"])
                return "finished"
            except httpx.TimeoutException:
                dropped.append(request["id"])
                return "dropped"
        answer = begin(live, request)
        time.sleep(pause)
        if means == "cancel":
            cancel(live, request["id"])
        else:
            live.release(request["id"])
        ended = codes([answer.result(60)])[0]
        live.release(request["id"])
        return ended

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(one, range(times)))
    assert set(ended) <= {"length", "cancelled", "dropped", "finished"}, set(ended)
    assert {"cancelled", "length", "dropped"} <= set(ended)
    live.flush()
    live.release(*dropped)  # what was finished when its client left
    after = live.rest()
    left = {"states": 1, "held_tokens": 0, "evictable_tokens": 0, "free_tokens": before["total_tokens"]}
    assert {key: after[key] for key in left} == left


def test_sglang_40360_at_each_stage_a_request_ends_exactly_once(lively: Live, parent: str):
    """The order of cleaning up differed by backend, and something was given back twice, or never. Stages: queued,
    waiting, loading, prefill, decode."""
    with ending(lively, cancelled=1 + 8), occupied(lively):
        queued = body([inherit(parent)], noise(2, 5), 5)
        answer = begun(lively, queued)
        cancel(lively, queued["id"])
        assert parsed(answer.result()).finish_reason == "cancelled"
        assert lively.info(queued["id"]).status_code == 404
    for stage in ("prefill", "loading", "waiting"):
        with ending(lively, created=stage == "loading", cancelled=2 if stage == "waiting" else 1):
            ended = _end_at(lively, parent, stage)
        for one in ended:
            gone(lively, one)
    with ending(lively, cancelled=1):
        request = body([inherit(parent)], noise(4, 5), FOREVER)
        with decoding(lively, request):
            cancel(lively, request["id"])
    gone(lively, request["id"])


def _end_at(live: Live, parent: str, stage: str) -> list[str]:
    first = body([inherit(parent)], noise(3, 1200), 5 if stage == "prefill" else FOREVER // 4)
    if stage == "loading":
        big = ok(live, [inherit(parent)], noise(3, 900))
        live.flush()
        first = body([inherit(big.id)], [65], 5)
    answer = begun(live, first)
    chain = [first]
    if stage == "waiting":
        chain.insert(0, body([inherit(first["id"])], [65], 5))
        begun(live, chain[0], "waiting")
    for one in chain:
        cancel(live, one["id"])
    assert parsed(answer.result()).finish_reason == "cancelled"
    live.release(*(live.listed() - {parent}))
    return [one["id"] for one in chain]


def test_sglang_40360_abort_in_the_step_of_the_natural_finish(lively: Live, parent: str):
    """Whoever wins, the request ends once, and what it says is true: if it says that there is a state, there is one."""
    dice = random.Random(7)
    before = lively.rest()
    for turn in range(60):
        request = body([inherit(parent)], [65 + turn], 3, keep_partial=turn % 2 == 0)
        answer = begin(lively, request)
        time.sleep(dice.random() * 0.05)
        cancel(lively, request["id"])
        made = parsed(answer.result())
        assert made.finish_reason in ("length", "cancelled")
        if made.kept:
            info = lively.info(request["id"]).json()
            assert (info["status"], info["generated_tokens"]) == ("sealed", len(made.tokens))
            lively.release(request["id"])
        else:
            assert lively.info(request["id"]).status_code == 404
    after = lively.rest()
    assert sum(after[e] - before[e] for e in ("created", "cancelled")) == 60
    assert (after["failed"], after["rejected"]) == (before["failed"], before["rejected"])


def test_sglang_6778_usage_creeps_up_until_deadlock(lively: Live):
    """Many short generates, each released: the sum law holds after each, and nothing stays."""
    _short_generates(lively, 250)


@pytest.mark.slow
def test_sglang_6778_10000_short_generates(lively: Live):
    _short_generates(lively, 10_000)


def _short_generates(live: Live, times: int) -> None:
    live.flush()
    for i in range(times):
        made = ok(live, text=noise(i, 1 + i % 20), n=i % 4)
        stats = live.stats()
        own = made.usage.computed_tokens + made.usage.generated_tokens
        assert (stats["states"], stats["held_tokens"], stats["in_use_tokens"]) == (1, own, 0)
        assert stats["free_tokens"] == stats["total_tokens"] - own
        live.release(made.id)
    assert live.rest()["free_tokens"] == POOL


def test_vllm_14326_a_dropped_connection_stops_all_that_was_forked(lively: Live, parent: str):
    """An abort was logged as done, but the children ran on. Fork 8 as streams, drop them: all stop at once, and so do
    the grandchildren that waited for them."""
    with ending(lively, cancelled=8, rejected=4):
        bodies = [body([inherit(parent)], [65 + i], FOREVER // 8) for i in range(8)]
        streams = [decoding(lively, one) for one in bodies]
        for stream in streams:
            stream.__enter__()
        waiting = [body([inherit(one["id"])], [65], 3) for one in bodies[:4]]
        answers = [begun(lively, one, "waiting") for one in waiting]
        for stream in streams:
            stream.__exit__(None, None, None)
        until(lambda: lively.stats()["running"] == 0, seconds=5)
        assert codes(answer.result() for answer in answers) == ["state_not_found"] * 4
    for one in (*bodies, *waiting):
        gone(lively, one["id"])


def test_lmcache_4185_a_late_completion_after_release_is_ignored(lively: Live, parent: str):
    """A completion that came for an aborted request killed the engine. Release while the request runs, and while what
    it reads is computed again: what completes late is nobody's."""
    running = body([inherit(parent)], noise(5, 300), 20)
    answer = begun(lively, running)
    assert lively.release(running["id"])["released"] == [running["id"]]
    late = parsed(answer.result())
    assert (late.kept, late.finish_reason, len(late.tokens)) == (False, "length", 20)
    gone(lively, running["id"])

    big = ok(lively, text=noise(6, 1200))
    lively.flush()
    child = body([inherit(big.id)], [65], 5)
    answer = begun(lively, child)  # parked: its parent is computed again
    cancel(lively, child["id"])
    lively.release(big.id)
    assert parsed(answer.result()).finish_reason == "cancelled"
    assert lively.rest()["held_tokens"] == lively.stats()["reclaimable_tokens"]
    gone(lively, big.id)
    assert lively.process.poll() is None


def test_sglang_27025_release_a_state_while_a_child_runs(lively: Live):
    """An orphaned request deferred a close for ever. Both end well: the child keeps what it sees, and frees it."""
    root = ok(lively, text=noise(8, 50), n=5)
    expected = asked_of(lively, root.id)
    with decoding(lively, body([inherit(root.id)], [65], FOREVER // 10)) as events:
        assert lively.release(root.id)["released"] == [root.id]
        gone(lively, root.id)
        final = [*events][-1]
    child: Any = final
    assert child.response.finish_reason == "length"
    rewound = ok(lively, [inherit(child.response.id, upto=0)], [65, 66], 6, keep=False, sampling=LOGPROBS)
    same(rewound, expected)
    assert lively.rest()["held_tokens"] == 55 + 1 + FOREVER // 10
    lively.release(child.response.id)
    assert lively.rest()["held_tokens"] == 0


def test_sglang_27025_release_a_whole_family_while_its_last_child_runs(lively: Live):
    """All at once and in any order: a chain, a join, and the running one itself."""
    for seed in range(4):
        root = ok(lively, text=noise(seed, 30))
        arms = together(lively, [body([inherit(root.id)], [65 + i], 3) for i in range(3)])
        joined = ok(lively, [inherit(arm.id) for arm in arms], [70], 2, place="concat")
        last = body([inherit(joined.id), artifact(arms[0].id)], noise(seed, 100), 100)
        answer = begun(lively, last)
        family = [root.id, *(arm.id for arm in arms), joined.id, last["id"]]
        random.Random(seed).shuffle(family)
        for state in family:
            assert lively.release(state)["released"] == [state]
        assert parsed(answer.result()).kept is False
        assert lively.rest()["held_tokens"] == 0
