"""What the soak program knows of the server's states: what each was made from, what it wrote, whether it must be there.

No I/O. A state that nothing alive was made from is forgotten with its last reference, so that memory stays bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from anabranch.wire import GenerateResponse
from tests.oracle.brute import Node, View

AFTERMATH = 0.5
"""Seconds for which something that concerned all requests may still show."""


@dataclass(slots=True, eq=False)
class Known:
    """A state that was asked for. While it runs, `node.generated` are placeholders of the expected number.

    `ending`: somebody has begun to end it, so whether it is there is unknown until that is over. `interrupted`:
    somebody stopped its request, so it may be short or leave no state. `released`: certainly given up.
    """

    node: Node
    body: dict[str, Any]
    parents: tuple[Known, ...]
    key: str | None
    asked: int
    view: View | None = None
    phase: Literal["running", "sealed", "gone"] = "running"
    ending: bool = False
    interrupted: bool = False
    shaken: bool = False
    """It was interrupted once, and then made after all."""
    made: float = 0.0
    """When its answer was read."""
    released: bool = False
    lease: float | None = None
    started: float = field(default_factory=time.monotonic)
    used: float = 0.0
    doubt_from: float = inf
    reply: GenerateResponse | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    counted: tuple[Known, ...] = ()

    @property
    def id(self) -> str:
        return self.node.id

    @property
    def sure(self) -> bool:
        """Whether the server must have it, sealed or on the way."""
        doubted = self.ending or self.interrupted or self.doubt_from <= time.monotonic()
        return self.phase != "gone" and not doubted

    @property
    def undisturbed(self) -> bool:
        """Whether nobody has done anything to its request."""
        return not (self.ending or self.interrupted or self.released)

    def touch(self, since: float, lease: float | None = None) -> None:
        """It was used or renewed by a request that began at `since`: its lease begins anew."""
        self.used = time.monotonic()
        self.lease = lease or self.lease
        if self.lease is not None:
            self.doubt_from = since + self.lease


def lineage(states: Iterable[Known]) -> list[Known]:
    """All that `states` were made from, themselves included, each after what it was made from."""
    order: dict[Known, None] = {}
    stack = [(state, False) for state in states]
    while stack:
        state, expanded = stack.pop()
        if expanded:
            order[state] = None
        elif state not in order:
            stack.append((state, True))
            stack += [(parent, False) for parent in state.parents]
    return [*order]


@dataclass(slots=True)
class Epoch:
    """Times at which something was under way that concerns every request."""

    active: int = 0
    ended: float = -inf

    @contextmanager
    def open(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            self.ended = time.monotonic()

    def overlaps(self, since: float) -> bool:
        return self.active > 0 or self.ended + AFTERMATH >= since


@dataclass(slots=True)
class World:
    """States that are sealed or running, oldest first; and ids of requests whose end nobody saw.

    `tokens` is the most that the server may need for them: own tokens of the states and of all that they came from.
    `crowd` of them are so many that something may be refused for want of room.
    """

    crowd: int
    states: dict[str, Known] = field(default_factory=dict)
    lost: dict[str, str | None] = field(default_factory=dict)
    ghosts: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: int = 0
    crowded: float = -inf
    """When there was last a crowd."""
    sweeps: Epoch = field(default_factory=Epoch)
    floods: Epoch = field(default_factory=Epoch)
    flushes: Epoch = field(default_factory=Epoch)
    _holders: Counter[Known] = field(default_factory=Counter)

    def add(self, known: Known) -> None:
        """A request goes out."""
        assert known.id not in self.states, f"{known.id} twice"
        self.states[known.id] = known
        known.counted = tuple(lineage([known]))
        for one in known.counted:
            self._holders[one] += 1
            if self._holders[one] == 1:
                self.tokens += len(one.node.input) + one.asked
        self._look_for_crowds()

    def remove(self, known: Known, *, released: bool = False) -> None:
        """It is gone, or never came to be."""
        known.phase = "gone"
        if released:
            known.released = True
            self.ghosts = [*self.ghosts[-63:], (known.id, known.key)]
        if self.states.pop(known.id, None) is None:
            return
        self._look_for_crowds()
        for one in known.counted:
            self._holders[one] -= 1
            if not self._holders[one]:
                del self._holders[one]
                self.tokens -= len(one.node.input) + one.asked
        known.counted = ()

    def lose(self, known: Known) -> None:
        """Nobody knows how it ended, or what it holds: it is given up wherever it turns up."""
        self.lost[known.id] = known.key
        self.remove(known)

    def sealed(self, key: str | None) -> list[Known]:
        """States that nobody is ending."""
        return [s for s in self.states.values() if s.phase == "sealed" and not s.ending and s.key == key]

    def running(self) -> list[Known]:
        return [s for s in self.states.values() if s.phase == "running" and not s.ending and not s.interrupted]

    def _look_for_crowds(self) -> None:
        if self.tokens > self.crowd:
            self.crowded = time.monotonic()
