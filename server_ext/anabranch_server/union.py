"""The union of what several references select: a set of token instances, worked out on whole columns at a time.

It knows no spec and no policy: `compile.py` says what is selected, `positions.py` moves what is united here.

The order is that of the first occurrence, which also decides the delta; an instance is handed on if any reference that
selects it does so. Whole rows that occur again are found by their numbers; only rows that overlap in part are taken
apart one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch_server.plan import Summary, View, summary
from anabranch_server.segments import Cover, Identity, Interval, Segment
from anabranch_server.trunk import DELTA, NATIVE, NUMBER, ON, START, STOP, Columns, Head, Rows, Trunk, piece_of

Ints = NDArray[np.int64]
WIDEST_TABLE = 2**26
"""More numbers than this are sorted: a table has an entry for each, though only those are touched that are used."""
LONG = 128
"""Rows of one run from which on it pays to look at once which of them are known."""


class Selection(NamedTuple):
    """What one reference selects, as it arrives; all of it is handed on, or none."""

    view: View
    on: bool


class Run(NamedTuple):
    """Rows `first`... of a trunk, from one selection."""

    trunk: Trunk
    first: int
    selection: int
    columns: Columns
    segments: Sequence[Segment]


@dataclass(slots=True)
class Union:
    """Visible rows in compiled order, on the way to a plan. Each array has one entry a row, [rows].

    `columns` are as in a trunk. `selection` is the one that the row came from, `shared` says whether others select it
    too (None: nobody asked), `shift` is what moved it. `run` and `row` say where it is found, unless it was cut: -1.
    `whole`: each row is known to be all tokens of its segment.
    """

    runs: list[Run]
    segments: list[Segment]
    columns: Columns
    selection: Ints
    run: Ints
    row: Ints
    shift: Ints
    whole: bool
    shared: NDArray[np.bool_] | None = None

    def move(self, by: Ints | int) -> None:
        self.columns[DELTA] += by
        self.shift += by

    def keep(self, rows: Ints) -> None:
        """Keep these rows only, in this order."""
        self.columns = self.columns.take(rows, axis=1)
        self.segments = [self.segments[i] for i in rows.tolist()]
        for name in ("selection", "run", "row", "shift", "shared"):
            if (array := getattr(self, name)) is not None:
                setattr(self, name, array.take(rows))

    def view(self) -> View:
        """Done: the rows in a trunk of their own, which copies nothing that is found elsewhere."""
        self._glue()
        rows = len(self.segments)
        if not rows:
            return View(Trunk(), 0, Summary())
        if -1 in self.run:
            self._write_cut_rows()
        seen = summary(self.columns, self.whole)
        breaks = (self.run[1:] != self.run[:-1]) | (self.row[1:] != self.row[:-1] + 1)
        breaks |= (self.shift[1:] != self.shift[:-1]) | (self.columns[ON, 1:] != self.columns[ON, :-1])
        at = np.concatenate([[0], breaks.nonzero()[0] + 1])
        written = Rows(self.columns, self.segments)
        if 3 * len(at) > rows:  # pieces would be larger than what they describe
            return View(Trunk(own=written), rows, seen)
        trunks = [self.runs[run].trunk for run in self.run[at].tolist()]
        first, shift, on = self.row[at], self.shift[at].tolist(), (self.columns[ON, at] == 1).tolist()
        last = first + np.diff(at, append=rows)
        pieces = map(piece_of, at.tolist(), trunks, first.tolist(), last.tolist(), shift, on)
        return View(Trunk(Head(tuple(pieces), written)), rows, seen)

    def _glue(self) -> None:
        """Make one row of neighbours that continue each other: the shortest list with the same meaning."""
        columns = self.columns
        same = columns[NUMBER, 1:] == columns[NUMBER, :-1]
        if not same.any():
            return
        same &= columns[STOP, :-1] == columns[START, 1:]
        for name in (DELTA, ON):
            same &= columns[name, 1:] == columns[name, :-1]
        for i in same.nonzero()[0].tolist():
            same[i] = self.segments[i] is self.segments[i + 1]
        firsts = np.concatenate([[True], ~same]).nonzero()[0]
        lasts = np.concatenate([~same, [True]]).nonzero()[0]
        ends = columns[STOP, lasts]
        self.keep(firsts)
        self.columns[STOP] = ends
        self.run[lasts > firsts] = -1

    def _write_cut_rows(self) -> None:
        cut = (self.run == -1).nonzero()[0]
        own = Rows(self.columns[:, cut], [self.segments[i] for i in cut.tolist()])
        self.run[cut] = len(self.runs)
        self.row[cut] = np.arange(len(cut))
        self.shift[cut] = 0
        self.runs.append(Run(Trunk(own=own), 0, 0, self.columns[:, :0], ()))


def unite(selections: Sequence[Selection], *, count: bool = False) -> Union:
    """The union of `selections`. With `count`, it is known afterwards which rows several of them select."""
    union = _gathered(_runs(selections, skip=not count), selections)
    if count:
        union.shared = np.zeros(len(union.segments), bool)
    numbers = union.columns[NUMBER]
    first = _first_rows(numbers)
    again = (first != np.arange(len(first))).nonzero()[0]
    if not len(again):
        return union
    known = first[again]
    equal = (union.columns[START : STOP + 1, again] == union.columns[START : STOP + 1, known]).all(axis=0)
    tangled = np.isin(numbers, numbers[again[~equal]]) if not equal.all() else np.zeros(len(first), bool)
    equal &= ~tangled[again]
    again, known = again[equal], known[equal]
    union.columns[ON, known[union.columns[ON, again] == 1]] = 1
    if union.shared is not None:
        union.shared[known] = True
    keep = np.ones(len(first), bool)
    keep[again] = False
    _disentangle(union, keep, tangled)
    return union


def _runs(selections: Sequence[Selection], *, skip: bool) -> list[Run]:
    """The rows of all selections in order; with `skip`, without most of those that are known already."""
    runs: list[Run] = []
    taken: tuple[dict[Any, int], dict[Any, int]] = {}, {}
    """By trunk and by head, how many rows were taken so far: not handed on, and handed on."""
    for k, (view, on) in enumerate(selections):
        mine: list[Run] = []
        trunk, rows = view.trunk, view.rows
        known, other = taken[on], taken[True]
        while rows:
            head, done = trunk.head, 0
            if skip:
                done = known.get(trunk, 0)
                if not on:
                    done = max(done, other.get(trunk, 0))
                if done >= rows:
                    break
                known[trunk] = rows
            base = head.rows
            if rows > base:
                own, first, last = trunk.own, max(done - base, 0), rows - base
                part = own.segments[first:last] if first or last < len(own) else own.segments
                mine.append(Run(trunk, first + base, k, own.columns(first, last), part))
            if done or not base or (skip and (head in known or (not on and head in other))):
                break
            known[head] = base
            if head.source is None:
                block = head.block()
                mine.append(Run(trunk, 0, k, block.columns(0, base), block.segments))
                break
            trunk, rows = head.source.trunk, head.source.last
        mine.reverse()
        runs += mine
    return _without_known(runs, selections) if skip and not (taken[False] and taken[True]) else runs


def _without_known(runs: list[Run], selections: Sequence[Selection]) -> list[Run]:
    """Drop the known rows of long heads, for speed only: `unite` would find them too. Joins overlap much, and what a
    trunk owns seldom does. Where rows are whole segments, equal numbers are equal rows."""
    long = [len(run.segments) >= LONG and run.first < run.trunk.head.rows for run in runs]
    if sum(long) < 2 or Identity.given > WIDEST_TABLE:
        return runs
    seen = np.zeros(Identity.given, bool)
    left: list[Run] = []
    for run, may_overlap in zip(runs, long, strict=True):
        numbers = run.columns[NUMBER]
        if not selections[run.selection].view.summary.whole:
            left.append(run)
        elif not may_overlap:
            left.append(run)
            seen[numbers] = True
        else:
            new = (~seen.take(numbers)).nonzero()[0]
            seen[numbers.take(new)] = True
            if len(new) > 64:
                left.append(run)
            else:
                left += _stretches(run, new.tolist())
    return left


def _stretches(run: Run, rows: list[int]) -> Iterator[Run]:
    """A few rows of a run, as runs."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            a, b = rows[first], rows[i - 1] + 1
            yield Run(run.trunk, run.first + a, run.selection, run.columns[:, a:b], run.segments[a:b])
            first = i


