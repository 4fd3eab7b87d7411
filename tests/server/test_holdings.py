"""Holdings: hand-made cases of keeping, pinning and letting go, without states.

Eviction, coming back and a cleared pool are in `test_eviction.py`; any life at all is in `test_lives.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from anabranch_server.holdings import Holdings
from anabranch_server.segments import Interval, Segment
from tests.server.pool import Memory


@dataclass
class Hands:
    """Holdings over a fake pool; whoever keeps something does it by hand."""

    evicts: bool = True
    memory: Memory = field(default_factory=Memory)
    kept: list[Interval] = field(default_factory=list)
    pinned: list[Segment] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holdings = Holdings(self.memory.free, self.evicts, on_event=lambda *event: self.told.append(event))

    def hold(self, name: str, n: int, *context: Interval, owner: str = "") -> Segment:
        segment = Segment(name, 0, range(n), self.memory.take(name, n), context, owner=owner)
        self.holdings.hold(segment)
        self.kept.append(Interval(segment, 0, n))
        self.check()
        return segment

    def retain(self, *intervals: Interval) -> None:
        self.holdings.retain(intervals)
        self.kept += intervals
        self.check()

    def let_go(self, *intervals: Interval) -> None:
        self.holdings.let_go(intervals)
        for interval in intervals:
            self.kept.remove(interval)
        self.check()

    def pin(self, *intervals: Interval) -> None:
        self.holdings.pin(intervals)
        self.pinned += dict.fromkeys(interval.segment for interval in intervals)
        self.check()

    def unpin(self, *intervals: Interval) -> None:
        self.holdings.unpin(intervals)
        for segment in dict.fromkeys(interval.segment for interval in intervals):
            self.pinned.remove(segment)
        self.check()

    def check(self) -> None:
        self.holdings.check(self.kept, self.pinned)

    @property
    def numbers(self) -> tuple[int, int]:
        return self.holdings.held_tokens, self.holdings.reclaimable_tokens


@pytest.fixture
def hands() -> Hands:
    return Hands()


def whole(segment: Segment) -> Interval:
    return Interval(segment, 0, len(segment))


# ---------------------------------------------------------------- keeping


def test_exactly_the_tokens_that_nothing_keeps_are_freed(hands: Hands):
    a = hands.hold("a", 10)
    hands.retain(Interval(a, 2, 5), Interval(a, 4, 8))
    hands.let_go(whole(a))
    assert hands.memory.freed == [("a", i) for i in (0, 1, 8, 9)]
    hands.let_go(Interval(a, 4, 8))
    assert hands.memory.freed[4:] == [("a", i) for i in (5, 6, 7)]
    assert hands.numbers == (3, 3)
    hands.let_go(Interval(a, 2, 5))
    assert (hands.numbers, hands.memory.live, a in hands.holdings) == ((0, 0), set(), False)


def test_the_middle_may_go_first(hands: Hands):
    a = hands.hold("a", 6)
    hands.retain(Interval(a, 0, 2), Interval(a, 4, 6))
    hands.let_go(whole(a))
    assert hands.memory.freed == [("a", 2), ("a", 3)]


def test_what_is_gone_cannot_be_kept_again(hands: Hands):
    a = hands.hold("a", 6)
    hands.retain(Interval(a, 0, 3))
    hands.let_go(whole(a))
    with pytest.raises(AssertionError, match="kept what was gone"):
        hands.holdings.retain([Interval(a, 2, 4)])


def test_a_segment_that_is_gone_altogether_is_forgotten_with_its_slots(hands: Hands):
    a = hands.hold("a", 2)
    b = hands.hold("b", 2, whole(a))
    hands.let_go(whole(b))
    assert (b.slots, b.context, b in hands.holdings) == (None, None, False)
    assert not dict(hands.holdings.items())[a].users


def test_tokens_are_counted_for_their_owner_in_memory_or_not(hands: Hands):
    a, b = hands.hold("a", 5, owner="x"), hands.hold("b", 2, owner="y")
    c = hands.hold("c", 1, owner="x")
    assert hands.holdings.owned_tokens == {"x": 6, "y": 2}
    hands.holdings.evict(8)
    hands.check()
    assert hands.holdings.owned_tokens == {"x": 6, "y": 2}
    hands.retain(Interval(a, 0, 1))
    hands.let_go(whole(a), whole(b))
    assert hands.holdings.owned_tokens == {"x": 2}
    hands.let_go(Interval(a, 0, 1), whole(c))
    assert hands.holdings.owned_tokens == {}


def test_a_segment_is_held_once(hands: Hands):
    a = hands.hold("a", 1)
    with pytest.raises(AssertionError):
        hands.holdings.hold(a)
    with pytest.raises(AssertionError):
        hands.holdings.hold(Segment("b", 0, range(3), None))


# ---------------------------------------------------------------- what cannot be computed again


def test_when_a_token_of_its_context_is_gone_a_segment_can_never_leave_memory(hands: Hands):
    a = hands.hold("a", 6)
    b = hands.hold("b", 4, Interval(a, 0, 4))
    assert hands.numbers == (10, 10)
    hands.retain(Interval(a, 0, 3))
    hands.let_go(whole(a))
    assert b.context is None
    assert hands.numbers == (7, 3)
    assert hands.holdings.evict(100) == 3
    assert (a.slots, b.slots is None) == (None, False)


def test_when_tokens_go_that_it_never_saw_a_segment_can_still_leave_memory(hands: Hands):
    a = hands.hold("a", 9)
    b = hands.hold("b", 4, Interval(a, 2, 4), Interval(a, 6, 7))
    hands.retain(Interval(a, 2, 4), Interval(a, 6, 7))
    hands.let_go(whole(a))
    assert (b.context, hands.numbers) == ((Interval(a, 2, 4), Interval(a, 6, 7)), (7, 7))


def test_the_context_ends_with_its_last_token_and_begins_with_its_first(hands: Hands):
    a = hands.hold("a", 4)
    before = hands.hold("before", 1, Interval(a, 0, 2))
    after = hands.hold("after", 1, Interval(a, 2, 4))
    hands.retain(Interval(a, 0, 2))
    hands.let_go(whole(a))
    assert (before.context is None, after.context) == (False, None)


def test_a_segment_whose_context_is_broken_keeps_the_rest_of_it_no_longer(hands: Hands):
    a, b = hands.hold("a", 2), hands.hold("b", 2)
    c = hands.hold("c", 1, whole(a), whole(b))
    hands.let_go(whole(a))
    assert not dict(hands.holdings.items())[b].users
    hands.let_go(whole(b))
    assert (c.slots is None, hands.numbers) == (False, (1, 0))
    hands.let_go(whole(c))


# ---------------------------------------------------------------- pins


def test_what_is_read_never_leaves_memory(hands: Hands):
    a, b = hands.hold("a", 3), hands.hold("b", 4)
    hands.pin(Interval(a, 0, 1), Interval(b, 0, 1), Interval(a, 2, 3))
    hands.pin(Interval(a, 1, 2))
    assert (hands.numbers, hands.holdings.evict(1)) == ((7, 0), 0)
    hands.unpin(Interval(a, 0, 1), Interval(b, 0, 1), Interval(a, 2, 3))
    assert hands.numbers == (7, 4)
    assert (hands.holdings.evict(100), a.slots is None) == (4, False)
    hands.unpin(Interval(a, 1, 2))
    assert (hands.numbers, hands.holdings.evict(1)) == ((3, 3), 3)


def test_pins_are_counted(hands: Hands):
    a = hands.hold("a", 3)
    with pytest.raises(AssertionError, match="unpinned too often"):
        hands.holdings.unpin([whole(a)])


def test_nothing_may_go_while_it_is_read(hands: Hands):
    a = hands.hold("a", 3)
    hands.pin(whole(a))
    with pytest.raises(AssertionError, match="gone while it was read"):
        hands.holdings.let_go([whole(a)])


def test_what_others_may_evict_is_unmovable_beside_a_request_that_reads_it(hands: Hands):
    a, b, c = hands.hold("a", 3), hands.hold("b", 4), hands.hold("c", 5)
    assert hands.holdings.unmovable_beside([]) == 0
    assert hands.holdings.unmovable_beside([Interval(a, 0, 1), Interval(a, 1, 2), whole(c)]) == 8
    hands.pin(whole(c))
    assert hands.holdings.unmovable_beside([whole(a), whole(c)]) == 8, "c is pinned already"
    hands.holdings.evict(3)
    hands.check()
    assert a.slots is None
    assert hands.holdings.unmovable_beside([whole(a)]) == 8, "a comes back"
    assert hands.holdings.unmovable_beside([whole(b)]) == 9


def test_of_a_segment_only_what_is_still_kept_is_unmovable(hands: Hands):
    a = hands.hold("a", 9)
    hands.retain(Interval(a, 0, 2))
    hands.let_go(whole(a))
    assert hands.holdings.unmovable_beside([Interval(a, 0, 1)]) == 2


# ---------------------------------------------------------------- who evicts, and in which order


def test_the_least_recently_used_goes_first(hands: Hands):
    a, b, c, d = (hands.hold(name, 2) for name in "abcd")
    hands.pin(whole(a))
    hands.unpin(whole(a))
    gone = []
    for _ in range(4):
        hands.holdings.evict(1)
        hands.check()
        gone += [segment.id for segment in (a, b, c, d) if segment.slots is None and segment.id not in gone]
    assert gone == ["b", "c", "d", "a"]


def test_evict_frees_whole_segments_and_no_more_of_them_than_needed(hands: Hands):
    segments = [hands.hold(name, 3) for name in "abcd"]
    assert hands.holdings.evict(0) == 0
    assert hands.holdings.evict(3) == 3
    assert hands.holdings.evict(4) == 6
    assert [segment.slots is None for segment in segments] == [True, True, True, False]
    assert hands.memory.in_memory == {("d", 0), ("d", 1), ("d", 2)}
    assert hands.holdings.evict(4) == 3
    assert hands.holdings.evict(1) == 0


def test_evictions_are_told_to_the_owner(hands: Hands):
    hands.hold("a", 3, owner="x")
    hands.hold("b", 3, owner="y")
    hands.holdings.evict(6)
    assert hands.told == [("x", "evictions"), ("y", "evictions")]


def test_a_server_that_does_not_evict_holds_everything_in_memory():
    hands = Hands(evicts=False)
    a = hands.hold("a", 3)
    assert (hands.numbers, hands.holdings.evict(100), hands.holdings.evictable(a)) == ((3, 0), 0, False)
    assert hands.holdings.unmovable_beside([whole(a)]) == 3
