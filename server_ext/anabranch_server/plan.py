"""The context plan: which tokens a state sees, in contract order, each at which position, and where its own begin.

It is not the compiler (`compile.py` makes it) and holds no rows itself: it is the first so many rows of a trunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from anabranch_server.segments import Interval, Segment
from anabranch_server.trunk import DELTA, NATIVE, ON, START, STOP, Columns, Head, Piece, Rows, Trunk


class Summary(NamedTuple):
    """What is asked of a plan again and again, so that nobody has to look at its rows."""

    tokens: int = 0
    lowest: int = 0
    """Smallest effective position; 0 if there is none."""
    end: int = 0
    """One past the largest effective position; 0 if there is none."""
    shifted: bool = False
    """Something is seen elsewhere than where it was computed."""
    hides: bool = False
    """Something is not handed on."""
    whole: bool = True
    """Each row is known to be all tokens of its segment."""

    def and_own(self, segment: Segment, stop: int) -> Summary:
        """With the first `stop` own tokens of a segment, where they were computed."""
        return Summary(
            self.tokens + stop,
            min(self.lowest, segment.start) if self.tokens else segment.start,
            max(self.end, segment.start + stop),
            self.shifted,
            self.hides,
            self.whole and stop == len(segment),
        )


def summary(columns: Columns, whole: bool) -> Summary:
    if not columns.shape[1]:
        return Summary()
    lengths = columns[STOP] - columns[START]
    places = columns[NATIVE] + columns[DELTA]
    return Summary(
        int(lengths.sum()),
        int(places.min()),
        int((places + lengths).max()),
        bool(columns[DELTA].any()),
        not columns[ON].all(),
        whole,
    )


class View(NamedTuple):
    """The first `rows` rows of a trunk, one interval each."""

    trunk: Trunk
    rows: int
    summary: Summary

    @property
    def columns(self) -> Columns:
        return self.trunk.columns(self.rows)

    @property
    def segments(self) -> list[Segment]:
        return self.trunk.segments(self.rows)

    @property
    def handed_on(self) -> View:
        """Without what is not handed on."""
        if not self.summary.hides:
            return self
        columns = self.columns
        on = np.concatenate([[0], columns[ON], [0]])
        first, last = (on[1:] > on[:-1]).nonzero()[0], (on[1:] < on[:-1]).nonzero()[0]
        if not len(first):
            return View(Trunk(), 0, Summary())
        at = np.cumsum(last - first) - (last - first)
        pieces = tuple(
            Piece(row, self.trunk, *run) for row, *run in zip(at.tolist(), first.tolist(), last.tolist(), strict=True)
        )
        kept = Rows(columns[:, columns[ON] == 1], list(compress(self.segments, columns[ON].tolist())))
        seen = summary(kept.columns(0, len(kept)), self.summary.whole)
        return View(Trunk(Head(pieces, kept)), len(kept), seen)

    def hidden(self) -> View:
        """The same, but nothing is handed on."""
        if not self.rows:
            return self
        trunk = Trunk(Head((Piece(0, self.trunk, 0, self.rows, on=False),)))
        return View(trunk, self.rows, self.summary._replace(hides=True))


def written_out(intervals: Sequence[Interval]) -> View:
    """Intervals as rows of a trunk of their own."""
    if not intervals:
        return View(Trunk(), 0, Summary())
    columns = np.array(
        [(i.segment.identity.number, i.start, i.stop, i.native, i.delta, i.propagate) for i in intervals], np.int64
    )
    own = Rows(np.ascontiguousarray(columns.T), [interval.segment for interval in intervals])
    whole = all(len(interval) == len(interval.segment) for interval in intervals)
    return View(Trunk(own=own), len(own), summary(own.columns(0, len(own)), whole))


class ContextPlan:
    """Disjoint visible intervals in contract order, and the position of the first own token. Frozen."""

    __slots__ = ("_extended", "start", "view")

    view: View
    start: int
    _extended: tuple[Segment, View] | None
    """What children see that inherit all, once there is one."""

    def __init__(self, intervals: Sequence[Interval] = (), start: int = 0):
        self._set(written_out(intervals), start)

    @classmethod
    def of(cls, view: View, start: int) -> ContextPlan:
        plan = cls.__new__(cls)
        plan._set(view, start)
        return plan

    def _set(self, view: View, start: int) -> None:
        object.__setattr__(self, "view", view)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "_extended", None)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a plan is frozen: cannot set {name}")

    def __len__(self) -> int:
        """Number of visible tokens."""
        return self.view.summary.tokens

    def __eq__(self, other: object) -> bool:
        """Whether the same tokens are seen in the same order at the same positions, and handed on alike."""
        if not isinstance(other, ContextPlan):
            return NotImplemented
        return (
            (self.start, self.rows, len(self)) == (other.start, other.rows, len(other))
            and np.array_equal(self.columns, other.columns)
            and self.view.segments == other.view.segments
        )

    def __hash__(self) -> int:
        return hash((self.start, self.rows, len(self)))

    def __repr__(self) -> str:
        return f"ContextPlan({self.intervals!r}, {self.start})"

    # ------------------------------------------------------------ reading

    @property
    def rows(self) -> int:
        """Number of intervals."""
        return self.view.rows

    @property
    def intervals(self) -> tuple[Interval, ...]:
        return tuple(self.view.trunk.intervals(self.view.rows))

    @property
    def columns(self) -> Columns:
        """The intervals as columns, [6, rows] int64, named in `trunk.py`; read only."""
        columns = self.view.columns[:]
        columns.flags.writeable = False
        return columns

    @property
    def handed_on(self) -> tuple[Interval, ...]:
        """What a child that inherits sees of this context."""
        return tuple(interval for interval in self.intervals if interval.propagate)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that are read, each once, in order of first use."""
        return tuple(dict.fromkeys(self.view.segments))

    @property
    def shifted(self) -> bool:
        """Whether any token is seen elsewhere than where it was computed."""
        return self.view.summary.shifted

    def tokens(self) -> Iterator[int]:
        parts = self.columns[START : STOP + 1].T.tolist()
        for segment, (start, stop) in zip(self.view.segments, parts, strict=True):
            yield from segment.tokens[start:stop]

    # ------------------------------------------------------------ growing

    def extended(self, own: Segment, stop: int) -> View:
        """What a child sees that inherits the first `stop` tokens of `own`, which was computed in this context, and
        nothing else: what this plan hands on, and one more interval. The rows are shared, not copied."""
        known = self._extended
        if known is not None and known[0] is own and stop == len(own):
            return known[1]
        view = self.view.handed_on
        if stop:
            trunk = view.trunk.extended(view.rows, own, 0, stop)
            view = View(trunk, view.rows + 1, view.summary.and_own(own, stop))
        if stop == len(own):
            object.__setattr__(self, "_extended", (own, view))
        return view
