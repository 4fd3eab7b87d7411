"""What the server knows of one state, in each condition: waiting, running, sealed; and the states of one tenant.

Plain records: what becomes of them is `store.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from anabranch import wire
from anabranch_server.chat import Turn
from anabranch_server.compile import ContextPlan
from anabranch_server.models import ModelStamp
from anabranch_server.segments import Interval, Segment


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

    @property
    def handed_on(self) -> tuple[Interval, ...]:
        """What a child that inherits this state would see: so this state keeps it."""
        return (*self.context.handed_on, Interval(self.segment, 0, len(self.segment)))

    def selected(self, ref: wire.Ref) -> Iterator[Segment]:
        """The segments that a reference to this state lets others read, its own first."""
        yield self.segment
        if ref.kind == "inherit":
            yield from dict.fromkeys(interval.segment for interval in self.context.handed_on)

    def info(self) -> wire.StateInfo:
        return wire.StateInfo(
            id=self.id,
            status="sealed",
            input_tokens=self.input_tokens,
            generated_tokens=len(self.segment) - self.input_tokens,
            start=self.segment.start,
            context_tokens=len(self.context),
            refs=self.refs,
            resident=self.segment.slots is not None,
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
    keep_partial: bool = False
    lease: float | None = None
    tenant: str = ""

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
    tenant: str = ""
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
class Space:
    """The states of one tenant (API key). Nobody else's ids are found in it."""

    states: dict[str, State] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)

    def __contains__(self, state_id: str) -> bool:
        return state_id in self.states or state_id in self.running or state_id in self.waiting

    def __bool__(self) -> bool:
        return bool(self.states or self.running or self.waiting)


Known: TypeAlias = State | Running | Waiting
"""A state in any condition."""
