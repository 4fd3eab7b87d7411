"""The state store: what keeps tokens alive, when they are freed, and how a request may end.

Ids are in `test_store_ids.py`, tenants and leases in `test_store_tenants.py`, eviction in `test_eviction.py`.
"""

from __future__ import annotations

import pytest

from anabranch_server.compile import ContextPlan
from anabranch_server.holdings import Holding
from anabranch_server.store import Running
from tests.server.pool import ID, STAMP, Pool, artifact, inherit, refused

# ---------------------------------------------------------------- keeping and freeing


def test_a_state_is_held_until_it_is_released(pool: Pool):
    pool.make("a", n=5)
    assert (pool.held, pool.gone) == (5, "")
    pool.release("a")
    assert (pool.held, pool.gone, pool.store.spaces) == (0, "a", {})


def test_a_running_request_holds_no_tokens_of_its_own_but_keeps_what_it_reads(pool: Pool):
    pool.make("a", n=5)
    pool.open("b", inherit("a"))
    pool.release("a")
    assert (pool.held, pool.gone) == (5, "")
    pool.close("b", "failed")
    assert (pool.held, pool.gone) == (0, "a")


def test_a_released_parent_stays_while_a_child_sees_it_and_goes_once_with_the_child(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.release("a")
    assert (pool.held, pool.gone) == (6, "")
    pool.release("b")
    assert pool.held == 0
    assert sorted(pool.gone) == ["a", "b"]


def test_a_grandchild_keeps_what_it_inherits_through_a_released_parent(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.make("c", inherit("b"), n=1)
    pool.release("a", "b")
    assert (pool.held, pool.gone) == (7, "")
    pool.make("d", inherit("c"), n=1)
    pool.release("c")
    assert pool.gone == ""
    pool.release("d")
    assert sorted(pool.gone) == ["a", "b", "c", "d"]


def test_the_last_of_several_children_frees_the_shared_parent(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.make("c", inherit("a"), inherit("b"), inherit("a", upto=1))
    pool.release("a", "c")
    assert pool.gone == "c"
    pool.release("b")
    assert sorted(pool.gone) == ["a", "b", "c"]


def test_children_released_first_free_only_themselves(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.release("b")
    assert pool.gone == "b"
    pool.release("a")
    assert pool.gone == "ba"


def test_an_artifact_keeps_its_span_but_not_what_that_state_saw(pool: Pool):
    pool.make("a", n=7)
    pool.make("b", inherit("a"), n=4)
    pool.make("c", artifact("b", 1, 3), n=2)
    pool.release("a", "b")
    assert (pool.gone, pool.held) == ("a", 4)
    assert pool.here == {"b": [1, 2], "c": [0, 1]}
    pool.release("c")
    assert sorted(pool.gone) == ["a", "b", "c"]


def test_a_rewind_keeps_what_comes_before_and_frees_what_comes_after(pool: Pool):
    pool.make("a", n=5)
    pool.make("b", inherit("a", upto=2), n=1)
    pool.release("a")
    assert (pool.held, pool.here) == (3, {"a": [0, 1], "b": [0]})


def test_a_rewind_to_0_keeps_the_grandparent_but_not_the_parent(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.make("c", inherit("b", upto=0))
    pool.release("a", "b")
    assert pool.gone == "b"


def test_an_empty_span_keeps_nothing(pool: Pool):
    pool.make("a")
    pool.make("b", artifact("a", 2, 2))
    pool.release("a")
    assert pool.gone == "a"


def test_context_that_does_not_propagate_is_needed_while_running_and_dropped_when_sealed(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", n=2)
    pool.open("c", inherit("a", propagate=False), inherit("b"))
    pool.release("a", "b")
    assert (pool.gone, pool.held) == ("", 6)
    pool.seal("c", n=1)
    assert (pool.gone, pool.held) == ("a", 3)
    pool.release("c")
    assert sorted(pool.gone) == ["a", "b", "c"]


def test_of_a_segment_that_propagates_in_part_that_part_is_kept(pool: Pool):
    pool.make("a", n=6)
    pool.make("b", inherit("a", propagate=False), artifact("a", 2, 3))
    pool.release("a")
    assert (pool.gone, pool.here["a"]) == ("", [2])
    pool.release("b")
    assert sorted(pool.gone) == ["a", "b"]


def test_tokens_are_freed_one_run_after_the_other_as_those_who_see_them_go(pool: Pool):
    pool.make("a", n=8)
    pool.make("b", artifact("a", 1, 4))
    pool.make("c", artifact("a", 3, 6))
    pool.release("a")
    assert pool.here["a"] == [1, 2, 3, 4, 5]
    pool.release("b")
    assert pool.here["a"] == [3, 4, 5]
    pool.make("d", artifact("c", 0, 1))
    pool.release("c")
    assert "a" not in pool.here


def test_sealing_needs_at_least_the_input(pool: Pool):
    running = pool.open("a", input_tokens=4)
    with pytest.raises(AssertionError):
        pool.store.seal(running, range(3), (0, 1, 2))


def test_a_state_may_consist_of_its_input_alone(pool: Pool):
    pool.open("a", input_tokens=4)
    pool.seal("a", n=4)
    info = pool.store.info("", ID["a"])
    assert (info.input_tokens, info.generated_tokens) == (4, 0)


# ---------------------------------------------------------------- ends of a request


def test_release_while_running_waits_for_the_end_and_then_leaves_no_state(pool: Pool):
    pool.make("a", n=4)
    running = pool.open("b", inherit("a"), keep_partial=True)
    pool.release("a", "b", "b")
    assert not running.keep
    assert not running.keep_partial
    assert ID["b"] in pool.store.space("").running
    assert pool.gone == ""
    pool.close("b")
    assert (pool.gone, pool.held) == ("a", 0)
    with refused("state_released"):
        pool.store.state("", ID["b"])


def test_what_is_not_kept_is_never_sealed(pool: Pool):
    running = pool.open("a")
    pool.release("a")
    with pytest.raises(AssertionError):
        pool.store.seal(running, range(3), (0, 1, 2))


def test_a_request_that_was_not_to_be_kept_ends_as_released(pool: Pool):
    pool.open("a").keep = False
    pool.close("a")
    with refused("state_released"):
        pool.store.state("", ID["a"])
    with refused("state_released"):
        pool.store.check_new("", ID["a"])
    assert events(pool) == {"created": 1, "freed": 1}


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_a_request_that_ends_badly_was_never_a_state_and_its_id_is_free_again(pool: Pool, outcome: str):
    pool.open("a")
    pool.close("a", outcome)
    with refused("state_not_found"):
        pool.store.state("", ID["a"])
    pool.make("a")
    assert events(pool) == {"created": 1, outcome: 1}


def test_counts_follow_the_lives_of_states(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.release("a")
    assert events(pool) == {"created": 2, "freed": 1}


def test_a_request_that_is_released_while_it_runs_is_counted_once(pool: Pool):
    pool.open("a")
    pool.release("a", "a")
    assert events(pool) == {}
    pool.close("a", "done")
    assert events(pool) == {"created": 1, "freed": 1}


def events(pool: Pool) -> dict[str, int]:
    assert {tenant for tenant, _ in pool.store.counts} <= {"", "anonymous"}
    return {event: sum(n for key, n in pool.store.counts.items() if key[1] == event) for _, event in pool.store.counts}


# ---------------------------------------------------------------- the check itself


def test_check_finds_every_kind_of_miscount(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.open("c", inherit("b"))
    store, states, segment = pool.store, pool.store.space("").states, pool.segment("a")
    holding: Holding = dict(pool.holdings.items())[segment]
    assert list(holding.keepers.runs()) == [(0, 4, 3)]  # itself, b, and the running c

    holding.keepers.add(1, 2)
    with pytest.raises(AssertionError, match=ID["a"]):
        store.check()
    holding.keepers.remove(1, 2)
    holding.pins += 1
    with pytest.raises(AssertionError, match="2 pins, 1 needed"):
        store.check()
    holding.pins -= 1
    pool.holdings.held_tokens += 1
    with pytest.raises(AssertionError, match="7 tokens held, 6 needed"):
        store.check()
    pool.holdings.held_tokens -= 1
    pool.holdings.reclaimable_tokens += 1
    with pytest.raises(AssertionError, match="1 reclaimable, 0 counted"):
        store.check()
    pool.holdings.reclaimable_tokens -= 1
    pool.holdings.owned_tokens["else"] += 1
    with pytest.raises(AssertionError, match="owned"):
        store.check()
    del pool.holdings.owned_tokens["else"]
    store.check()
    lost = states.pop(ID["b"])
    with pytest.raises(AssertionError):
        store.check()
    states[ID["b"]] = states[ID["c"]] = lost
    with pytest.raises(AssertionError, match="sealed and running"):
        store.check()


def test_check_finds_a_segment_that_nobody_needs_and_nobody_freed(pool: Pool):
    pool.make("a")
    pool.make("b")
    del pool.store.space("").states[ID["a"]]
    pool.store.leases.end(("", ID["a"]))
    with pytest.raises(AssertionError, match=ID["a"]):
        pool.store.check()


def test_check_finds_states_without_leases_leases_without_states_and_empty_tenants(pool: Pool):
    pool.make("a")
    pool.store.leases.begin(("", ID["b"]), 5)
    with pytest.raises(AssertionError, match="2 leases of 1 states"):
        pool.store.check()
    pool.store.leases.end(("", ID["b"]))
    pool.store.leases.end(("", ID["a"]))
    with pytest.raises(AssertionError, match="has no lease"):
        pool.store.check()
    pool = Pool()
    pool.open("a")
    del pool.store.space("").running[ID["a"]]
    with pytest.raises(AssertionError, match="has nothing"):
        pool.store.check()


def test_sealing_keeps_what_the_request_said_of_itself(pool: Pool):
    running = Running(ID["a"], ContextPlan((), 17), 2, STAMP, turn="due", tenant="me")
    pool.store.open(running)
    slots = pool.memory.take("a", 2)
    state = pool.store.seal(running, [5, 6], slots)
    assert (state.id, state.turn, state.stamp) == (ID["a"], "due", STAMP)
    segment = state.segment
    assert (segment.start, list(segment.tokens), segment.slots) == (17, [5, 6], slots)
    assert (segment.stamp, segment.owner, segment.context) == (STAMP, "me", ())
