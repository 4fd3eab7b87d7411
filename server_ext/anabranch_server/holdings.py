"""Holdings: whose KV is in memory, who still needs it, and what can be dropped and computed again.

Three things keep a part of a segment: states that own or hand it on, requests that read it, and segments out of memory
that need it to come back. A page of which nothing keeps a token is freed at once. It knows neither ids nor keys
(`store.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from anabranch_server.segments import Interval, Segment

Run = tuple[int, int]


@dataclass(slots=True)
class Keepers:
    """How many need each of `size` tokens, as runs of equal count. A token whose count fell to 0 is gone for good."""

    size: int
    total: int = 0
    """Number of tokens that something needs."""
    shared: int = 0
    """Number of tokens that several need."""
    _starts: list[int] = field(default_factory=lambda: [0])
    _counts: list[int] = field(default_factory=lambda: [0])

    def add(self, start: int, stop: int) -> None:
        for i in self._cut(start, stop):
            self._count(i, +1)
        self._glue(start, stop)

    def remove(self, start: int, stop: int) -> list[Run]:
        """Returns the runs that nothing needs any more."""
        gone: list[Run] = []
        for i in self._cut(start, stop):
            assert self._counts[i] > 0, "let go too often"
            self._count(i, -1)
            if not self._counts[i]:
                gone.append((self._starts[i], self._end(i)))
        self._glue(start, stop)
        return gone

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, count) of all tokens that something needs."""
        for i, count in enumerate(self._counts):
            if count:
                yield self._starts[i], self._end(i), count

    def _end(self, i: int) -> int:
        return self._starts[i + 1] if i + 1 < len(self._starts) else self.size

    def _cut(self, start: int, stop: int) -> range:
        """Indices of the runs that make up `start:stop`, which are split off where needed."""
        if start == stop:
            return range(0)
        for at in (start, stop):
            i = bisect_right(self._starts, at) - 1
            if self._starts[i] != at and at < self.size:
                self._starts.insert(i + 1, at)
                self._counts.insert(i + 1, self._counts[i])
        first = bisect_right(self._starts, start) - 1
        return range(first, bisect_right(self._starts, stop - 1))

    def _count(self, i: int, by: int) -> None:
        before, length = self._counts[i], self._end(i) - self._starts[i]
        self._counts[i] = after = before + by
        self.total += length * ((after > 0) - (before > 0))
        self.shared += length * ((after > 1) - (before > 1))

    def _glue(self, start: int, stop: int) -> None:
        i = max(1, bisect_right(self._starts, start) - 1)
        while i < len(self._starts) and self._starts[i] <= stop:
            if self._counts[i] == self._counts[i - 1]:
                del self._starts[i], self._counts[i]
            else:
                i += 1


@dataclass(slots=True)
class Holding:
    """One segment that something needs. `pins` counts the requests in flight that read it."""

    keepers: Keepers
    pins: int = 0
    users: dict[Segment, None] = field(default_factory=dict)
    """Segments that were computed while some of this one was visible."""


