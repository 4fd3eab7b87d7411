"""Trunks: the rows of many context plans, kept once. A plan is the first so many rows of one trunk.

It is not the compiler: it stores rows and gives them back, and never asks what they mean together.

A trunk grows at its tip only, so a row that a plan sees never changes. What other trunks hold already is not copied:
a trunk may begin with a head, which is made of pieces of others. So a state costs memory for its own references only.
The columns of a head can be written out again at any time; those written out last are kept on a shelf of fixed size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from anabranch_server.segments import Interval, Segment

Columns = NDArray[np.int64]
"""Rows as columns, [6, rows] int64: see the names below."""
NUMBER, START, STOP, NATIVE, DELTA, ON = range(6)
"""Identity of the segment; its tokens; position of the first at which it was computed; shift; is it handed on."""
SHELF_ROWS = 2**20  # 56 bytes each


class Rows:
    """Rows that are written out. Only appended to; intervals are made when they are first asked for."""

    __slots__ = ("_columns", "_intervals", "segments")

    def __init__(self, columns: Columns | None = None, segments: list[Segment] | None = None):
        self._columns = np.empty((6, 0), np.int64) if columns is None else columns
        self.segments: list[Segment] = [] if segments is None else segments
        self._intervals: list[Interval] = []

    def __len__(self) -> int:
        return len(self.segments)

    def columns(self, first: int, last: int) -> Columns:
        return self._columns[:, first:last]

    def append(self, segment: Segment, start: int, stop: int, delta: int, on: bool) -> None:
        n = len(self.segments)
        if n == self._columns.shape[1]:
            grown = np.empty((6, 2 * n or 1), np.int64)  # what sees the old array may go on seeing it
            grown[:, :n] = self._columns
            self._columns = grown
        self._columns[:, n] = (segment.identity.number, start, stop, segment.start + start, delta, on)
        self.segments.append(segment)

    def holds(self, at: int, segment: Segment, start: int, stop: int) -> bool:
        """Whether row `at` is these tokens, where they were computed, handed on."""
        if self.segments[at] is not segment:
            return False
        _, begin, end, _, delta, on = self._columns[:, at].tolist()
        return (begin, end, delta, on) == (start, stop, 0, 1)

    def intervals(self, first: int, last: int) -> list[Interval]:
        made = self._intervals
        if len(made) < last:
            n = len(made)
            rest = self._columns[START:, n:last].T.tolist()
            for segment, (start, stop, _, delta, on) in zip(self.segments[n:last], rest, strict=True):
                made.append(Interval(segment, start, stop, delta, bool(on)))
        return made[first:last]


class Piece(NamedTuple):
    """From row `at` of a head on: rows `first:last` of a trunk, moved by `shift`, all handed on or none."""

    at: int
    trunk: Trunk
    first: int
    last: int
    shift: int = 0
    on: bool = True


def find(pieces: Sequence[Piece], row: int) -> int:
    """Which piece holds this row of a head."""
    return bisect_left(pieces, (row + 1,)) - 1


def piece_of(at: int, trunk: Trunk, first: int, last: int, shift: int, on: bool) -> Piece:
    """These rows from where they are found at last: so that one row of an old context is never a long way off."""
    while last <= trunk.head.rows:
        found = trunk.head.pieces[find(trunk.head.pieces, first)]
        begin = found.first + first - found.at
        if begin + last - first > found.last:
            break
        trunk, first, last, shift = found.trunk, begin, begin + last - first, shift + found.shift
    return Piece(at, trunk, first, last, shift, on)


class Head:
    """Rows that are found in other trunks. `source` is the only piece, if they are just the first rows of a trunk, the
    whole head of that one among them."""

    __slots__ = ("__weakref__", "pieces", "rows", "source", "written")

    def __init__(self, pieces: Sequence[Piece], written: Rows | None = None):
        self.pieces = pieces
        self.rows = pieces[-1].at + pieces[-1].last - pieces[-1].first if pieces else 0
        self.source = pieces[0] if len(pieces) == 1 and _is_beginning(pieces[0]) else None
        self.written: Rows | None = None
        if written is not None:
            _shelf.put(self, written)

    def block(self) -> Rows:
        """All rows, written out."""
        if self.written is None:
            _shelf.put(self, Rows(*_write(self, 0, self.rows)))
        else:
            _shelf.touch(self)
        assert self.written is not None
        return self.written


def _is_beginning(piece: Piece) -> bool:
    return piece.first == piece.shift == 0 and piece.on and piece.last >= piece.trunk.head.rows


NO_HEAD = Head(())


class Trunk:
    """A head, and own rows after it."""

    __slots__ = ("head", "own")

    def __init__(self, head: Head = NO_HEAD, own: Rows | None = None):
        self.head = head
        self.own = Rows() if own is None else own

    def extended(self, rows: int, segment: Segment, start: int, stop: int) -> Trunk:
        """A trunk whose first `rows` rows are those of this one, and whose next row is these tokens, handed on, where
        they were computed. It is this one if nothing else was put there."""
        at = rows - self.head.rows
        assert 0 <= at <= len(self.own)
        trunk = self
        if at < len(self.own):
            if self.own.holds(at, segment, start, stop):
                return self
            trunk = Trunk(self.head if at == 0 else Head((Piece(0, self, 0, rows),)))
        trunk.own.append(segment, start, stop, 0, True)
        return trunk

    def columns(self, rows: int) -> Columns:
        """The first `rows` rows, [6, rows] int64."""
        if not self.head.rows:
            return self.own.columns(0, rows)
        if self.head.source is not None:
            return _write(self, 0, rows)[0]
        return np.concatenate([self.head.block().columns(0, self.head.rows), self._own_columns(rows)], axis=1)

    def segments(self, rows: int) -> list[Segment]:
        return [one for part, first, last in self._parts(rows) for one in part.segments[first:last]]

    def intervals(self, rows: int) -> list[Interval]:
        return [one for part, first, last in self._parts(rows) for one in part.intervals(first, last)]

    def _own_columns(self, rows: int) -> Columns:
        return self.own.columns(0, rows - self.head.rows)

    def _parts(self, rows: int) -> list[tuple[Rows, int, int]]:
        """What the first rows are made of, written out: branches are followed, so that trunks share what they can."""
        parts: list[tuple[Rows, int, int]] = []
        trunk = self
        while True:
            head = trunk.head
            parts.append((trunk.own, 0, rows - head.rows))
            if head.source is None:
                break
            trunk, rows = head.source.trunk, head.source.last
        if head.rows:
            parts.append((head.block(), 0, head.rows))
        return parts[::-1]


class _Shelf:
    """Heads that are written out, the least recently used first; of the others nothing is kept but their pieces."""

    def __init__(self) -> None:
        self._rows: OrderedDict[ref[Head], int] = OrderedDict()
        self._total = 0

    def put(self, head: Head, written: Rows) -> None:
        head.written = written
        key = ref(head, self._forget)
        self._rows[key] = cost = len(written) + 8
        self._total += cost
        while self._total > SHELF_ROWS and len(self._rows) > 1:
            oldest = next(iter(self._rows))
            if (other := oldest()) is not None:
                other.written = None
            self._forget(oldest)

    def touch(self, head: Head) -> None:
        self._rows.move_to_end(ref(head))

    def clear(self) -> None:
        for key in list(self._rows):
            if (head := key()) is not None:
                head.written = None
            self._forget(key)

    def _forget(self, key: ref[Head]) -> None:
        self._total -= self._rows.pop(key, 0)


_shelf = _Shelf()
clear_shelf: Callable[[], None] = _shelf.clear
"""Forget all that can be written out again. Changes the time that things take, and nothing else."""


class _Task(NamedTuple):
    source: Trunk | Head
    first: int
    last: int
    shift: int
    on: bool | None
    at: int


def _write(source: Trunk | Head, first: int, last: int) -> tuple[Columns, list[Segment]]:
    """Write rows out, without recursion: branches may lie thousands deep."""
    columns = np.empty((6, last - first), np.int64)
    segments: list[Segment | None] = [None] * (last - first)
    todo = [_Task(source, first, last, 0, None, 0)]
    while todo:
        source, first, last, shift, on, at = todo.pop()
        rows: Rows | None = None
        if isinstance(source, Trunk):
            border = source.head.rows
            if first < border:
                todo.append(_Task(source.head, first, min(last, border), shift, on, at))
            if last > border:
                at += max(0, border - first)
                first, last, rows = max(0, first - border), last - border, source.own
        elif source.written is not None:
            rows = source.written
        else:
            todo += _tasks(source.pieces, first, last, shift, on, at)
        if rows is not None:
            to = slice(at, at + last - first)
            columns[:, to] = rows.columns(first, last)
            segments[to] = rows.segments[first:last]
            if shift:
                columns[DELTA, to] += shift
            if on is not None:
                columns[ON, to] = on
    return columns, segments  # pyright: ignore[reportReturnType] - every row has been written


def _tasks(pieces: Sequence[Piece], first: int, last: int, shift: int, on: bool | None, at: int) -> Iterable[_Task]:
    i = find(pieces, first)
    while i < len(pieces) and pieces[i].at < last:
        piece = pieces[i]
        begin = max(first, piece.at)
        skip = begin - piece.at
        size = min(last - begin, piece.last - piece.first - skip)
        mine = piece.on if on is None else on
        start = piece.first + skip
        yield _Task(piece.trunk, start, start + size, shift + piece.shift, mine, at + begin - first)
        i += 1
