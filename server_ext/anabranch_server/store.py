"""The state store: which states exist, and which segments something still needs.

Plain bookkeeping, driven by one caller. It uses no clock, no thread and no garbage collector, so that every rank of a
tensor-parallel server, fed the same requests, holds the same store. It does not know what a slot is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch import wire
from anabranch_server.chat import Turn
from anabranch_server.compile import ContextPlan, referenced
from anabranch_server.errors import Refusal, StateRunning
from anabranch_server.models import ModelStamp
from anabranch_server.segments import Segment

REMEMBERED_IDS = 65_536  # released ids that still answer "released" and cannot be used again


@dataclass(frozen=True, slots=True)
class State:
    """A sealed state: the KV of every own token exists, and none of it will ever change."""

    segment: Segment
    context: ContextPlan
    input_tokens: int
    stamp: ModelStamp
    refs: tuple[wire.Ref, ...] = ()
    turn: Turn | None = None

    @property
    def id(self) -> str:
        return self.segment.id

    def info(self) -> wire.StateInfo:
        return wire.StateInfo(
            id=self.id,
            status="sealed",
            input_tokens=self.input_tokens,
            generated_tokens=len(self.segment) - self.input_tokens,
            start=self.segment.start,
            context_tokens=len(self.context),
            refs=self.refs,
        )


@dataclass(slots=True)
class Running:
    """A state that is being computed: accepted, its context retained, its own tokens not yet complete."""

    id: str
    context: ContextPlan
    input_tokens: int
    stamp: ModelStamp
    refs: tuple[wire.Ref, ...] = ()
    turn: Turn | None = None
    keep: bool = True

    def info(self) -> wire.StateInfo:
        return wire.StateInfo(
            id=self.id,
            status="running",
            input_tokens=self.input_tokens,
            generated_tokens=0,
            start=self.context.start,
            context_tokens=len(self.context),
            refs=self.refs,
        )


@dataclass(slots=True)
class Waiting:
    """An accepted request whose parent is not sealed yet; nothing is retained for it. `request` is the engine's."""

    id: str
    parent: str
    request: Any
    refs: tuple[wire.Ref, ...] = ()
    turn: Turn | None = None
    keep: bool = True
    input_tokens = 0  # not known yet

    def info(self) -> wire.StateInfo:
        return wire.StateInfo(
            id=self.id,
            status="waiting",
            input_tokens=self.input_tokens,
            generated_tokens=0,
            start=0,
            context_tokens=0,
            refs=self.refs,
        )


