"""The context compiler: a spec and its parents in, a context plan out.

Pure: no I/O, no lifetime. The plan says which token instances a new state sees, each at which position, and where
its own tokens begin. The definition is docs/concepts.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from anabranch import wire
from anabranch_server.errors import Refusal
from anabranch_server.positions import after_all, lay_end_to_end, shift_to
from anabranch_server.segments import Interval, Segment, unite


class Parent(Protocol):
    """What the compiler needs to know of a sealed state."""

    @property
    def segment(self) -> Segment: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def context(self) -> ContextPlan: ...


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """Disjoint visible intervals in contract order, and the position of the first own token."""

    intervals: tuple[Interval, ...] = ()
    start: int = 0

    def __len__(self) -> int:
        """Number of visible tokens."""
        return sum(map(len, self.intervals))

    @property
    def handed_on(self) -> tuple[Interval, ...]:
        """What a child that inherits sees of this context."""
        return tuple(interval for interval in self.intervals if interval.propagate)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that are read, each once, in order of first use."""
        return tuple(dict.fromkeys(interval.segment for interval in self.intervals))

    @property
    def shifted(self) -> bool:
        """Whether any token is seen elsewhere than where it was computed."""
        return any(interval.delta for interval in self.intervals)

    def tokens(self) -> Iterator[int]:
        for interval in self.intervals:
            yield from interval.segment.tokens[interval.start : interval.stop]


def compile_context(spec: wire.ContextSpec, parents: Mapping[str, Parent]) -> ContextPlan:
    """Compile `spec`, whose references are all in `parents`.

    Raises Refusal (`invalid_request`) if a span or `upto` leaves its state.
    """
    refs: dict[wire.Ref, int] = {}
    for i, ref in enumerate(spec.refs):
        refs.setdefault(ref, i)  # what is selected again in the same way adds nothing
    selections = [select(parents[ref.id], ref, f"refs.{i}") for ref, i in refs.items()]
    if isinstance(spec.place, wire.Explicit):
        bases = [ref.base for ref in refs]
        selections = [s if base is None else shift_to(s, base) for s, base in zip(selections, bases, strict=True)]
        intervals = unite(selections)
        start = after_all(intervals) if spec.place.start is None else spec.place.start
    elif spec.place == "concat":
        intervals = lay_end_to_end(unite(selections))
        start = sum(map(len, intervals))
    else:
        intervals = unite(selections)
        start = _continued(spec, parents) if _continues(spec) else after_all(intervals)
    return ContextPlan(tuple(intervals), start)


def select(parent: Parent, ref: wire.Ref, param: str) -> list[Interval]:
    """Everything one reference selects, at the positions at which it arrives (before any policy)."""
    own = parent.segment
    if ref.kind == "inherit":
        stop = len(own) if ref.upto is None else ref.upto
        _check_inside(stop, own, f"{param}.upto")
        chosen = [*parent.context.handed_on, Interval(own, 0, stop)]
    else:
        start, stop = ref.span or (parent.input_tokens, len(own))
        _check_inside(stop, own, f"{param}.span")
        chosen = [Interval(own, start, stop)]
    return [
        Interval(interval.segment, interval.start, interval.stop, interval.delta, ref.propagate)
        for interval in chosen
        if len(interval)
    ]


def check_limits(plan: ContextPlan, new_tokens: int, max_positions: int, max_context: int) -> None:
    """Refuse a plan that leaves the model's positions or the server's context. `new_tokens`: input and output."""
    visible = len(plan)
    if visible + new_tokens > max_context:
        raise Refusal(
            "context_too_long",
            f"{visible} visible and {new_tokens} new tokens exceed the server's context of {max_context} tokens",
            hint="reference less, ask for fewer tokens, or serve with a larger --context-length",
        )
    lowest = min((interval.effective for interval in plan.intervals), default=0)
    highest = max(after_all(plan.intervals), plan.start + new_tokens)
    if lowest < 0 or highest > max_positions:
        raise Refusal(
            "position_overflow",
            f"positions {min(lowest, plan.start)} to {highest - 1} leave the model's range 0 to {max_positions - 1}",
            hint="place the references closer together, or start lower",
            param="place",
        )


def _continues(spec: wire.ContextSpec) -> bool:
    """Inheriting one parent and nothing else, no policy named: continuing it changes nothing."""
    return spec.place is None and len(spec.refs) == 1 and spec.refs[0].kind == "inherit"


def _continued(spec: wire.ContextSpec, parents: Mapping[str, Parent]) -> int:
    ref, own = spec.refs[0], parents[spec.refs[0].id].segment
    return own.start + (len(own) if ref.upto is None else ref.upto)


def _check_inside(stop: int, own: Segment, param: str) -> None:
    if stop > len(own):
        raise Refusal(
            "invalid_request",
            f"token {stop} is past the end of state {own.id}, which has {len(own)} own tokens",
            param=param,
        )


def referenced(refs: Sequence[wire.Ref]) -> list[str]:
    """The ids that a list of references names, each once, in order."""
    return list(dict.fromkeys(ref.id for ref in refs))
