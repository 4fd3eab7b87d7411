"""The moves that position policies are made of.

Which policy moves what is asked in `test_compile.py`.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.positions import after_all, lay_end_to_end, shift_to
from anabranch_server.segments import Interval, Segment

FAST = settings(max_examples=80, deadline=None, derandomize=True, database=None)
A = Segment("a", 100, range(20), None)
B = Segment("b", 7, range(20), None)


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    start = draw(st.integers(0, 19))
    stop = draw(st.integers(start + 1, 20))
    return Interval(draw(st.sampled_from([A, B])), start, stop, draw(st.integers(-300, 300)), draw(st.booleans()))


def test_shift_to_puts_the_lowest_position_on_the_base_and_keeps_all_distances():
    selection = [Interval(A, 2, 5), Interval(B, 4, 6, delta=10), Interval(B, 0, 1, propagate=False)]
    # effective 102, 21, 7: the lowest is the last
    moved = shift_to(selection, 1000)
    assert [interval.effective for interval in moved] == [1095, 1014, 1000]
    assert [interval.delta for interval in moved] == [993, 1003, 993]
    assert [interval.propagate for interval in moved] == [True, True, False]


def test_shift_to_moves_down_as_well_as_up():
    (moved,) = shift_to([Interval(A, 2, 5)], 0)
    assert (moved.delta, moved.effective, moved.end) == (-102, 0, 3)


def test_shift_to_where_it_already_is_changes_nothing():
    selection = [Interval(A, 2, 5, delta=-2), Interval(B, 0, 1, delta=200)]
    assert shift_to(selection, 100) == selection


def test_shift_to_of_nothing_is_nothing():
    assert shift_to([], 5) == []


def test_shift_to_is_not_led_by_an_empty_interval():
    moved = shift_to([Interval(B, 3, 3), Interval(A, 2, 5)], 50)
    assert moved[1] == Interval(A, 2, 5, delta=-52)


def test_end_to_end_counts_visible_tokens_from_0():
    placed = lay_end_to_end([Interval(A, 2, 5), Interval(B, 4, 6, delta=10), Interval(B, 0, 1, propagate=False)])
    assert [(interval.effective, interval.end) for interval in placed] == [(0, 3), (3, 5), (5, 6)]
    assert [interval.delta for interval in placed] == [-102, -8, -2]
    assert [interval.propagate for interval in placed] == [True, True, False]


def test_end_to_end_joins_what_becomes_continuous():
    assert lay_end_to_end([Interval(A, 0, 2, delta=3), Interval(A, 2, 5, delta=-4)]) == [Interval(A, 0, 5, delta=-100)]


def test_end_to_end_of_nothing_is_nothing():
    assert lay_end_to_end([]) == []


def test_after_all_is_one_past_the_largest_position_not_past_the_last_interval():
    assert after_all([Interval(A, 0, 3), Interval(B, 0, 20)]) == 103
    assert after_all([Interval(B, 0, 20), Interval(A, 0, 3, delta=-90)]) == 27
    assert after_all([]) == 0


@FAST
@given(st.lists(intervals(), min_size=1, max_size=6), st.integers(0, 2000))
def test_shift_to_is_rigid(selection: list[Interval], base: int):
    moved = shift_to(selection, base)
    assert min(interval.effective for interval in moved) == base
    assert len({after.effective - before.effective for before, after in zip(selection, moved, strict=True)}) == 1
    assert shift_to(moved, selection[0].effective) == shift_to(selection, selection[0].effective)


@FAST
@given(st.lists(intervals(), max_size=6))
def test_end_to_end_gives_every_visible_token_its_running_number(given_: list[Interval]):
    placed = lay_end_to_end(given_)
    assert [p for interval in placed for p in range(interval.effective, interval.end)] == list(
        range(sum(map(len, given_)))
    )
    tokens = [(i.segment.id, t) for i in given_ for t in range(i.start, i.stop)]
    assert [(i.segment.id, t) for i in placed for t in range(i.start, i.stop)] == tokens