def _gathered(runs: list[Run], selections: Sequence[Selection]) -> Union:
    """All rows of all runs, none of them moved."""
    lengths = np.array([len(run.segments) for run in runs], np.int64)
    total = int(lengths.sum())
    columns = np.concatenate([np.empty((6, 0), np.int64), *(run.columns for run in runs)], axis=1)
    chosen = np.array([run.selection for run in runs], np.int64)
    first = np.array([run.first for run in runs], np.int64) - (np.cumsum(lengths) - lengths)
    run = np.repeat(np.arange(len(runs)), lengths)  # the others by looking up: repeating takes several times as long
    columns[ON] = np.array([selection.on for selection in selections], np.int64)[chosen].take(run)
    return Union(
        runs,
        list(chain.from_iterable(run.segments for run in runs)),
        columns,
        selection=chosen.take(run),
        run=run,
        row=first.take(run) + np.arange(total),
        shift=np.zeros(total, np.int64),
        whole=all(selection.view.summary.whole for selection in selections),
    )


def _first_rows(numbers: Ints) -> Ints:
    """For each row the first one with the same number, [rows]."""
    if Identity.given > WIDEST_TABLE:
        _, first, of = np.unique(numbers, return_index=True, return_inverse=True)
        return first[of]
    table = np.empty(Identity.given, np.int64)
    table[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the last one written stays
    return table.take(numbers)


def _disentangle(union: Union, keep: NDArray[np.bool_], tangled: NDArray[np.bool_]) -> None:
    """Keep the rows that are marked; of the tangled ones, what is not seen before, cut where it differs."""
    if not tangled.any():
        union.keep(keep.nonzero()[0])
        return
    seen, on, twice = Cover(), Cover(), Cover()
    new: list[tuple[int, Interval]] = []
    for i in tangled.nonzero()[0].tolist():
        start, stop, handed_on = union.columns[[START, STOP, ON], i].tolist()
        interval = Interval(union.segments[i], start, stop, propagate=bool(handed_on))
        for part, known in seen.split(interval):
            if not known:
                new.append((i, part))
            elif union.shared is not None:
                twice.add(part)
        seen.add(interval)
        if handed_on:
            on.add(interval)
    parts = [
        (i, part.start, part.stop, handed_on, shared)
        for i, whole in new
        for half, handed_on in on.split(whole)
        for part, shared in twice.split(half)
    ]
    kept = (keep & ~tangled).nonzero()[0]
    i, start, stop, handed_on, shared = np.array(parts, np.int64).T
    order = np.argsort(np.concatenate([kept, i]), kind="stable")
    union.keep(np.concatenate([kept, i])[order])
    at = np.argsort(order, kind="stable")[len(kept) :]  # where the parts came to lie
    columns = union.columns
    cut = (columns[START, at] != start) | (columns[STOP, at] != stop)
    columns[NATIVE, at] += start - columns[START, at]
    columns[START, at], columns[STOP, at], columns[ON, at] = start, stop, handed_on
    union.run[at[cut]] = -1
    if union.shared is not None:
        union.shared[at] = shared
