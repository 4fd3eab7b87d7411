"""The context compiler: a spec and its parents in, a context plan out.

Pure: no I/O, no lifetime. The plan says which token instances a new state sees, each at which position, and where
its own tokens begin. The definition is docs/concepts.md. What a parent sees is never compiled again: inheriting one
parent adds one row to its plan, and a join unites plans as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from anabranch import wire
from anabranch_server import positions
from anabranch_server.errors import Refusal
from anabranch_server.mappers import mapped
from anabranch_server.plan import ContextPlan, written_out
from anabranch_server.segments import Interval, Segment
from anabranch_server.union import Selection, unite


class Parent(Protocol):
    """What the compiler needs to know of a sealed state."""

    @property
    def segment(self) -> Segment: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def context(self) -> ContextPlan: ...


Derive: TypeAlias = Callable[[Interval, str], Segment]
"""Where an interval is found as a cache mapper makes it, by name."""


def compile_context(spec: wire.ContextSpec, parents: Mapping[str, Parent], derive: Derive | None = None) -> ContextPlan:
    """Compile `spec`, whose references are all in `parents`. `derive` is needed if one of them names a mapper.

    Raises Refusal (`invalid_request`) if a span or `upto` leaves its state.
    """
    refs: dict[wire.Ref, int] = {}
    for i, ref in enumerate(spec.refs):
        refs.setdefault(ref, i)  # what is selected again in the same way adds nothing
    selections = [select(parents[ref.id], ref, f"refs.{i}", derive) for ref, i in refs.items()]
    if _continues(spec):
        ref, (view, on) = spec.refs[0], selections[0]
        own = parents[ref.id].segment
        return ContextPlan.of(view if on else view.hidden(), own.start + (len(own) if ref.upto is None else ref.upto))
    union = unite(selections, count=spec.place in ("same_start", "right_aligned"))
    match spec.place:
        case wire.Explicit(start=start):
            start = positions.explicit(union, selections, [ref.base for ref in refs], start)
        case "concat":
            start = positions.concat(union)
        case "same_start":
            start = positions.same_start(union)
        case "right_aligned":
            start = positions.right_aligned(union)
        case "keep" | None:
            start = positions.keep(union)
    return ContextPlan.of(union.view(), start)


def select(parent: Parent, ref: wire.Ref, param: str, derive: Derive | None = None) -> Selection:
    """Everything one reference selects, at the positions at which it arrives (before any policy)."""
    own = parent.segment
    if ref.kind == "inherit":
        stop = len(own) if ref.upto is None else ref.upto
        _check_inside(stop, own, f"{param}.upto")
        view = parent.context.extended(own, stop)
    else:
        start, stop = ref.span or (parent.input_tokens, len(own))
        _check_inside(stop, own, f"{param}.span")
        view = written_out([Interval(own, start, stop)] if start < stop else ())
    if ref.mapper is not None:
        assert derive is not None, "a reference names a mapper"
        view = written_out(mapped(view.trunk.intervals(view.rows), ref.mapper, derive))
    return Selection(view, ref.propagate)


def check_limits(plan: ContextPlan, new_tokens: int, max_positions: int, max_context: int) -> None:
    """Refuse a plan that leaves the model's positions or the server's context. `new_tokens`: input and output."""
    visible = len(plan)
    if visible + new_tokens > max_context:
        raise Refusal(
            "context_too_long",
            f"{visible} visible and {new_tokens} new tokens exceed the server's context of {max_context} tokens",
            hint="reference less, ask for fewer tokens, or serve with a larger --context-length",
        )
    lowest, highest = plan.view.summary.lowest, max(plan.view.summary.end, plan.start + new_tokens)
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
