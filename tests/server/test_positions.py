"""What each position policy does to the rows of a union.

What the policies mean for states is asked in `test_compile.py`, and for any DAG in `test_properties.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.plan import written_out
from anabranch_server.positions import concat, explicit, keep, right_aligned, same_start
from anabranch_server.segments import Interval, Segment
from anabranch_server.trunk import DELTA
from anabranch_server.union import Selection, Union, unite

FAST = settings(max_examples=80, deadline=None, derandomize=True, database=None)
A = Segment("a", 100, range(20), None)
B = Segment("b", 7, range(20), None)
NO_BASE: tuple[int | None, ...] = (None, None, None)

Part = tuple[int, int]
"""Effective position and length."""


def selections(*parts: Sequence[Interval]) -> list[Selection]:
    return [Selection(written_out(part), True) for part in parts]


def at(union: Union) -> list[Part]:
    """Where each row is."""
    view = union.view()
    return [(i.effective, len(i)) for i in view.trunk.intervals(view.rows)]


def parts_of(segments: Sequence[Segment]) -> st.SearchStrategy[list[Interval]]:
    """One interval each of some segments."""
    one = st.tuples(st.sampled_from(segments), st.integers(0, 18), st.integers(1, 20), st.integers(-7, 300))
    made = one.map(lambda drawn: Interval(drawn[0], drawn[1], max(drawn[1] + 1, drawn[2]), drawn[3]))
    return st.lists(made, max_size=5, unique_by=lambda interval: interval.segment)


def test_keep_moves_nothing_and_starts_one_past_the_largest_position_not_past_the_last_interval():
    union = unite(selections([Interval(A, 0, 3)], [Interval(B, 0, 20)]))
    assert keep(union) == 103
    assert at(union) == [(100, 3), (7, 20)]
    assert keep(unite(selections([Interval(B, 0, 20), Interval(A, 0, 3, delta=-90)]))) == 27


def test_concat_counts_visible_tokens_from_0():
    union = unite(selections([Interval(A, 2, 5), Interval(B, 4, 6, delta=10)], [Interval(B, 0, 1)]))
    assert concat(union) == 6
    assert union.columns[DELTA].tolist() == [-102, -8, -2]
    assert at(union) == [(0, 3), (3, 2), (5, 1)]


def test_concat_joins_what_becomes_continuous():
    union = unite(selections([Interval(A, 0, 2, delta=3)], [Interval(A, 2, 5, delta=-4)]))
    concat(union)
    assert at(union) == [(0, 5)]


def test_explicit_puts_the_lowest_position_on_the_base_and_keeps_all_distances():
    given_ = selections([Interval(A, 2, 5), Interval(B, 4, 6, delta=10), Interval(B, 0, 1)])
    union = unite(given_)  # effective 102, 21, 7: the lowest is the last
    assert explicit(union, given_, [1000], None) == 1098
    assert at(union) == [(1095, 3), (1014, 2), (1000, 1)]
    assert union.columns[DELTA].tolist() == [993, 1003, 993]


def test_explicit_moves_down_as_well_as_up_and_takes_the_start_that_is_given():
    given_ = selections([Interval(A, 2, 5)], [Interval(B, 0, 1)])
    union = unite(given_)
    assert explicit(union, given_, [0, None], 77) == 77
    assert at(union) == [(0, 3), (7, 1)]


def test_same_start_and_right_aligned_leave_what_is_shared():
    given_ = selections([Interval(B, 0, 5), Interval(A, 0, 2)], [Interval(B, 0, 5), Interval(A, 10, 14)])
    union = unite(given_, count=True)  # shared: 7 to 11
    assert same_start(union) == 16
    assert at(union) == [(7, 5), (12, 2), (12, 4)]
    union = unite(given_, count=True)
    assert right_aligned(union) == 16
    assert at(union) == [(7, 5), (14, 2), (12, 4)]


@pytest.mark.parametrize("policy", [keep, concat, same_start, right_aligned])
def test_nothing_is_at_no_place_and_new_tokens_begin_at_0(policy):
    assert policy(unite([], count=True)) == 0
    assert policy(unite(selections([], []), count=True)) == 0
    assert explicit(unite([]), [], [], None) == 0
    assert explicit(unite(selections([])), selections([]), [40], None) == 0


@FAST
@given(parts_of([A, B]), st.integers(0, 2000))
def test_explicit_is_rigid(part: list[Interval], base: int):
    given_ = selections(part)
    union = unite(given_)
    before = union.columns[DELTA].copy()
    explicit(union, given_, [base], None)
    places = [place for place, _ in at(union)]
    assert min(places, default=base) == base
    assert len(set((union.columns[DELTA] - before).tolist())) <= 1


@FAST
@given(st.lists(parts_of([A, B]), max_size=4))
def test_concat_gives_every_visible_token_its_running_number(given_: list[list[Interval]]):
    union = unite(selections(*given_))
    start = concat(union)
    assert [p for place, length in at(union) for p in range(place, place + length)] == list(range(start))
