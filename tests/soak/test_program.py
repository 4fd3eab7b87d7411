"""The soak program itself: it repeats, it forgets, it passes on a right server, and each fault of a server is noticed.

The server here is a fake; the real one is test_soak.py's.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from itertools import islice
from typing import Any

import httpx
import pytest

from tests.oracle import tiny

from . import checks
from .calls import Violation
from .fake import Fake
from .operations import TRAITS, WEIGHTS, program
from .rounds import Options, Soak
from .world import Known

EVICTING = frozenset({"evict", "fill"})
"""The fake never runs out of memory, and 400 tokens take it too long."""


async def run(fake: Fake, **options: Any) -> dict[str, Any]:
    given = {"operations": 120, "workers": 4, "every": 40, "without": EVICTING} | options
    soak = Soak(Options(**given), tiny.llama(), tiny.llama(), transport=httpx.MockTransport(fake.answer))
    return await soak.run("http://fake")


def test_the_same_seed_is_the_same_program():
    first, again, other = ([*islice(program(seed), 500)] for seed in (7, 7, 8))
    assert first == again != other
    assert [one.dice().random() for one in first] == [one.dice().random() for one in again]
    assert len({one.state_id() for one in (*first, *other)}) == 1000
    assert {one.kind for one in islice(program(7), 5000)} == set(WEIGHTS)


def test_operations_are_left_out_by_name():
    kinds = {one.kind for one in islice(program(7, ("cancel", "tenancy")), 5000)}
    assert kinds == set(WEIGHTS) - {"cancel", "trespass"}
    with pytest.raises(ValueError, match="no such operation: cancle; there are root, "):
        next(program(7, ("cancle",)))


async def test_one_worker_sends_the_same_requests_again():
    timed = {"request_drop", "stream_drop", "cancel", "abort", "release_running", "lease", "renew"}
    one, other = Fake(), Fake()
    for fake in (one, other):
        summary = await run(fake, workers=1, operations=60, without=EVICTING | timed)
        assert not summary["violations"]
    assert len(one.asked) > 30 and one.asked == other.asked


@pytest.mark.parametrize("seed", range(2))
async def test_a_right_server_passes(seed: int):
    fake = Fake()
    summary = await run(fake, seed=seed, operations=120, every=40)
    assert not summary["violations"], summary["violations"]
    assert summary["operations"] == 120 and summary["checked_by_brute_force"] > 8
    assert summary["largest_logprob_difference"] < 1e-4
    kinds = Counter(outcome.partition(": ")[0] for outcome in summary["outcomes"])
    assert len(kinds) > 20, kinds
    assert not fake.states and not fake.running


@pytest.mark.parametrize(
    ("wrong", "where", "message"),
    [
        ("answer", "fork", "is likelier by"),
        ("usage", "join", r"context_tokens \d+, but \d+ are visible"),
        ("computed", "stream", "computed_tokens"),
        ("sum", "release", "the pool does not add up"),
        ("loss", "look", "state_not_found|not listed|is missing"),
        ("leak", "release_batch", "it was released or never made"),
        ("leak", "ghost", "but it is not there"),
        ("lease", "lease", "lease"),
        ("tenant", "trespass", "but it is not there"),
        ("twice", "repeat", "sent twice, two results: text"),
        ("explain", "explain", "explain: start"),
    ],
)
async def test_what_is_wrong_is_noticed(wrong: str, where: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.soak.settling.LEASE_SLACK", 0.3)
    monkeypatch.setattr("tests.soak.actions.LEASES", (0.3,))
    few = {"root", "fork", "release", where, *TRAITS}
    summary = await run(Fake(wrong), without=EVICTING | {*WEIGHTS} - few)
    assert summary["violations"], f"{wrong} was not noticed"
    assert any(re.search(message, told) for told in summary["violations"]), summary["violations"]


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "AssertionError", "[E] memory leak detected"])
def test_a_fault_in_the_log_is_noticed(line: str):
    checks.log("Ignore import error when loading x\nall is well\n")
    with pytest.raises(Violation, match="log says"):
        checks.log(f"all is well\n{line}\n")


async def test_what_nothing_alive_was_made_from_is_forgotten():
    before = sum(type(one) is Known for one in gc.get_objects())
    await run(Fake(), operations=60)
    gc.collect()
    assert sum(type(one) is Known for one in gc.get_objects()) <= before
