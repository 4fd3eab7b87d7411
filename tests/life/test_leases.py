"""Leases: until when a state is kept for a client that says nothing more. Over HTTP, with the real clock.

Longest and default lease are the operator's: test_limits.py.
"""

from __future__ import annotations

import time

import pytest

from tests.engine.api import body, error, inherit, ok, send
from tests.life.living import STATES, Live, begun, decoding, gone, noise, parsed, until

pytestmark = pytest.mark.engine


def _lost(live: Live, state: str) -> bool:
    return live.info(state).status_code == 404


def test_after_its_lease_a_state_is_gone_and_everything_is_freed(lively: Live):
    before = lively.stats()["expired"]
    states = [ok(lively, text=noise(i, 50), n=3, lease=1.0).id for i in range(5)]
    family = ok(lively, [inherit(state) for state in states], [65], 2, place="concat", lease=1.5).id
    assert 0 < lively.info(family).json()["lease"] <= 1.5
    until(lambda: all(_lost(lively, state) for state in (*states, family)), seconds=15)
    stats = lively.rest()
    assert (stats["states"], stats["held_tokens"], stats["expired"]) == (0, 0, before + 6)
    assert error(send(lively, **body([inherit(family)], [65], 1))).code == "state_not_found"
    gone(lively, family)


def test_a_parent_whose_lease_is_over_stays_for_its_child(lively: Live):
    parent = ok(lively, text=noise(6, 50), lease=0.5)
    child = ok(lively, [inherit(parent.id)], [65], 2)
    until(lambda: _lost(lively, parent.id), seconds=15)
    assert lively.rest()["held_tokens"] == 53
    assert ok(lively, [inherit(child.id)], [66], 1, keep=False).usage.context_tokens == 53


def test_renewing_keeps_it(lively: Live):
    one, other, third = (ok(lively, text=noise(i, 9), lease=2.0).id for i in range(3))
    until_then = time.monotonic() + 5
    while time.monotonic() < until_then:
        assert lively.post(f"{STATES}/{one}/renew").status_code == 200
        found = lively.post(f"{STATES}/renew", ids=[other, "0" * 32]).json()
        assert found == {"renewed": [other], "lost": ["0" * 32]}
        time.sleep(0.3)
    assert _lost(lively, third)
    assert lively.post(f"{STATES}/{third}/renew").status_code == 404
    assert lively.post(f"{STATES}/{one}/renew", lease=500.0).json()["lease"] > 400
    lively.post(f"{STATES}/renew", ids=[other], lease=0.2)
    until(lambda: _lost(lively, other), seconds=10)
    assert lively.listed() == {one}


def test_using_it_renews_it(lively: Live):
    """As a parent, whatever the child is kept for; not by being looked at."""
    used, looked_at = (ok(lively, text=noise(i, 9), lease=2.0).id for i in range(2))
    until_then = time.monotonic() + 5
    while time.monotonic() < until_then:
        ok(lively, [inherit(used)], [65], 1, keep=False)
        lively.info(looked_at)
        lively.post("/anabranch/v1/explain", id=looked_at)
        time.sleep(0.3)
    assert lively.listed() == {used}


def test_the_lease_of_a_running_one_begins_at_its_end(lively: Live):
    request = body(text=noise(3, 9), n=600, lease=1.0)
    began = time.monotonic()
    with decoding(lively, request) as events:
        while time.monotonic() < began + 2.2:
            assert lively.info(request["id"]).status_code == 200
            time.sleep(0.1)
        list(events)
    ended = time.monotonic()
    until(lambda: _lost(lively, request["id"]), seconds=10)
    assert ended + 0.5 < time.monotonic() < ended + 6


def test_a_lease_that_ends_while_a_child_runs_or_waits(lively: Live):
    """Neither is hurt: the running one keeps what it reads; the waiting one is told, or has found it."""
    parent = ok(lively, text=noise(4, 50), lease=0.5)
    running = begun(lively, body([inherit(parent.id)], [65], 500))
    until(lambda: _lost(lively, parent.id), seconds=15)
    assert parsed(running.result()).usage.context_tokens == 50
