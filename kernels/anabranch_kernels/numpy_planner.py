"""The planner in plain Python and numpy: serves where there is no C++ compiler, and is what `csrc/` is held to.

Slow (milliseconds), so it is written to be read: what the C++ planner does, bit for bit, without its shortcuts.

A plan is made in two steps. **Grouping** looks at contexts only: which tokens are seen by the same readers, and where
sharing pays. It is kept as long as the same rows with the same contexts come. **Cutting** looks at lengths, each step:
all runs are laid in one line, most shared first, and cut into bins of one capacity, the smallest that suffices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from anabranch_kernels.numpy_cutting import Task, binned, cut, line
from anabranch_kernels.numpy_grouping import Context, Interval, Request, Run, grouped
from anabranch_kernels.tasks import Int32s, Layout, Misfit, PlanTooLarge, TaskPlan

INT32 = np.iinfo(np.int32)


class Grouped(NamedTuple):
    """The grouping of the step before. It serves as long as what it depends on is the `same`."""

    same: object
    sharing: bool
    runs: list[Run]


class NumpyPlanner:
    """See `Planner`, which checks what it hands in here."""

    def __init__(self, table_width: int, kv_tile: int):
        self._table_width, self._tile = table_width, kv_tile
        self._contexts: dict[int, Context] = {}
        self._version = 0
        self._known: Grouped | None = None

    def set(self, row: int, intervals: np.ndarray) -> None:
        if not self._row_fits(row):
            raise Misfit.of_row(row)
        at, kept = 0, []
        for number, (key, start, stop, delta) in enumerate(intervals.tolist()):
            if not 0 <= start <= stop <= INT32.max or not INT32.min <= delta <= INT32.max:
                raise Misfit.of_interval(row, number)
            if at + stop - start > self._table_width:
                raise Misfit.of_interval(row, number)
            if stop > start:
                kept.append(Interval(key, start, stop, delta, at))
                at += stop - start
        self._version += 1
        self._contexts[row] = Context(tuple(kept), at, self._version)

    def _row_fits(self, row: int) -> bool:
        """Whether slots of the row can be named in 32 bits."""
        return row >= 0 and (row + 1) * self._table_width <= INT32.max

    def forget(self, row: int) -> None:
        self._contexts.pop(row, None)

    def plan(self, layout: Layout, rows: Int32s, kv_lengths: Int32s, new_tokens: Int32s, buffer: Int32s) -> TaskPlan:
        step = list(zip(*(numbers.tolist() for numbers in (rows, kv_lengths, new_tokens)), strict=True))
        requests: list[Request] = []
        n_rows = 0
        for index, (row, kv, n_new) in enumerate(step):
            context = self._contexts.get(row, Context())
            busy = kv > 0 and n_new > 0
            if n_new < 0 or not 0 <= kv <= self._table_width or not self._row_fits(row):
                raise Misfit.of_request(index)
            if busy and kv < context.length + n_new:
                raise Misfit.of_request(index)
            if busy:
                requests.append(Request(index, row, context, n_rows, n_new))
            n_rows += n_new
        if n_rows > layout.max_rows:
            raise PlanTooLarge("rows", n_rows, layout.max_rows)

        same = layout, requests, [(row, kv > 0, n_new) for row, kv, n_new in step]
        if self._known is None or self._known.same != same:
            self._known = Grouped(same, True, grouped(requests, layout, self._table_width, sharing=True))
        try:
            return self._cut(self._known.runs, layout, kv_lengths, n_rows, buffer)
        except PlanTooLarge:
            if not self._known.sharing:
                raise
        self._known = Grouped(same, False, grouped(requests, layout, self._table_width, sharing=False))
        return self._cut(self._known.runs, layout, kv_lengths, n_rows, buffer)

    def _cut(self, runs: Sequence[Run], layout: Layout, kv_lengths: Int32s, n_rows: int, buffer: Int32s) -> TaskPlan:
        own = [int(kv_lengths[run.own.index]) - run.own.context.length if run.own else 0 for run in runs]
        lengths = [run.context_tokens + more for run, more in zip(runs, own, strict=True)]
        chunks = cut(line(runs, layout), lengths, layout.n_bins, self._tile)
        copies = list(_copies(runs, own, self._table_width))
        return written(layout, n_rows, binned(runs, lengths, chunks, layout), copies, buffer)


def _copies(runs: Sequence[Run], own: Sequence[int], table_width: int) -> Iterator[tuple[int, int, int, int]]:
    """{from, to, length, 0} of each copy, in the order of `to`."""
    target = 0
    for run, own_tokens in zip(runs, own, strict=True):
        copies = [tuple(copy) for copy in run.copies]
        if run.own and run.joined:
            copies[-1] = (copies[-1][0], copies[-1][1] + own_tokens)
        elif run.own:
            copies.append((run.own.row * table_width + run.own.context.length, own_tokens))
        for source, length in copies:
            yield source, target, length, 0
            target += length


def written(
    layout: Layout, n_rows: int, bins: Sequence[Sequence[Task]], copies: Sequence[tuple[int, ...]], buffer: Int32s
) -> TaskPlan:
    """Raises PlanTooLarge, and then the buffer is as it was."""
    tasks = [task for bin in bins for task in bin]
    readers = [reader for task in tasks for reader in task.readers]
    n_slots = sum(length for _, _, length, _ in copies)
    for name, needed, capacity in (
        ("slots", n_slots, layout.max_slots),
        ("words", len(tasks) + len(readers) + len(copies), layout.max_words),
        ("partials", len(readers), layout.max_partials),
    ):
        if needed > capacity:
            raise PlanTooLarge(name, needed, capacity)
    plan = TaskPlan(layout, buffer, n_rows, len(tasks), len(readers), len(copies), len(readers), n_slots)

    counts = np.bincount([row for row, _, _ in readers], minlength=layout.max_rows)
    buffer[layout.pointers : layout.words] = len(readers)
    plan.pointers[:] = [0, *np.cumsum(counts)]
    free = plan.pointers.tolist()
    reader = len(tasks)
    for number, task in enumerate(tasks):
        plan.words[number] = task.slot, task.length, reader, len(task.readers) | task.flags
        for row, delta, seen in task.readers:
            plan.words[reader] = row, delta, free[row], seen
            free[row] += 1
            reader += 1
    plan.copies[:] = np.array(copies, dtype=np.int32).reshape(-1, 4)
    plan.bins[:] = 0
    first = 0
    for number, bin in enumerate(bins):
        plan.bins[number, 0, :2] = first, first + len(bin)
        if bin:
            plan.bins[number, 1] = plan.words[first]
        first += len(bin)
    return plan