@dataclass(slots=True)
class StateStore:
    """All states of one server rank. `free` gives the KV behind a segment's `slots` back to the pool."""

    free: Callable[[Any], None]
    states: dict[str, State] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    released: OrderedDict[str, None] = field(default_factory=OrderedDict)
    held_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    # ------------------------------------------------------------ look up

    def parents(self, refs: Sequence[wire.Ref], stamp: ModelStamp | None = None) -> dict[str, State]:
        """The sealed states that `refs` name; with a stamp, only if they were computed under it.

        Raises StateRunning if one is accepted but not sealed; Refusal `state_not_found`, `state_released` or
        `state_incompatible`.
        """
        found: dict[str, State] = {}
        not_sealed: str | None = None
        for state_id in referenced(refs):
            if state_id in self.running or state_id in self.waiting:
                not_sealed = not_sealed or state_id
            else:
                found[state_id] = state = self.state(state_id, param="refs")
                if stamp is not None and state.stamp != stamp:
                    raise Refusal(
                        "state_incompatible",
                        f"state {state_id} was computed under {state.stamp.differences(stamp)}",
                        hint="KV of one model, weight version or adapter means nothing to another: compute it anew",
                        param="refs",
                    )
        if not_sealed is not None:
            raise StateRunning(not_sealed)
        return found

    def state(self, state_id: str, param: str = "id") -> State:
        """A sealed state; raises Refusal."""
        if state_id in self.states:
            return self.states[state_id]
        if state_id in self.released:
            raise Refusal("state_released", f"state {state_id} was released", param=param)
        raise Refusal(
            "state_not_found",
            f"there is no state {state_id}",
            hint="it was never made here, its request failed, or the server was restarted",
            param=param,
        )

    def info(self, state_id: str) -> wire.StateInfo:
        known = self.running.get(state_id) or self.waiting.get(state_id) or self.state(state_id)
        return known.info()

    def turn_after(self, refs: Sequence[wire.Ref]) -> Turn | None:
        """How the conversation ends that a new state with these references continues. Raises Refusal."""
        last = refs[-1] if refs else None
        if last is None or last.kind == "artifact":
            return None
        state = self.running.get(last.id) or self.waiting.get(last.id) or self.state(last.id, param="refs")
        cut = last.upto is not None and last.upto <= state.input_tokens
        return "closed" if cut and state.turn is not None else state.turn

    def next_ready(self) -> Waiting | None:
        """One whose parent is sealed or gone by now; it no longer waits. One at a time, because the next may be its
        child, which must find it somewhere."""
        blocked = self.running.keys() | self.waiting.keys()
        ready = next((waiting for waiting in self.waiting.values() if waiting.parent not in blocked), None)
        return self.waiting.pop(ready.id) if ready is not None else None

    # ------------------------------------------------------------ the life of a state

    def check_new(self, state_id: str) -> None:
        """Raise Refusal if an id is or was in use."""
        if any(state_id in used for used in (self.states, self.running, self.waiting, self.released)):
            raise Refusal(
                "invalid_request",
                f"the id {state_id} is already in use",
                hint="every generate makes a new state and needs a fresh random id",
                param="id",
            )

    def open(self, running: Running) -> None:
        """A request starts: everything it will read is retained."""
        self.check_new(running.id)
        self.running[running.id] = running
        self._retain(running.context.segments)

    def seal(self, state_id: str, tokens: Sequence[int], slots: Any) -> State:
        """A request ended well: its tokens become a state. `tokens` and `slots` are its own, input and output."""
        running = self.running[state_id]
        assert running.keep, "only a state that is kept is sealed"
        assert len(tokens) >= running.input_tokens, "the input is part of the state"
        del self.running[state_id]
        segment = Segment(state_id, running.context.start, tokens, slots)
        state = State(
            segment=segment,
            context=running.context,
            input_tokens=running.input_tokens,
            stamp=running.stamp,
            refs=running.refs,
            turn=running.turn,
        )
        self.states[state_id] = state
        self.held_tokens += len(segment)
        self.counts["created"] += 1
        self._retain([segment, *_handed_on(state)])
        self._let_go(running.context.segments)
        return state

    def close(self, state_id: str, *, failed: bool) -> None:
        """A request ended and leaves no state."""
        running = self.running.pop(state_id)
        self.counts["failed" if failed else "created"] += 1
        if not failed:
            self.counts["freed"] += 1
            self._remember(state_id)
        self._let_go(running.context.segments)

    def release(self, state_id: str) -> None:
        """Give a state up; one that is not finished will not be kept. What its descendants or running requests still
        see stays. Raises Refusal."""
        unfinished = self.running.get(state_id) or self.waiting.get(state_id)
        if unfinished is not None:
            unfinished.keep = False
            return
        state = self.state(state_id)
        del self.states[state_id]
        self._remember(state_id)
        self.counts["freed"] += 1
        self._let_go([state.segment, *_handed_on(state)])

    def reset(self) -> None:
        """The pool behind the states was cleared: all states are gone, nothing is given back."""
        self.counts["freed"] += len(self.states)
        self.states.clear()
        self.running.clear()
        self.held_tokens = 0

    # ------------------------------------------------------------ conservation

    def check(self) -> None:
        """Raise AssertionError unless every segment is kept exactly as often as something needs it."""
        need: Counter[Segment] = Counter()
        for state in self.states.values():
            need.update([state.segment, *_handed_on(state)])
        for running in self.running.values():
            need.update(running.context.segments)
        for segment, keepers in need.items():
            assert segment.keepers == keepers, f"{segment.id}: {segment.keepers} keepers, {keepers} needed"
        held = sum(len(segment) for segment in need)
        assert held == self.held_tokens, f"{self.held_tokens} tokens held, {held} needed"
        assert not self.states.keys() & self.running.keys(), "a state is sealed and running"

    def _retain(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            segment.keepers += 1

    def _let_go(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            segment.keepers -= 1
            assert segment.keepers >= 0, f"{segment.id} let go too often"
            if segment.keepers == 0:
                self.held_tokens -= len(segment)
                self.free(segment.slots)

    def _remember(self, state_id: str) -> None:
        self.released[state_id] = None
        if len(self.released) > REMEMBERED_IDS:
            self.released.popitem(last=False)


def _handed_on(state: State) -> list[Segment]:
    """The segments that a child inheriting `state` would see besides its own tokens, each once."""
    return list(dict.fromkeys(interval.segment for interval in state.context.handed_on))
