"""The task plan: a batch plan cut into kernel work, as arrays on the device. What planner and kernels agree on.

It does not decide how the work is cut (`planner.py` does) and computes no attention.

A **run** is a list of KV slots that the same readers see. A **reader** is one query row: in decode one request, in a
short extend one new token. A **task** is a part of a run for up to `readers_per_task` readers; one thread block works
through a **bin** of tasks for one KV head. A task leaves one **partial** result for each of its readers, and the
partials of a query row follow each other.

Everything is int32 in one buffer, so that a step needs one copy to the device, at addresses that never change:

    bins    [n_bins, 2, 4]        {first task, end task, 0, 0}, then a copy of the first task
    pointers[max_rows + 1]        first partial of each query row; filled up with the last value
    words   [n_words, 4]          tasks, then readers, then copies; offsets count words from the first one

    task    {slot, length, reader, count | flags}    `length` >= 1 slots from `slot` on in `slots`; readers from word
                                                     `reader` on, `count` of them in the low 16 bits
    reader  {row, delta, partial, seen}              sees the first `seen` slots of the task's; `seen` >= 1
    copy    {from, to, length, 0}                    fills `slots`: from the flat `req_to_token`, before the kernels run
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FRESH = 1 << 16
"""Flag of a task: some of its slots, the last ones, are written by the kernel just before this one, which must be
waited for. How many is in the bits from `FRESH_SHIFT` on; 0 there: any of them may be."""
CAUSAL = 1 << 17
"""Flag of a task: some of its readers do not see all of its slots."""
COUNT = FRESH - 1
FRESH_SHIFT = 18
FRESH_MOST = (1 << 31 - FRESH_SHIFT) - 1

Int32s = NDArray[np.int32]


def fresh_flags(count: int) -> int:
    """Of a task whose last `count` slots are fresh."""
    return (FRESH if count else 0) | (count << FRESH_SHIFT if count <= FRESH_MOST else 0)


class PlanTooLarge(Exception):
    """A step needs more than the layout has room for. `what`: rows, words, partials or slots."""

    def __init__(self, what: str, needed: int, capacity: int):
        super().__init__(f"the step needs {needed} {what}, the layout has {capacity}: make `max_{what}` larger")
        self.what, self.needed, self.capacity = what, needed, capacity


class Misfit(ValueError):
    """What a planner was told of a row, or is asked of it, cannot be."""

    @classmethod
    def of_row(cls, row: int) -> Misfit:
        return cls(f"row {row}: the table of slots has no such row that 32 bits can reach")

    @classmethod
    def of_interval(cls, row: int, interval: int) -> Misfit:
        return cls(f"row {row}: interval {interval} ends before it starts, or beyond 32 bits or the table's width")

    @classmethod
    def of_request(cls, request: int) -> Misfit:
        return cls(f"request {request}: fewer tokens than its context and new ones, or more than a row has")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the buffer, and how much fits. All numbers of int32, words of four.

    n_bins: thread blocks per KV head. readers_per_task: query rows of one KV head that one tile holds.
    max_rows: query rows of a step. max_words: tasks, readers and copies together. max_partials, max_slots: of a step.
    """

    n_bins: int
    readers_per_task: int
    max_rows: int
    max_words: int
    max_partials: int
    max_slots: int

    @classmethod
    def for_requests(
        cls, n_bins: int, readers_per_task: int, *, requests: int, intervals: int, tokens: int, new_tokens: int = 1
    ) -> Layout:
        """Enough for any step of at most so many requests, of `intervals` context intervals and `new_tokens` new
        tokens each, that see at most `tokens` tokens in all, a token counted as often as it is seen.

        Each request read on its own always fits: it has one run per interval and one of its own tokens, all rows read
        each run, and each bin border cuts at most one task more. A plan that shares fits where intervals overlap
        wholly or not at all; where they overlap in so many ways that it does not, nothing is shared in that step.
        """
        runs = requests * (intervals + 1)
        tasks = runs * -(-new_tokens // readers_per_task) + n_bins
        partials = runs * new_tokens + n_bins * readers_per_task
        return cls(n_bins, readers_per_task, requests * new_tokens, tasks + partials + runs, partials, tokens)

    @property
    def pointers(self) -> int:
        """Offset of the pointers."""
        return 8 * self.n_bins

    @property
    def words(self) -> int:
        """Offset of the words, a multiple of 4."""
        return self.pointers + -(-(self.max_rows + 1) // 4) * 4

    @property
    def size(self) -> int:
        return self.words + 4 * self.max_words


@dataclass(frozen=True, slots=True, eq=False)
class TaskPlan:
    """One step's plan on the host. `buffer`: [layout.size] int32, of which the first `used` are set."""

    layout: Layout
    buffer: Int32s
    n_rows: int
    n_tasks: int
    n_readers: int
    n_copies: int
    n_partials: int
    n_slots: int

    @property
    def used(self) -> int:
        return self.layout.words + 4 * (self.n_tasks + self.n_readers + self.n_copies)

    @property
    def bins(self) -> Int32s:
        """[n_bins, 2, 4]"""
        return self.buffer[: self.layout.pointers].reshape(-1, 2, 4)

    @property
    def pointers(self) -> Int32s:
        """[max_rows + 1]"""
        return self.buffer[self.layout.pointers :][: self.layout.max_rows + 1]

    @property
    def words(self) -> Int32s:
        """[n_tasks + n_readers + n_copies, 4]"""
        return self.buffer[self.layout.words : self.used].reshape(-1, 4)

    @property
    def tasks(self) -> Int32s:
        """[n_tasks, 4]"""
        return self.words[: self.n_tasks]

    @property
    def copies(self) -> Int32s:
        """[n_copies, 4]"""
        return self.words[self.n_tasks + self.n_readers :]
