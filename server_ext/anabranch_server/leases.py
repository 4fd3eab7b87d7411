"""Leases: until when each state is kept for a client that says nothing more.

It has no clock: time is what its one caller says it is, so that every rank of a server agrees on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

Key = tuple[str, str]
"""(tenant, state id)."""


@dataclass(slots=True)
class Leases:
    """`now`, in seconds, is the last time that was told; it only moves forward.

    A time is old when it arrives, and who tells it waits until it has. So a lease that begins after one telling counts
    from the second after that: it is never shorter than was promised.
    """

    now: float = 0.0
    _of: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """Seconds, and when they are over; infinity until the time is told."""
    _fresh: dict[Key, None] = field(default_factory=dict)
    _told_once: dict[Key, None] = field(default_factory=dict)
    _next: list[tuple[float, Key]] = field(default_factory=list)
    """A heap, with an entry at or before the end of each lease; `_looked` says when that is."""
    _looked: dict[Key, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def begin(self, key: Key, seconds: float) -> None:
        self._of[key] = (seconds, inf)
        self._told_once.pop(key, None)
        self._fresh[key] = None

    def renew(self, key: Key, seconds: float | None = None) -> None:
        """Start it anew; without `seconds`, for as long as it was given last."""
        self.begin(key, self._of[key][0] if seconds is None else seconds)

    def end(self, key: Key) -> None:
        del self._of[key]
        self._fresh.pop(key, None)
        self._told_once.pop(key, None)
        self._looked.pop(key, None)
        if not self._of:
            self._next.clear()

    def left(self, key: Key) -> float:
        """Seconds until it is over."""
        seconds, over = self._of[key]
        return seconds if over == inf else max(0.0, over - self.now)

    def advance(self, now: float) -> Iterator[Key]:
        """It is `now`: gives those whose time is over, which the caller ends."""
        self.now = max(self.now, now)
        for key in self._told_once:
            seconds, _ = self._of[key]
            self._of[key] = (seconds, over := self.now + seconds)
            if over < self._looked.get(key, inf):
                self._look(key, over)
        self._told_once, self._fresh = self._fresh, {}
        while self._next and self._next[0][0] <= self.now:
            at, key = heapq.heappop(self._next)
            if self._looked.get(key) != at:
                continue
            del self._looked[key]
            over = self._of[key][1]
            if over <= self.now:
                yield key
            else:
                self._look(key, over)

    def _look(self, key: Key, at: float) -> None:
        self._looked[key] = at
        if len(self._next) < 2 * len(self._looked) + 64:
            heapq.heappush(self._next, (at, key))
        else:  # most are of leases that ended before their time
            self._next = [(at, key) for key, at in self._looked.items()]
            heapq.heapify(self._next)