@dataclass(slots=True)
class Holdings:
    """All segments of one server rank. `free(slots, start, stop)` gives the KV of some tokens back to the pool.

    With `evicts` off, whatever is held stays in memory. Token `i` of a segment lies in its page `i // page_size`, and
    no page has tokens of two segments. Pages are kept and freed whole: every count of tokens in here is one of their
    slots, and what is freed begins and ends at a page bound, of which the last may lie beyond the segment's end.
    """

    free: Callable[[Any, int, int], None]
    evicts: bool = True
    page_size: int = 1
    held_tokens: int = 0
    """In memory."""
    reclaimable_tokens: int = 0
    """Of these, what `evict` could free now."""
    owned_tokens: Counter[str] = field(default_factory=Counter)
    """By owner, in memory or not."""
    on_event: Callable[[str, str], None] = lambda owner, event: None
    """Told of evictions and rebuilds."""
    _all: dict[Segment, Holding] = field(default_factory=dict)
    _named: dict[tuple[str, str], list[Segment]] = field(default_factory=dict)
    _derived: dict[tuple[str, str], list[Segment]] = field(default_factory=dict)
    _idle: OrderedDict[Segment, None] = field(default_factory=OrderedDict)
    """What could be evicted, the least recently used first."""

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._all

    def named(self, owner: str, segment_id: str) -> list[Segment]:
        """Segments with this id that something needs."""
        return self._named.get((owner, segment_id), [])

    def derived(self, owner: str, state_id: str) -> list[Segment]:
        """What mappers made of this state's tokens, and something needs."""
        return self._derived.get((owner, state_id), [])

    def items(self) -> Iterable[tuple[Segment, Holding]]:
        return self._all.items()

    def in_pages(self, tokens: int) -> int:
        """How many slots the pages have that `tokens` tokens of one segment need."""
        return -(-tokens // self.page_size) * self.page_size

    def evictable(self, segment: Segment) -> bool:
        return self.evicts and segment.slots is not None and segment.context is not None and not self._all[segment].pins

    # ------------------------------------------------------------ keeping

    def hold(self, segment: Segment) -> None:
        """A new segment, whose owner needs all of it."""
        assert segment not in self._all and segment.slots is not None
        size = self.in_pages(len(segment))
        self._all[segment] = holding = Holding(Keepers(size))
        self._named.setdefault((segment.owner, segment.id), []).append(segment)
        holding.keepers.add(0, size)
        self.held_tokens += size
        self._owned(segment, size)
        for interval in segment.context or ():
            self._all[interval.segment].users[segment] = None
        self._settle(segment)

    def adopt(self, segment: Segment) -> None:
        """A new derived segment, which is out of memory: the tokens that its context has are kept, until whoever made
        it lets go of them."""
        assert segment not in self._all and segment.slots is None and segment.context
        self._all[segment] = holding = Holding(Keepers(self.in_pages(len(segment))))
        self._named.setdefault((segment.owner, segment.id), []).append(segment)
        self._derived.setdefault((segment.owner, segment.state), []).append(segment)
        for interval in segment.context:
            holding.keepers.add(*self._pages(interval))
            self._all[interval.segment].users[segment] = None
        self._owned(segment, holding.keepers.total)
        self.retain(segment.context)

    def retain(self, intervals: Iterable[Interval]) -> None:
        for interval in intervals:
            holding = self._all[interval.segment]
            before = holding.keepers.total
            holding.keepers.add(*self._pages(interval))
            assert holding.keepers.total == before, f"{interval.segment.id}: kept what was gone"

    def let_go(self, intervals: Iterable[Interval]) -> None:
        """What nothing needs any more is freed."""
        todo = list(intervals)
        while todo:
            interval = todo.pop()
            segment = interval.segment
            holding = self._all[segment]
            gone = holding.keepers.remove(*self._pages(interval))
            if not gone:
                continue
            tokens = sum(stop - start for start, stop in gone)
            if segment in self._idle:
                self.reclaimable_tokens -= tokens
            self._owned(segment, -tokens)
            for user in list(holding.users):
                if _overlap(segment, gone, user.context or ()):
                    assert user.slots is not None, f"{user.id}: what it needs to come back is gone"
                    self._forget_context(user)
            if segment.slots is not None:
                self.held_tokens -= tokens
                for start, stop in gone:
                    self.free(segment.slots, start, stop)
            if holding.keepers.total:
                continue
            assert not holding.pins, f"{segment.id}: gone while it was read"
            if segment.slots is None:
                todo += segment.context or ()
            self._forget_context(segment)
            segment.slots = None
            del self._all[segment]
            _remove(self._named, (segment.owner, segment.id), segment)
            if segment.mapper is not None:
                _remove(self._derived, (segment.owner, segment.state), segment)

    # ------------------------------------------------------------ reading

    def pin(self, intervals: Iterable[Interval]) -> None:
        """A request is about to read these: they stay in memory, or come back and then stay."""
        for segment in _segments(intervals):
            self._unsettle(segment)
            self._all[segment].pins += 1

    def unpin(self, intervals: Iterable[Interval]) -> None:
        for segment in _segments(intervals):
            holding = self._all[segment]
            holding.pins -= 1
            assert holding.pins >= 0, f"{segment.id}: unpinned too often"
            self._settle(segment)

    def unmovable_beside(self, intervals: Iterable[Interval]) -> int:
        """Tokens that could not be evicted while these are read, these included (in memory or not)."""
        more = 0
        for segment in _segments(intervals):
            if segment.slots is None:
                more += self.in_pages(self.needed_of(segment))
            elif segment in self._idle:
                more += self._all[segment].keepers.total
        return self.held_tokens - self.reclaimable_tokens + more

    # ------------------------------------------------------------ out of memory and back

    def evict(self, tokens: int) -> int:
        """Free at least `tokens` if that many can be; returns how many were."""
        freed = 0
        while freed < tokens and self._idle:
            segment = next(iter(self._idle))
            freed += self._drop(segment)
            self.on_event(segment.owner, "evictions")
        return freed

    def missing(self, intervals: Iterable[Interval]) -> list[Segment]:
        """Segments that must come back before these can be read; each after those that it needs itself."""
        order: dict[Segment, None] = {}
        stack = [(segment, False) for segment in reversed(_segments(intervals))]
        while stack:
            segment, needs_done = stack.pop()
            if segment.slots is not None or segment in order:
                continue
            if needs_done:
                order[segment] = None
            else:
                stack.append((segment, True))
                stack += [(needed, False) for needed in reversed(_segments(segment.context or ()))]
        return list(order)

    def kept(self, segment: Segment) -> list[Run]:
        """The runs of its slots that something needs; of a derived one that is not adopted yet, what it is made for."""
        if segment in self._all:
            runs = [(start, stop) for start, stop, _ in self._all[segment].keepers.runs()]
        else:
            runs = sorted(map(self._pages, segment.context or ()))
        united: list[Run] = []
        for start, stop in runs:
            if united and start <= united[-1][1]:
                united[-1] = united[-1][0], max(stop, united[-1][1])
            else:
                united.append((start, stop))
        return united

    def keeps(self, interval: Interval) -> bool:
        """Whether something needs all of it."""
        start, stop = self._pages(interval)
        return any(first <= start and stop <= last for first, last in self.kept(interval.segment))

    def needed_of(self, segment: Segment) -> int:
        """How many of its leading tokens must be computed to bring it back."""
        return min(len(segment), max((stop for _, stop in self.kept(segment)), default=0))

    def restore(self, segment: Segment, slots: Any) -> None:
        """It was computed again: `slots` are those of its first tokens, at least `needed_of` many when that began."""
        assert segment.slots is None and segment.context is not None
        holding, context = self._all[segment], segment.context
        segment.slots = slots
        at = 0
        for start, stop, _ in holding.keepers.runs():
            if start > at:
                self.free(slots, at, start)
            at = stop
        if len(slots) > at:
            self.free(slots, at, self.in_pages(len(slots)))
        self.held_tokens += holding.keepers.total
        self.on_event(segment.owner, "rebuilds")
        self._settle(segment)
        self.let_go(context)

    def clear_pool(self) -> set[Segment]:
        """The pool was cleared, and nothing is read: what can be computed again is out of memory, the rest is lost.

        Returns the lost ones, which whoever names them has to let go of. Nothing is given back.
        """
        self._idle.clear()
        self.held_tokens = self.reclaimable_tokens = 0
        lost: set[Segment] = set()
        for segment, holding in list(self._all.items()):  # what a segment needs comes before it
            assert not holding.pins, f"{segment.id}: the pool was cleared while it was read"
            was_out, segment.slots = segment.slots is None, None
            context = segment.context
            if context is not None and self.evicts and lost.isdisjoint(_segments(context)):
                if not was_out:
                    self.retain(context)
            else:
                lost.add(segment)
                self._forget_context(segment)
                self.let_go(context if was_out and context is not None else ())
        return lost

    # ------------------------------------------------------------ conservation

    def check(self, kept: Iterable[Interval], pinned: Iterable[Segment]) -> None:
        """Raise AssertionError unless each token is kept and each segment pinned exactly as often as is needed."""
        pins = Counter(pinned)
        need = {segment: Keepers(self.in_pages(len(segment))) for segment in self._all}
        out = [segment for segment in self._all if segment.slots is None]
        for interval in [*kept, *(one for segment in out for one in segment.context or ())]:
            need[interval.segment].add(*self._pages(interval))
        held = idle = 0
        owned: Counter[str] = Counter()
        for segment, holding in self._all.items():
            assert list(holding.keepers.runs()) == list(need[segment].runs()), f"{segment.id}: {holding.keepers}"
            assert holding.keepers.total == need[segment].total > 0, f"{segment.id}: nothing keeps it"
            assert holding.keepers.shared == need[segment].shared
            assert holding.pins == pins[segment], f"{segment.id}: {holding.pins} pins, {pins[segment]} needed"
            assert segment.slots is not None or segment.context is not None, f"{segment.id} cannot come back"
            assert (segment in self._idle) == self.evictable(segment)
            held += holding.keepers.total if segment.slots is not None else 0
            idle += holding.keepers.total if segment in self._idle else 0
            owned[segment.owner] += holding.keepers.total
            for interval in segment.context or ():
                assert segment in self._all[interval.segment].users
        assert held == self.held_tokens, f"{self.held_tokens} tokens held, {held} needed"
        assert sorted(map(id, (one for some in self._named.values() for one in some))) == sorted(map(id, self._all))
        derived = {segment for segment in self._all if segment.mapper is not None}
        assert {one for some in self._derived.values() for one in some} == derived
        assert owned == self.owned_tokens, f"{self.owned_tokens} owned, {owned} counted"
        assert idle == self.reclaimable_tokens, f"{self.reclaimable_tokens} reclaimable, {idle} counted"

    # ------------------------------------------------------------ inside

    def _pages(self, interval: Interval) -> Run:
        """The interval, rounded outwards to whole pages."""
        start = interval.start // self.page_size * self.page_size
        return start, self.in_pages(interval.stop) if len(interval) else start

    def _settle(self, segment: Segment) -> None:
        """Something about it has changed: it may be evicted now, or not any more."""
        if self.evictable(segment) and segment not in self._idle:
            self._idle[segment] = None
            self.reclaimable_tokens += self._all[segment].keepers.total

    def _unsettle(self, segment: Segment) -> None:
        """Take it from what may be evicted."""
        if segment in self._idle:
            del self._idle[segment]
            self.reclaimable_tokens -= self._all[segment].keepers.total

    def _drop(self, segment: Segment) -> int:
        """Take an idle segment out of memory."""
        assert segment.context is not None
        holding = self._all[segment]
        self._unsettle(segment)
        for start, stop, _ in holding.keepers.runs():
            self.free(segment.slots, start, stop)
        segment.slots = None
        self.held_tokens -= holding.keepers.total
        self.retain(segment.context)
        return holding.keepers.total

    def _owned(self, segment: Segment, by: int) -> None:
        self.owned_tokens[segment.owner] += by
        if not self.owned_tokens[segment.owner]:
            del self.owned_tokens[segment.owner]

    def _forget_context(self, segment: Segment) -> None:
        """It cannot be computed again, or need not."""
        self._unsettle(segment)
        for needed in _segments(segment.context or ()):
            if needed in self._all:
                self._all[needed].users.pop(segment, None)
        segment.context = None


def _remove(index: dict[tuple[str, str], list[Segment]], key: tuple[str, str], segment: Segment) -> None:
    index[key].remove(segment)
    if not index[key]:
        del index[key]


def _segments(intervals: Iterable[Interval]) -> list[Segment]:
    return list(dict.fromkeys(interval.segment for interval in intervals))


def _overlap(segment: Segment, gone: list[Run], context: tuple[Interval, ...]) -> bool:
    return any(
        interval.segment is segment and interval.start < stop and start < interval.stop
        for interval in context
        for start, stop in gone
    )
