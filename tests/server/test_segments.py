"""Segments, intervals and covers, held against models that know single token instances only.

No spec, no policy and no store; how intervals are united is asked in `test_union.py`.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.segments import Cover, Interval, Segment

FAST = settings(max_examples=80, deadline=None, derandomize=True, database=None)
LENGTH = 12
A = Segment("a", 100, range(LENGTH), None)
B = Segment("b", 200, range(LENGTH), None)
C = Segment("c", 0, range(LENGTH), None)

Instance = tuple[str, int]


@st.composite
def intervals(draw: st.DrawFn, shortest: int = 0) -> Interval:
    start = draw(st.integers(0, LENGTH - shortest))
    stop = draw(st.integers(start + shortest, LENGTH))
    segment = draw(st.sampled_from([A, B, C]))
    return Interval(segment, start, stop, draw(st.sampled_from([-7, 0, 5])), draw(st.booleans()))


def instances(interval: Interval) -> list[Instance]:
    return [(interval.segment.id, i) for i in range(interval.start, interval.stop)]


def cover_of(*added: Interval) -> Cover:
    cover = Cover()
    for interval in added:
        cover.add(interval)
    return cover


def cut(cover: Cover, interval: Interval) -> list[tuple[int, int, bool]]:
    return [(part.start, part.stop, inside) for part, inside in cover.split(interval)]


# ---------------------------------------------------------------- segment and interval


def test_a_segment_ends_after_its_last_native_position():
    assert (len(A), A.start, A.end) == (12, 100, 112)
    assert Segment("e", 7, [], None).end == 7


def test_segments_are_equal_only_to_themselves():
    twin = Segment("a", 100, range(LENGTH), None)
    assert twin != A
    assert len({twin, A, A}) == 2


def test_living_segments_with_one_id_are_one_identity_and_a_number_is_never_used_again():
    first = Segment("numbered", 0, range(3), None)
    twin = Segment("numbered", 7, range(3), None)
    assert first.identity is twin.identity
    assert A.identity is not B.identity
    number = first.identity.number
    del first
    assert Segment("numbered", 0, range(3), None).identity.number == number
    del twin
    assert Segment("numbered", 0, range(3), None).identity.number > number


def test_an_interval_knows_where_it_was_computed_and_where_it_is_seen():
    seen = Interval(A, 3, 8, delta=-50)
    assert (len(seen), seen.native, seen.effective, seen.end) == (5, 103, 53, 58)


def test_moving_adds_to_the_delta_and_changes_nothing_else():
    moved = Interval(A, 3, 8, delta=-50, propagate=False).moved(-9)
    assert moved == Interval(A, 3, 8, delta=-59, propagate=False)
    assert (moved.native, moved.effective, moved.end) == (103, 44, 49)


def test_a_part_keeps_delta_and_propagation():
    part = Interval(A, 3, 8, delta=4, propagate=False).part(5, 6)
    assert part == Interval(A, 5, 6, delta=4, propagate=False)
    assert (part.native, part.effective) == (105, 109)


# ---------------------------------------------------------------- cover


def test_a_new_cover_holds_nothing():
    assert cut(Cover(), Interval(A, 2, 5)) == [(2, 5, False)]


def test_split_cuts_at_every_border_of_the_cover_in_order():
    cover = cover_of(Interval(A, 7, 9), Interval(A, 2, 4))
    assert cut(cover, Interval(A, 0, 12)) == [(0, 2, False), (2, 4, True), (4, 7, False), (7, 9, True), (9, 12, False)]
    assert cut(cover, Interval(A, 3, 8)) == [(3, 4, True), (4, 7, False), (7, 8, True)]
    assert cut(cover, Interval(A, 4, 7)) == [(4, 7, False)]
    assert cut(cover, Interval(A, 2, 4)) == [(2, 4, True)]


def test_split_does_not_mistake_one_segment_for_another():
    assert cut(cover_of(Interval(A, 0, 12)), Interval(B, 1, 3)) == [(1, 3, False)]


def test_runs_that_touch_or_overlap_become_one_part():
    for added in ([Interval(A, 2, 4), Interval(A, 4, 6)], [Interval(A, 4, 6), Interval(A, 2, 4)]):
        assert cut(cover_of(*added), Interval(A, 0, 8)) == [(0, 2, False), (2, 6, True), (6, 8, False)]
    bridged = cover_of(Interval(A, 0, 2), Interval(A, 4, 6), Interval(A, 8, 10), Interval(A, 1, 9))
    assert cut(bridged, Interval(A, 0, 12)) == [(0, 10, True), (10, 12, False)]


def test_adding_an_empty_interval_changes_nothing():
    cover = cover_of(Interval(A, 2, 4), Interval(A, 3, 3), Interval(A, 6, 6), Interval(B, 0, 0))
    assert cut(cover, Interval(A, 0, 8)) == [(0, 2, False), (2, 4, True), (4, 8, False)]
    assert cut(cover, Interval(B, 0, 1)) == [(0, 1, False)]


def test_split_keeps_the_delta_and_the_propagation_of_what_it_cuts():
    cover = cover_of(Interval(A, 0, 3, delta=99))
    parts = list(cover.split(Interval(A, 1, 5, delta=-3, propagate=False)))
    assert parts == [
        (Interval(A, 1, 3, delta=-3, propagate=False), True),
        (Interval(A, 3, 5, delta=-3, propagate=False), False),
    ]


def test_an_empty_interval_has_no_parts_wherever_it_lies():
    cover = cover_of(Interval(A, 2, 8))
    assert [cut(cover, Interval(A, at, at)) for at in (0, 2, 5, 8, 9)] == [[], [], [], [], []]


@FAST
@given(st.lists(intervals(), max_size=12), intervals(shortest=1))
def test_a_cover_is_a_set_of_token_instances(added: list[Interval], asked: Interval):
    members = {one for interval in added for one in instances(interval)}
    parts = list(cover_of(*added).split(asked))
    assert [(one, inside) for part, inside in parts for one in instances(part)] == [
        (one, one in members) for one in instances(asked)
    ]
    assert all(len(part) for part, _ in parts)
    assert all(mine != next_ for (_, mine), (_, next_) in pairwise(parts)), "parts are the largest"
