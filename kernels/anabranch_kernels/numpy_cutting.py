"""Cutting: runs of known lengths laid in one line and cut into bins of the smallest capacity that suffices.

It knows no contexts and writes no plan. `csrc/cutting.h` does the same fast, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from anabranch_kernels.numpy_grouping import TASK_TOKENS, Run, groups
from anabranch_kernels.tasks import CAUSAL, Layout, fresh_flags

LOCK_STEP = 8
"""So many reader groups of one run are cut alike into neighbouring bins, so that all but one read from the L2 cache."""
RESOLUTION = 16
"""Bin capacities are tried to so many tokens."""


class Item(NamedTuple):
    """`width` reader groups of a run, cut in lock step. cost: of each task besides its tokens."""

    run: int
    first_group: int
    width: int
    cost: int


class Chunk(NamedTuple):
    """Slots `begin:begin + length` of an item's run, for its groups in bins `first_bin` and on."""

    item: Item
    first_bin: int
    begin: int
    length: int


class Task(NamedTuple):
    slot: int
    length: int
    flags: int
    readers: list[tuple[int, int, int]]
    """(query row, delta, slots seen)"""


def line(runs: Sequence[Run], layout: Layout) -> list[Item]:
    items: list[Item] = []
    for number, run in enumerate(runs):
        n_groups = groups(len(run.readers), layout)
        biggest = -(-len(run.readers) // n_groups)
        cost = TASK_TOKENS + TASK_TOKENS * biggest // layout.readers_per_task
        widest = min(LOCK_STEP, layout.n_bins)
        n_items = -(-n_groups // widest)
        ends = [n_groups * i // n_items for i in range(n_items + 1)]
        items += [Item(number, a, b - a, cost) for a, b in pairwise(ends)]
    return items


def filled(items: Sequence[Item], lengths: Sequence[int], n_bins: int, tile: int, capacity: int) -> list[Chunk] | None:
    """The line cut into bins of a capacity, or None if there are too few bins."""
    loads = [0] * n_bins
    chunks: list[Chunk] = []
    bin = 0
    for item in items:
        begin = 0
        while begin < lengths[item.run]:
            if bin + item.width > n_bins:
                return None
            lanes = range(bin, bin + item.width)
            room = capacity - max(loads[lane] for lane in lanes) - item.cost
            left = lengths[item.run] - begin
            length = left if left <= room else max(room, 0) // tile * tile
            if length:
                chunks.append(Chunk(item, bin, begin, length))
                for lane in lanes:
                    loads[lane] += length + item.cost
            begin += length
            if begin < lengths[item.run]:
                bin += item.width
    return chunks


def cut(items: Sequence[Item], lengths: Sequence[int], n_bins: int, tile: int) -> list[Chunk]:
    """The line cut into bins of the smallest capacity found by bisection."""
    if not items:
        return []
    total = sum(item.width * (lengths[item.run] + item.cost) for item in items)
    low = max(max(item.cost for item in items) + tile, -(-total // n_bins))
    high = low
    while (best := filled(items, lengths, n_bins, tile, high)) is None:
        low, high = high, high + max(tile, high // 16)
    while high - low > RESOLUTION:
        middle = (low + high) // 2
        tried = filled(items, lengths, n_bins, tile, middle)
        if tried is None:
            low = middle
        else:
            high, best = middle, tried
    return best


def binned(runs: Sequence[Run], lengths: Sequence[int], chunks: Iterable[Chunk], layout: Layout) -> list[list[Task]]:
    """The tasks of each bin; those that must wait for a kernel before come last."""
    first_slot = [0, *accumulate(lengths)]
    bins: list[tuple[list[Task], list[Task]]] = [([], []) for _ in range(layout.n_bins)]
    for item, first_bin, begin, length in chunks:
        run = runs[item.run]
        n_groups = groups(len(run.readers), layout)
        old = lengths[item.run] - (run.own.n_new if run.own else 0)
        for lane in range(item.width):
            group = item.first_group + lane
            first, stop = (len(run.readers) * end // n_groups for end in (group, group + 1))
            readers = []
            for number in range(first, stop):
                limit = old + number + 1 if run.own else lengths[item.run]
                seen = min(limit - begin, length)
                if seen > 0:
                    readers.append((*run.readers[number], seen))
            if not readers:
                continue
            used = readers[-1][2]
            n_fresh = min(max(begin + used - old, 0), used)
            flags = fresh_flags(n_fresh) | CAUSAL * (readers[0][2] < used)
            bins[first_bin + lane][n_fresh > 0].append(Task(first_slot[item.run] + begin, used, flags, readers))
    return [before + after for before, after in bins]
