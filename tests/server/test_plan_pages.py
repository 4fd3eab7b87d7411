"""The page table of a plan: expanding it gives back every slot and every position.

No pool: where segments lie is made up here.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from anabranch_server.pagetable import PageTable, page_table
from anabranch_server.plan import ContextPlan
from anabranch_server.segments import Interval, Segment
from tests.server.test_properties import random_graph


def scattered(page_size: int, seed: int = 0) -> Callable[[Segment], np.ndarray]:
    """Fresh pages for each segment, in no order."""
    dice, given, used = Random(seed), {}, set()

    def slots_of(segment: Segment) -> np.ndarray:
        if segment not in given:
            pages = []
            while len(pages) * page_size < len(segment):
                page = dice.randrange(10_000)
                if page not in used:
                    used.add(page)
                    pages.append(page)
            slots = [page * page_size + i for page in pages for i in range(page_size)]
            given[segment] = np.array(slots[: len(segment)], np.int64)
        return given[segment]

    return slots_of


def check(plan: ContextPlan, page_size: int, seed: int = 0) -> PageTable:
    slots_of = scattered(page_size, seed)
    table = page_table(plan, page_size, slots_of)
    assert table.slots().tolist() == [s for i in plan.intervals for s in slots_of(i.segment)[i.start : i.stop].tolist()]
    assert table.positions().tolist() == [p for i in plan.intervals for p in range(i.effective, i.end)]
    assert table.delta.tolist() == [interval.delta for interval in plan.intervals]
    assert table.length.tolist() == [len(interval) for interval in plan.intervals]
    assert table.start == plan.start
    row = 0
    for interval, first, count in zip(plan.intervals, table.first_row, table.row_count, strict=True):
        assert first == row
        assert table.count[first : first + count].sum() == len(interval)
        row += count
    assert len(table.page) == row
    assert ((table.first >= 0) & (table.first + table.count <= page_size) & (table.count > 0)).all()
    return table


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_expanding_a_table_gives_back_slots_and_positions(page_size: int):
    for seed in range(60):
        graph = random_graph(Random(seed), 2 + seed % 7)
        for state in graph.states.values():
            check(state.context, page_size, seed)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 7])
@pytest.mark.parametrize("stop", [8, 9, 11, 12, 13])
def test_an_interval_may_begin_and_end_inside_a_page(start: int, stop: int):
    segment = Segment("a", 10, range(13), None)
    table = check(ContextPlan((Interval(segment, start, stop, delta=-4),), 30), 4)
    assert table.first[0] == start % 4
    assert (table.first[-1] + table.count[-1] - stop) % 4 == 0


def test_pages_of_two_states_are_not_mixed_up():
    a, b = Segment("a", 0, range(5), None), Segment("b", 5, range(4), None)
    plan = ContextPlan((Interval(a, 3, 5), Interval(b, 0, 4), Interval(a, 0, 3)), 9)
    slots = {a: np.array([20, 21, 22, 23, 4]), b: np.array([8, 9, 10, 11])}
    table = page_table(plan, 4, slots.__getitem__)
    assert list(zip(table.page.tolist(), table.first.tolist(), table.count.tolist(), strict=True)) == [
        (5, 3, 1),
        (1, 0, 1),
        (2, 0, 4),
        (5, 0, 3),
    ]
    assert (table.first_row.tolist(), table.row_count.tolist()) == ([0, 2, 3], [2, 1, 1])


def test_an_empty_plan_has_an_empty_table():
    table = check(ContextPlan((), 7), 16)
    assert (len(table.page), len(table.length), table.start) == (0, 0, 7)


def test_a_table_is_int32_and_cannot_be_written():
    table = check(ContextPlan((Interval(Segment("a", 0, range(5), None), 0, 5),), 5), 4)
    arrays = [getattr(table, name) for name in PageTable.__slots__ if isinstance(getattr(table, name), np.ndarray)]
    assert len(arrays) == 8
    for array in arrays:
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_segment_that_does_not_begin_a_page_is_a_broken_promise():
    segment = Segment("a", 0, range(5), None)
    with pytest.raises(AssertionError, match="slot 0 of a page"):
        page_table(ContextPlan((Interval(segment, 0, 5),), 5), 4, lambda _: np.arange(2, 7))
