"""The page table of a plan: where its tokens lie in pages, and where they are seen, as arrays that go to a device.

It does not decide in which pages KV lies: a state's own tokens begin at slot 0 of a fresh page and run on from there,
so an interval may begin and end inside a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch_server.plan import ContextPlan
from anabranch_server.segments import Segment
from anabranch_server.trunk import DELTA, NATIVE, START, STOP

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """All arrays are int32 and read only. A row is a part of one page, in visible order; its valid slots follow each
    other. The rows of an interval follow each other too.

    `page`, `first`, `count`: [rows], the page, its first valid slot, and how many are valid.
    `first_row`, `row_count`, `delta`, `length`, `position`: [intervals], which rows, the shift, the number of tokens,
    and the effective position of the first one.
    `start` is the position of the first new token.
    """

    page_size: int
    page: Int32s
    first: Int32s
    count: Int32s
    first_row: Int32s
    row_count: Int32s
    delta: Int32s
    length: Int32s
    position: Int32s
    start: int

    def slots(self) -> Int64s:
        """The slot of each visible token in order, [tokens] int64."""
        return _counted_up(self.page.astype(np.int64) * self.page_size + self.first, self.count)

    def positions(self) -> Int64s:
        """The effective position of each visible token in order, [tokens] int64."""
        return _counted_up(self.position.astype(np.int64), self.length)


def page_table(plan: ContextPlan, page_size: int, slots_of: Callable[[Segment], Int64s]) -> PageTable:
    """`slots_of` gives the slots of all tokens of a segment, [tokens] int64: those of one page follow each other."""
    columns = plan.columns
    start, stop = columns[START], columns[STOP]
    first_page, end_page = start // page_size, -(-stop // page_size)
    row_count = end_page - first_page
    first_row = np.cumsum(row_count) - row_count
    parts = [np.empty(0, np.int64)]
    for segment, a, b in zip(plan.view.segments, first_page.tolist(), end_page.tolist(), strict=True):
        parts.append(slots_of(segment)[a * page_size : b * page_size : page_size])
    slots = np.concatenate(parts)
    assert not (slots % page_size).any(), "own tokens begin at slot 0 of a page"
    of = np.repeat(np.arange(len(start)), row_count)
    page_start = (np.arange(len(of)) - first_row[of] + first_page[of]) * page_size
    first = np.maximum(start[of] - page_start, 0)
    count = np.minimum(stop[of] - page_start, page_size) - first
    return PageTable(
        page_size,
        page=_frozen(slots // page_size),
        first=_frozen(first),
        count=_frozen(count),
        first_row=_frozen(first_row),
        row_count=_frozen(row_count),
        delta=_frozen(columns[DELTA]),
        length=_frozen(stop - start),
        position=_frozen(columns[NATIVE] + columns[DELTA]),
        start=plan.start,
    )


def _frozen(array: Int64s) -> Int32s:
    narrow = array.astype(np.int32)
    assert (narrow == array).all(), "a position or page number beyond 31 bits"
    narrow.flags.writeable = False
    return narrow


def _counted_up(first: Int64s, count: Int32s) -> Int64s:
    """`first[i], first[i] + 1, ...`, `count[i]` of them, for each i in turn."""
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(int(count.sum()))
