"""Out of memory and back: what eviction keeps alive, how a segment returns, and what a cleared pool leaves.

Hand-made cases through the store; any life at all is in `test_lives.py`.
"""

from __future__ import annotations

import pytest

from anabranch_server.limits import Limits
from anabranch_server.segments import Interval, Segment
from tests.server.pool import ID, Pool, artifact, inherit, refused


def whole(segment: Segment) -> Interval:
    return Interval(segment, 0, len(segment))


# ---------------------------------------------------------------- eviction


def test_an_evicted_segment_keeps_its_context_alive_and_lets_go_of_it_when_it_is_gone(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", artifact("a", 1, 3, propagate=False), n=2)
    pool.put_out(pool.segment("b"))
    pool.release("a")
    assert pool.here == {"a": [1, 2]}
    pool.release("b")
    assert (pool.here, pool.held, pool.reclaimable) == ({}, 0, 0)


def test_a_context_that_does_not_propagate_is_kept_for_the_evicted_only(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a", propagate=False), n=2)
    a, b = pool.segment("a"), pool.segment("b")
    reading = pool.open("c", inherit("a"))
    assert pool.evict(2) == 2, "b, for a is read"
    pool.close("c", "cancelled")
    assert reading.context.segments == (a,)
    pool.release("a")
    assert pool.here == {"a": [0, 1, 2, 3]}, "nobody but b, which is out, needs it"
    assert (pool.held, pool.reclaimable) == (4, 4)
    pool.rebuild(b)
    assert pool.here == {"b": [0, 1]}
    assert b.context is None
    assert (pool.held, pool.reclaimable) == (2, 0)


def test_a_parent_that_does_not_propagate_and_is_freed_makes_the_child_unevictable(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a", propagate=False), n=2)
    assert pool.reclaimable == 6
    pool.release("a")
    assert (pool.held, pool.reclaimable, pool.evict(10)) == (2, 0, 0)
    pool.release("b")
    assert pool.here == {}


def test_a_child_sealed_after_its_parent_was_released_is_unevictable_from_the_start(pool: Pool):
    pool.make("a", n=4)
    pool.open("b", inherit("a", propagate=False))
    pool.release("a")
    state = pool.seal("b", n=2)
    assert (state.segment.context, pool.here, pool.reclaimable) == (None, {"b": [0, 1]}, 0)


def test_what_running_requests_read_is_not_evicted_and_what_they_need_may_be_out(pool: Pool):
    pool.make("a", n=4)
    pool.evict(4)
    pool.open("b", inherit("a"))
    pool.rebuild(pool.segment("a"))
    assert (pool.held, pool.reclaimable, pool.evict(10)) == (4, 0, 0)
    pool.seal("b", n=1)
    assert (pool.reclaimable, pool.evict(10)) == (5, 5)


# ---------------------------------------------------------------- the way back


def test_what_is_out_comes_back_in_an_order_in_which_each_finds_what_it_needs(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.make("c", inherit("a"), n=3)
    pool.make("d", inherit("c"), artifact("b", 0, 1), n=1)
    a, b, c, d = (pool.segment(letter) for letter in "abcd")
    assert pool.missing(a, b, c, d) == ""
    pool.evict(10)
    assert (pool.held, pool.here) == (0, {})
    assert pool.missing(d) == "acbd"
    assert pool.missing(b, c) == "abc"
    for segment in (a, b):
        pool.rebuild(segment)
    assert pool.missing(d) == "cd"
    pool.rebuild(c)
    pool.rebuild(d)
    assert (pool.missing(a, b, c, d), pool.held, pool.reclaimable) == ("", 10, 10)


def test_a_parent_that_is_needed_for_its_own_sake_and_for_a_child_comes_back_once(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.evict(6)
    assert pool.missing(pool.segment("b"), pool.segment("a")) == "ab"


def test_only_what_is_missing_and_what_that_needs_comes_back(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.make("c", inherit("b"), n=2)
    pool.put_out(pool.segment("a"))
    assert (pool.missing(pool.segment("b")), pool.missing(pool.segment("c"))) == ("", "")
    assert pool.missing(pool.segment("a"), pool.segment("c")) == "a"
    pool.put_out(pool.segment("c"))
    assert pool.missing(pool.segment("c")) == "ac"
    pool.rebuild(pool.segment("a"))
    assert pool.missing(pool.segment("c")) == "c"


def test_a_long_chain_comes_back_without_recursion(pool: Pool):
    depth = 3000
    segments = [Segment("0", 0, [0], pool.memory.take("0", 1))]
    for i in range(1, depth):
        segments.append(Segment(str(i), 0, [0], pool.memory.take(str(i), 1), (whole(segments[-1]),)))
    for segment in segments:
        pool.holdings.hold(segment)
    assert pool.holdings.evict(depth) == depth
    assert pool.holdings.missing([whole(segments[-1])]) == segments
    pool.holdings.let_go([whole(segment) for segment in segments])
    pool.holdings.check([], [])


def test_of_a_segment_that_is_gone_in_part_only_the_kept_tokens_stay(pool: Pool):
    pool.make("a", n=9)
    pool.make("b", artifact("a", 2, 4), artifact("a", 6, 7))
    a = pool.segment("a")
    pool.release("a")
    pool.put_out(a)
    assert (a.slots, pool.holdings.needed_of(a)) == (None, 7)
    pool.rebuild(a)
    assert pool.here["a"] == [2, 3, 6]
    assert pool.held == 6
    pool.release("b")
    assert pool.here == {}


def test_what_became_unneeded_while_it_was_computed_again_is_freed_when_it_is_there(pool: Pool):
    pool.make("a", n=9)
    pool.make("b", artifact("a", 0, 2), artifact("a", 5, 6))
    a = pool.segment("a")
    pool.evict(9)
    began = pool.holdings.needed_of(a)
    pool.release("a")
    assert (began, pool.holdings.needed_of(a)) == (9, 6)
    pool.holdings.restore(a, pool.memory.take("a", began))
    pool.store.check()
    assert pool.here["a"] == [0, 1, 5]


def test_a_segment_that_nobody_needs_any_more_while_it_is_out_is_gone(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a", propagate=False), n=2)
    b = pool.segment("b")
    pool.evict(6)
    pool.release("a", "b")
    assert (b in pool.holdings, pool.holdings.owned_tokens) == (False, {})


def test_a_segment_that_nobody_needs_any_more_while_it_is_computed_again_is_gone(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    a, b = pool.segment("a"), pool.segment("b")
    pool.evict(6)
    pool.rebuild(a)
    context = b.context
    assert context is not None
    pool.store.read(context)
    pool.store.release("", ID["a"])
    pool.store.release("", ID["b"])
    pool.store.check([context])
    assert b not in pool.holdings
    assert pool.here == {"a": [0, 1, 2, 3]}, "the rebuild still reads it"
    pool.store.done_reading(context)
    pool.store.check()
    assert pool.here == {}


def test_one_that_is_out_may_let_go_of_a_whole_line_of_ancestors(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a", propagate=False), n=2)
    pool.make("c", inherit("b", propagate=False), n=2)
    a, b, c = (pool.segment(letter) for letter in "abc")
    pool.evict(8)
    pool.release("a", "b")
    assert a in pool.holdings
    assert b in pool.holdings
    pool.release("c")
    assert not [segment for segment in (a, b, c) if segment in pool.holdings]


def test_a_segment_that_came_back_was_used_last(pool: Pool):
    for letter in "abc":
        pool.make(letter, n=2)
    a, b = pool.segment("a"), pool.segment("b")
    pool.evict(2)
    pool.rebuild(a)
    pool.evict(2)
    assert (a.slots is None, b.slots) == (False, None)


def test_a_segment_that_came_back_can_leave_again_and_both_are_counted(pool: Pool):
    pool.make("a", n=2)
    for _ in range(3):
        pool.evict(1)
        pool.rebuild(pool.segment("a"))
    assert (pool.store.counts["", "evictions"], pool.store.counts["", "rebuilds"]) == (3, 3)
    assert (pool.held, pool.reclaimable) == (2, 2)


def test_only_what_is_out_can_come_back(pool: Pool):
    pool.make("a", n=2)
    with pytest.raises(AssertionError):
        pool.holdings.restore(pool.segment("a"), pool.memory.take("a", 2))


# ---------------------------------------------------------------- a cleared pool


def reset(pool: Pool) -> None:
    pool.memory.clear()
    pool.store.reset()
    pool.store.check()


def states(pool: Pool) -> str:
    return "".join(letter for letter, state_id in ID.items() if state_id in pool.store.space("").states)


def test_what_can_be_computed_again_outlives_a_cleared_pool(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    freed = len(pool.memory.freed)
    reset(pool)
    assert (states(pool), pool.held, pool.reclaimable, len(pool.memory.freed) - freed) == ("ab", 0, 0, 0)
    assert pool.missing(pool.segment("b")) == "ab"
    for letter in "ab":
        pool.rebuild(pool.segment(letter))
    pool.make("c", inherit("b"), n=1)
    assert (pool.held, pool.reclaimable) == (7, 7)
    pool.release("a", "b", "c")
    assert pool.here == {}


def test_what_cannot_is_lost_and_all_that_saw_it_too(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a", propagate=False), n=2)
    pool.release("a")
    pool.make("c", artifact("b", 0, 1, propagate=False), n=2)
    pool.make("d", n=2)
    pool.make("e", inherit("c"), inherit("d"), n=2)
    reset(pool)
    assert states(pool) == "d"
    assert (pool.store.counts["", "lost"], pool.holdings.owned_tokens) == (3, {"": 2})
    with refused("state_not_found"):
        pool.store.state("", ID["e"])
    pool.rebuild(pool.segment("d"))
    pool.release("d")
    assert pool.here == {}


def test_what_only_the_lost_needed_is_gone_with_them(pool: Pool):
    """c is out, and keeps a for its return; then it is lost with b."""
    pool.make("d", n=1)
    pool.make("b", inherit("d", propagate=False), n=2)
    pool.make("a", n=4)
    pool.make("c", artifact("b", 0, 1, propagate=False), inherit("a", propagate=False), n=2)
    a, c = pool.segment("a"), pool.segment("c")
    pool.put_out(c)
    pool.release("a", "d")
    assert (c.slots, a in pool.holdings) == (None, True)
    reset(pool)
    assert (states(pool), a in pool.holdings, pool.holdings.owned_tokens) == ("", False, {})


def test_the_out_of_memory_stay_known_when_the_pool_is_cleared(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a", propagate=False), n=2)
    pool.evict(6)
    pool.release("a")
    reset(pool)
    assert pool.missing(pool.segment("b")) == "ab"
    for segment in pool.holdings.missing([whole(pool.segment("b"))]):
        pool.rebuild(segment)
    assert pool.here == {"b": [0, 1]}


def test_a_pool_is_not_cleared_while_somebody_reads(pool: Pool):
    pool.make("a", n=4)
    pool.open("b", inherit("a"))
    with pytest.raises(AssertionError, match="while it was read"):
        pool.store.reset()


def test_a_server_that_does_not_evict_loses_all_states_with_the_pool():
    pool = Pool(Limits(evict=False))
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.open("c", inherit("b"))
    pool.close("c", "failed")
    reset(pool)
    assert (pool.store.spaces, pool.held, pool.memory.freed) == ({}, 0, [])
    assert pool.store.counts["", "lost"] == 2
    with refused("state_not_found"):
        pool.store.state("", ID["a"])
    pool.make("d", n=1)
    assert pool.held == 1
