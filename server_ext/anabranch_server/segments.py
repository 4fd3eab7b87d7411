"""Segments and intervals: tokens whose KV exists once, and the parts of them that one consumer sees.

No policy, no ownership: who keeps a segment alive is `holdings.py`'s business, where an interval sits is
`positions.py`'s.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary


class Identity:
    """What living segments with one id share, because their tokens are the same instances. `number` is for columns,
    and is never used again; `given` numbers there were so far."""

    __slots__ = ("__weakref__", "number")
    given: ClassVar[int] = 0

    def __init__(self) -> None:
        self.number = Identity.given
        Identity.given += 1


_identities: WeakValueDictionary[str, Identity] = WeakValueDictionary()


JOINT = "+"
"""Between the parts of a derived segment's id, the state's and the mappers'. No id of a state has it."""


@dataclass(slots=True, eq=False)
class Segment:
    """The own tokens of one state. Token `i` was computed at native position `start + i`, while `context` was visible.

    `slots` is the engine's handle of where the KV lies; the core never looks into it. None: it is not in memory.
    `stamp` is what the KV was computed under, `owner` the tenant whose state it was.
    Two segments of one owner with one id have equal tokens: a state that was made again.
    `context` is None once something in it is gone: then the segment cannot be computed again.
    `mapper` names the cache mapper that made it of what is in its context; None: the model did. `origin` is then what
    the state saw whose tokens these are, None if that is not known.
    """

    id: str
    start: int
    tokens: Sequence[int]
    slots: Any
    context: tuple[Interval, ...] | None = ()
    stamp: Any = None
    owner: str = ""
    mapper: str | None = None
    origin: Seen | None = None
    identity: Identity = field(init=False, repr=False)

    def __post_init__(self) -> None:
        identity = _identities.get(self.id)
        if identity is None:
            identity = _identities[self.id] = Identity()
        self.identity = identity

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def state(self) -> str:
        """The id of the state whose tokens these are."""
        return self.id.partition(JOINT)[0]


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


Seen: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""A context by ids: two that are equal are the same tokens at the same positions."""


def seen(intervals: Iterable[Interval]) -> Seen:
    return tuple((one.segment.id, one.start, one.stop, one.delta) for one in intervals)


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
