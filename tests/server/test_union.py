"""The union of selections, held against a dictionary of single tokens.

No spec and no policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server import union as union_module
from anabranch_server.plan import ContextPlan, View, written_out
from anabranch_server.segments import Interval, Segment
from anabranch_server.trunk import DELTA
from anabranch_server.union import Selection, unite

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)
LENGTH = 12
A = Segment("a", 100, range(LENGTH), None)
B = Segment("b", 200, range(LENGTH), None)
C = Segment("c", 0, range(LENGTH), None)

NUMBERS = count()

Instance = tuple[str, int]
Selected = tuple[list[Interval], bool]


def instances(interval: Interval) -> list[Instance]:
    return [(interval.segment.id, i) for i in range(interval.start, interval.stop)]


def expand(parts: Iterable[Interval]) -> list[tuple[Instance, int, bool]]:
    """Every token instance with its delta and whether it propagates, in order."""
    return [(one, part.delta, part.propagate) for part in parts for one in instances(part)]


def selection(*intervals: Interval, on: bool = True) -> Selection:
    return Selection(written_out(intervals), on)


def listed(view: View) -> list[Interval]:
    return list(ContextPlan.of(view, 0).intervals)


def united(*selections: Selection) -> list[Interval]:
    return listed(unite(selections).view())


@st.composite
def selected(draw: st.DrawFn) -> Selected:
    """Disjoint intervals, as one reference selects them."""
    taken: set[Instance] = set()
    found: list[Interval] = []
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, LENGTH - 1))
        stop = draw(st.integers(start + 1, LENGTH))
        one = Interval(draw(st.sampled_from([A, B, C])), start, stop, draw(st.sampled_from([-7, 0, 5])))
        if taken.isdisjoint(instances(one)):
            found.append(one)
            taken.update(instances(one))
    return found, draw(st.booleans())


def test_the_union_of_nothing_is_nothing():
    assert united() == []
    assert united(selection(), selection()) == []


def test_the_first_occurrence_decides_order_and_delta():
    parts = united(
        selection(Interval(A, 4, 8, delta=1)), selection(Interval(B, 0, 2)), selection(Interval(A, 2, 10, delta=7))
    )
    assert parts == [
        Interval(A, 4, 8, delta=1),
        Interval(B, 0, 2),
        Interval(A, 2, 4, delta=7),
        Interval(A, 8, 10, delta=7),
    ]


def test_an_instance_propagates_if_any_reference_to_it_does():
    parts = united(selection(Interval(A, 0, 10), on=False), selection(Interval(A, 3, 5, delta=9)))
    assert parts == [Interval(A, 0, 3, propagate=False), Interval(A, 3, 5), Interval(A, 5, 10, propagate=False)]
    for order in (1, -1):
        both = [selection(Interval(A, 0, 2)), selection(Interval(A, 0, 2), on=False)][::order]
        assert united(*both) == [Interval(A, 0, 2)]


def test_rows_of_one_trunk_that_only_some_hand_on_are_handed_on():
    view = written_out([Interval(A, 0, 12), Interval(B, 0, 12)])
    shorter = View(view.trunk, 1, view.summary)
    orders = [[(view, False), (shorter, True)], [(shorter, True), (view, False)]]
    for order in orders:
        parts = united(*(Selection(*one) for one in order))
        assert parts == [Interval(A, 0, 12), Interval(B, 0, 12, propagate=False)]


def test_equal_ids_do_not_make_one_segment_but_one_set_of_tokens():
    twin = Segment("a", 100, range(LENGTH), None)
    apart = [Interval(A, 0, 2), Interval(twin, 2, 4)]
    assert united(*(selection(one) for one in apart)) == apart
    assert united(selection(Interval(A, 0, 12)), selection(Interval(twin, 0, 12))) == [Interval(A, 0, 12)]


def test_neighbours_are_one_only_if_they_continue_each_other_with_equal_meaning():
    apart = [
        Interval(A, 0, 2),
        Interval(B, 2, 4),  # another segment
        Interval(B, 5, 6),  # a gap
        Interval(B, 6, 7, delta=1),  # another delta
        Interval(B, 0, 2, delta=1),  # goes back
    ]
    assert united(*(selection(one) for one in apart)) == apart
    assert united(selection(Interval(A, 0, 2)), selection(Interval(A, 2, 5))) == [Interval(A, 0, 5)]


@FAST
@given(st.lists(selected(), max_size=6), st.sampled_from([1, 1024]), st.booleans())
def test_the_union_agrees_with_a_dictionary_of_single_tokens(given_: list[Selected], long: int, sorts: bool):
    model: dict[Instance, tuple[int, bool]] = {}
    times: dict[Instance, int] = {}
    for intervals, on in given_:
        for interval in intervals:
            for one in instances(interval):
                delta, propagates = model.get(one, (interval.delta, False))
                model[one] = (delta, propagates or on)
                times[one] = times.get(one, 0) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(union_module, "LONG", long)
        if sorts:
            patch.setattr(union_module, "WIDEST_TABLE", 0)
        selections = [selection(*intervals, on=on) for intervals, on in given_]
        parts = united(*selections)
        counted = unite(selections, count=True)
    assert expand(parts) == [(one, delta, propagates) for one, (delta, propagates) in model.items()]
    assert all(map(len, parts))
    for mine, following in pairwise(parts):
        one = (mine.segment, mine.stop, mine.delta, mine.propagate)
        assert one != (following.segment, following.start, following.delta, following.propagate)
    assert counted.shared is not None
    rows = zip(counted.segments, counted.columns[1:3].T.tolist(), counted.shared.tolist(), strict=True)
    shared = {(segment.id, i): more for segment, (start, stop), more in rows for i in range(start, stop)}
    assert shared == {one: n > 1 for one, n in times.items()}


def chain(length: int) -> View:
    trunk, rows, seen = written_out([])
    for _ in range(length):
        segment = Segment(f"link {next(NUMBERS)}", rows, range(1), None)
        trunk, rows, seen = trunk.extended(rows, segment, 0, 1), rows + 1, seen.and_own(segment, 1)
    return View(trunk, rows, seen)


def test_a_union_of_chains_keeps_a_piece_for_each_and_no_rows():
    chains = [chain(500) for _ in range(8)]
    view = unite([Selection(one, True) for one in chains]).view()
    assert view.rows == 4000
    assert len(view.trunk.head.pieces) == 8
    assert len(view.trunk.own) == 0
    assert listed(view) == [interval for one in chains for interval in listed(one)]


def test_long_shared_beginnings_are_looked_at_once():
    trunk = chain(3000)
    forks: list[View] = []
    for i in range(64):
        segment = Segment(f"fork {i}", 3000, range(1), None)
        forks.append(View(trunk.trunk.extended(3000, segment, 0, 1), 3001, trunk.summary.and_own(segment, 1)))
    union = unite([Selection(one, True) for one in forks])
    assert len(union.segments) == 3064
    assert sum(len(run.segments) for run in union.runs) == 3064, "known rows were not even gathered"


def test_known_rows_of_long_joins_are_dropped_before_they_are_compared():
    base = [chain(1500), chain(1500)]
    joins = [unite([Selection(base[i], True), Selection(base[1 - i], True)]).view() for i in (0, 1)]
    union = unite([Selection(one, True) for one in joins])
    assert [len(run.segments) for run in union.runs] == [3000]


def test_moving_rows_one_by_one_is_written_out_where_pieces_would_cost_more():
    union = unite([Selection(chain(2000), True)])
    union.move(np.arange(2000)[::-1].copy())
    view = union.view()
    assert len(view.trunk.own) == 2000
    assert view.columns[DELTA].tolist() == list(range(1999, -1, -1))
