"""A store over a fake pool, for the tests of the store and of what is in memory.

No test is in here. Every token's slot is a number of its own that is used once, so a second free, a free of what is
no longer there and a read after a free are all seen at once. Pages are freed whole, as the engine's allocator does it.
Contexts come from the real compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from anabranch.wire import ContextSpec, Ref
from anabranch_server.compile import compile_context
from anabranch_server.errors import Refusal
from anabranch_server.limits import Limits
from anabranch_server.models import ModelStamp
from anabranch_server.segments import Interval, Segment
from anabranch_server.store import Running, State, StateStore, Waiting

STAMP = ModelStamp(model="m", weights_version="1", dtype="bfloat16", kv_dtype="auto", rope="rope_theta=10000.0")
ID = {letter: f"{ord(letter):032x}" for letter in "abcdefgh"}
LETTER = {state_id: letter for letter, state_id in ID.items()}

Token = tuple[Any, int]
"""Whose token it is, and which."""


def inherit(letter: str, upto: int | None = None, propagate: bool = True) -> Ref:
    return Ref(kind="inherit", id=ID[letter], upto=upto, propagate=propagate)


def artifact(letter: str, start: int, stop: int, propagate: bool = True) -> Ref:
    return Ref(kind="artifact", id=ID[letter], span=(start, stop), propagate=propagate)


def refused(code: str) -> Any:
    return pytest.raises(Refusal, check=lambda refusal: refusal.code == code)


@dataclass
class Memory:
    """The pool. `freed` is what came back, in order."""

    page_size: int = 1
    names: list[Token] = field(default_factory=list)
    """By slot. What is left of a segment's last page is `(None, 0)`."""
    live: set[int] = field(default_factory=set)
    freed: list[Token] = field(default_factory=list)

    def take(self, name: Any, n: int) -> tuple[int, ...]:
        """Fresh pages, as many as are needed."""
        slots = tuple(range(len(self.names), len(self.names) + n))
        self.names += [(name, i) for i in range(n)] + [(None, 0)] * (-n % self.page_size)
        self.live.update(slots)
        return slots

    def free(self, slots: Sequence[int], start: int, stop: int) -> None:
        size = self.page_size
        assert not start % size and not stop % size, "a page is freed in part"
        assert 0 <= start < len(slots), "what is not there is freed"
        assert start < stop < len(slots) + size, "nothing, or what is not there, is freed"
        for first in {slot // size * size: None for slot in slots[start:stop]}:
            page = [slot for slot in range(first, first + size) if slot in self.live]
            assert page, f"the page of {self.names[first]} is freed, but it is not in memory"
            self.live.difference_update(page)
            self.freed += [self.names[slot] for slot in page]

    def read(self, intervals: Iterable[Interval]) -> None:
        for interval in intervals:
            slots = interval.segment.slots
            assert slots is not None, f"{interval.segment.id} is read, but it is out of memory"
            for i in range(interval.start, interval.stop):
                assert slots[i] in self.live, f"{self.names[slots[i]]} is read, but it was freed"
                assert self.names[slots[i]][1] == i, "one token is taken for another"

    def clear(self) -> None:
        """As the engine does it when it is told to flush: nothing is in memory, and nothing is given back."""
        self.live.clear()

    @property
    def used(self) -> int:
        """Slots of the pages that are not free."""
        return len({slot // self.page_size for slot in self.live}) * self.page_size

    @property
    def in_memory(self) -> set[Token]:
        return {self.names[slot] for slot in self.live}


@dataclass
class Pool:
    """A store, the pool under it, and short names for what a scheduler does with them."""

    limits: Limits = field(default_factory=Limits)
    memory: Memory = field(default_factory=Memory)
    requests: dict[tuple[str, str], Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = StateStore(self.memory.free, self.limits)
        self.holdings = self.store.holdings
        self.holdings.page_size = self.memory.page_size

    # ------------------------------------------------------------ lives

    def open(self, letter: str, *refs: Ref, input_tokens: int = 1, tenant: str = "", **more: Any) -> Running:
        context = compile_context(ContextSpec(refs=refs), self.store.parents(tenant, refs, STAMP))
        running = Running(ID[letter], context, input_tokens, STAMP, refs, tenant=tenant, **more)
        self.store.open(running)
        self.requests[tenant, letter] = running
        self.store.check()
        return running

    def seal(self, letter: str, n: int = 3, tenant: str = "") -> State:
        running = self.requests.pop((tenant, letter))
        self.memory.read(running.context.intervals)
        state = self.store.seal(running, range(n), self.memory.take(letter, n))
        self.store.check()
        return state

    def make(self, letter: str, *refs: Ref, n: int = 3, tenant: str = "", **more: Any) -> State:
        self.open(letter, *refs, tenant=tenant, **more)
        return self.seal(letter, n, tenant)

    def close(self, letter: str, outcome: str = "done", tenant: str = "") -> None:
        self.store.close(self.requests.pop((tenant, letter)), outcome)
        self.store.check()

    def release(self, *letters: str, tenant: str = "") -> None:
        for letter in letters:
            self.store.release(tenant, ID[letter])
            self.store.check()

    def tell(self, now: float) -> int:
        """The time, twice: what began before the first has begun for certain at the second."""
        expired = self.store.expire(now) + self.store.expire(now)
        self.store.check()
        return expired

    def wait(self, letter: str, parent: str, request: Any = None, tenant: str = "") -> Waiting:
        waiting = Waiting(ID[letter], ID[parent], request, tenant=tenant)
        self.store.wait(waiting)
        return waiting

    # ------------------------------------------------------------ out of memory and back

    def segment(self, letter: str, tenant: str = "") -> Segment:
        return self.store.state(tenant, ID[letter]).segment

    def evict(self, tokens: int) -> int:
        freed = self.holdings.evict(tokens)
        self.store.check()
        return freed

    def put_out(self, *segments: Segment) -> None:
        """Out of memory with these and no others."""
        stay = [Interval(one, 0, len(one)) for one, _ in self.holdings.items() if one not in segments]
        self.store.read(stay)
        self.holdings.evict(self.reclaimable)
        self.store.check([stay])
        self.store.done_reading(stay)
        assert not [one for one in segments if one.slots is not None]

    def missing(self, *segments: Segment) -> str:
        """Letters, in the order in which they must come back."""
        whole = [Interval(segment, 0, len(segment)) for segment in segments]
        return "".join(LETTER[segment.id] for segment in self.holdings.missing(whole))

    def rebuild(self, segment: Segment) -> None:
        """All in one go; what it needs itself must be in memory."""
        context = segment.context
        assert context is not None and not self.holdings.missing(context)
        self.store.read(context)
        self.store.check([context])
        self.memory.read(context)
        self.holdings.restore(segment, self.memory.take(LETTER[segment.id], self.holdings.needed_of(segment)))
        self.store.check([context])
        self.store.done_reading(context)
        self.store.check()

    # ------------------------------------------------------------ questions

    @property
    def held(self) -> int:
        return self.holdings.held_tokens

    @property
    def reclaimable(self) -> int:
        return self.holdings.reclaimable_tokens

    @property
    def gone(self) -> str:
        """Whose tokens were taken and are all free, in the order in which they became so."""
        ever, left = {name for name, _ in self.memory.names}, {name for name, _ in self.memory.in_memory}
        last = {name: at for at, (name, _) in enumerate(self.memory.freed)}
        return "".join(sorted(ever - left, key=lambda name: last[name]))

    @property
    def here(self) -> dict[str, list[int]]:
        """The tokens that are in memory, by letter."""
        found: dict[str, list[int]] = {}
        for name, i in sorted(self.memory.in_memory):
            found.setdefault(name, []).append(i)
        return found
