"""Segments, covers and the union of intervals, held against models that know single token instances only.

No spec, no policy and no store.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.segments import Cover, Interval, Segment, joined, unite

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


def expand(parts: Iterable[Interval]) -> list[tuple[Instance, int, bool]]:
    """Every token instance with its delta and whether it propagates, in order."""
    return [(one, part.delta, part.propagate) for part in parts for one in instances(part)]


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


# ---------------------------------------------------------------- unite


def test_the_union_of_nothing_is_nothing():
    assert unite([]) == []
    assert unite([[], []]) == []
    assert unite([[Interval(A, 4, 4)], [Interval(B, 0, 0)]]) == []


def test_the_first_occurrence_decides_order_and_delta():
    union = unite([[Interval(A, 4, 8, delta=1)], [Interval(B, 0, 2)], [Interval(A, 2, 10, delta=7)]])
    assert union == [
        Interval(A, 4, 8, delta=1),
        Interval(B, 0, 2),
        Interval(A, 2, 4, delta=7),
        Interval(A, 8, 10, delta=7),
    ]


def test_repetition_inside_one_selection_is_seen_once_too():
    assert unite([[Interval(A, 0, 4), Interval(A, 2, 6, delta=3)]]) == [Interval(A, 0, 4), Interval(A, 4, 6, delta=3)]


def test_an_instance_propagates_if_any_reference_to_it_does():
    union = unite([[Interval(A, 0, 10, propagate=False)], [Interval(A, 3, 5, delta=9)]])
    assert union == [
        Interval(A, 0, 3, propagate=False),
        Interval(A, 3, 5),
        Interval(A, 5, 10, propagate=False),
    ]
    assert unite([[Interval(A, 0, 2)], [Interval(A, 0, 2, propagate=False)]]) == [Interval(A, 0, 2)]


def test_an_empty_interval_between_neighbours_does_not_part_them():
    assert unite([[Interval(A, 0, 2), Interval(B, 1, 1), Interval(A, 2, 4)]]) == [Interval(A, 0, 4)]
    assert unite([[Interval(A, 0, 6), Interval(A, 3, 3, delta=2), Interval(A, 6, 8)]]) == [Interval(A, 0, 8)]


@FAST
@given(st.lists(st.lists(intervals(), max_size=5), max_size=5))
def test_unite_agrees_with_a_dictionary_of_single_tokens(selections: list[list[Interval]]):
    model: dict[Instance, tuple[int, bool]] = {}
    for selection in selections:
        for interval in selection:
            for one in instances(interval):
                delta, propagates = model.get(one, (interval.delta, False))
                model[one] = (delta, propagates or interval.propagate)
    union = unite(selections)
    assert expand(union) == [(one, delta, propagates) for one, (delta, propagates) in model.items()]
    assert all(map(len, union))
    assert union == list(joined(union)), "no two neighbours could be one"


def test_unite_reads_each_selection_once_so_a_generator_will_do():
    assert unite(iter([(Interval(A, 0, 2),), (Interval(A, 2, 3),)])) == [Interval(A, 0, 3)]


# ---------------------------------------------------------------- joined


def test_joined_glues_only_what_continues_with_equal_meaning():
    apart = [
        Interval(A, 0, 2),
        Interval(B, 2, 4),  # another segment
        Interval(B, 5, 6),  # a gap
        Interval(B, 6, 7, delta=1),  # another delta
        Interval(B, 7, 8, delta=1, propagate=False),  # another propagation
        Interval(B, 0, 7, delta=1, propagate=False),  # goes back
        Interval(B, 7, 8, delta=1, propagate=False),
    ]
    assert list(joined(apart)) == [*apart[:5], Interval(B, 0, 8, delta=1, propagate=False)]
    assert list(joined([])) == []


def test_equal_ids_do_not_make_one_segment():
    twin = Segment("a", 100, range(LENGTH), None)
    apart = [Interval(A, 0, 2), Interval(twin, 2, 4)]
    assert list(joined(apart)) == apart


@FAST
@given(st.lists(intervals(shortest=1), max_size=8), st.data())
def test_joined_undoes_any_cutting_and_keeps_the_meaning(whole: list[Interval], data: st.DataObject):
    pieces = []
    for interval in whole:
        at = data.draw(st.integers(interval.start, interval.stop))
        pieces += [part for part in (interval.part(interval.start, at), interval.part(at, interval.stop)) if len(part)]
    glued = list(joined(pieces))
    assert expand(glued) == expand(whole)
    assert glued == list(joined(whole))
    for mine, following in pairwise(glued):
        one = (mine.segment, mine.stop, mine.delta, mine.propagate)
        assert one != (following.segment, following.start, following.delta, following.propagate)
