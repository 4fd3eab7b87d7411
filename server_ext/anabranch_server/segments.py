"""Segments and intervals: tokens whose KV exists once, and the parts of them that one consumer sees.

No policy, no ownership: who keeps a segment alive is `holdings.py`'s business, where an interval sits is
`positions.py`'s.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True, eq=False)
class Segment:
    """The own tokens of one state. Token `i` was computed at native position `start + i`, while `context` was visible.

    `slots` is the engine's handle of where the KV lies; the core never looks into it. None: it is not in memory.
    `stamp` is what the KV was computed under, `owner` the tenant whose state it was.
    Two segments of one owner with one id have equal tokens: a state that was made again.
    `context` is None once something in it is gone: then the segment cannot be computed again.
    """

    id: str
    start: int
    tokens: Sequence[int]
    slots: Any
    context: tuple[Interval, ...] | None = ()
    stamp: Any = None
    owner: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Interval:
    """Tokens `start:stop` of a segment as one consumer sees them: at native position plus `delta`."""

    segment: Segment
    start: int
    stop: int
    delta: int = 0
    propagate: bool = True

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def native(self) -> int:
        """Position at which the first token was computed."""
        return self.segment.start + self.start

    @property
    def effective(self) -> int:
        """Position at which the consumer sees the first token."""
        return self.native + self.delta

    @property
    def end(self) -> int:
        """One past the last effective position."""
        return self.effective + len(self)

    def moved(self, shift: int) -> Interval:
        return replace(self, delta=self.delta + shift)

    def part(self, start: int, stop: int) -> Interval:
        return replace(self, start=start, stop=stop)


@dataclass(slots=True)
class Cover:
    """A set of token instances, kept per segment as sorted disjoint runs."""

    _runs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, interval: Interval) -> None:
        if not len(interval):
            return
        runs = self._runs.setdefault(interval.segment.id, [])
        first = bisect_left(runs, interval.start, key=lambda run: run[1])
        last = bisect_right(runs, interval.stop, key=lambda run: run[0])
        touched = runs[first:last]
        start = min([interval.start, *(run[0] for run in touched)])
        stop = max([interval.stop, *(run[1] for run in touched)])
        runs[first:last] = [(start, stop)]

    def split(self, interval: Interval) -> Iterator[tuple[Interval, bool]]:
        """Cut an interval, in order, into its largest parts that are inside (True) or outside (False) the set."""
        if not len(interval):
            return
        at = interval.start
        for start, stop in self._runs.get(interval.segment.id, ()):
            if stop <= at or start >= interval.stop:
                continue
            if start > at:
                yield interval.part(at, start), False
            inside = interval.part(max(at, start), min(stop, interval.stop))
            yield inside, True
            at = inside.stop
        if at < interval.stop:
            yield interval.part(at, interval.stop), False


def unite(selections: Iterable[Sequence[Interval]]) -> list[Interval]:
    """The union of several references' intervals as a set of token instances.

    Order is by first occurrence, which also decides an instance's delta. An instance propagates if any of the
    references that select it does.
    """
    selections = list(selections)
    seen, handed_on = Cover(), Cover()
    union: list[Interval] = []
    for selection in selections:
        for interval in selection:
            union += [part for part, known in seen.split(interval) if not known]
            seen.add(interval)
            if interval.propagate:
                handed_on.add(interval)
    marked = (replace(part, propagate=on) for interval in union for part, on in handed_on.split(interval))
    return list(joined(marked))


def joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Glue neighbours that continue each other: the shortest list with the same meaning."""
    last: Interval | None = None
    for interval in intervals:
        if last is None:
            last = interval
        elif (
            last.segment is interval.segment
            and last.stop == interval.start
            and last.delta == interval.delta
            and last.propagate == interval.propagate
        ):
            last = replace(last, stop=interval.stop)
        else:
            yield last
            last = interval
    if last is not None:
        yield last
