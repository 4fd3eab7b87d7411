"""What a state sees, computed token by token: the rules behind `testing.FakeServer`.

It is written to be short, not fast, and knows neither requests nor replies. The server has its own compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from anabranch import wire
from anabranch.errors import BY_CODE, APIStatusError

Instance: TypeAlias = tuple[str, int]
"""A token instance: own token number i of a state."""


def refusal(code: wire.ErrorCode, message: str, param: str | None = None) -> APIStatusError:
    """The error that a server's refusal becomes."""
    return BY_CODE[code](message, param=param, status=wire.HTTP_STATUS[code])


@dataclass(frozen=True, slots=True)
class Seen:
    """How one consumer sees a token instance."""

    effective: int
    propagate: bool = True


@dataclass(frozen=True, slots=True)
class FakeState:
    """A state: its own tokens as words, the first of them at position `start`, and what it sees."""

    request: wire.GenerateRequest
    visible: Mapping[Instance, Seen]
    start: int
    words: tuple[str, ...]
    input_tokens: int

    @property
    def info(self) -> wire.StateInfo:
        return wire.StateInfo(
            id=self.request.id,
            status="sealed",
            input_tokens=self.input_tokens,
            generated_tokens=len(self.words) - self.input_tokens,
            start=self.start,
            context_tokens=len(self.visible),
            refs=self.request.refs,
        )

    @property
    def answer_due(self) -> bool:
        """Whether its last message waits for the assistant's answer."""
        last = self.request.input[-1] if self.request.input else None
        return isinstance(last, wire.MessagePiece) and last.role != "assistant" and len(self.words) == self.input_tokens

    def selected(self, ref: wire.Ref, param: str) -> dict[Instance, int]:
        """The token instances that `ref` selects here, and the positions at which they arrive."""
        size, name = len(self.words), self.request.id
        if ref.kind == "inherit":
            found = {one: seen.effective for one, seen in self.visible.items() if seen.propagate}
            first, end, param = 0, size if ref.upto is None else ref.upto, f"{param}.upto"
        else:
            found = {}
            first, end = ref.span or (self.input_tokens, size)
            param = f"{param}.span"
        if end > size:
            raise refusal("invalid_request", f"token {end} is past the end of state {name} ({size} own tokens)", param)
        return found | {(name, i): self.start + i for i in range(first, end)}


def see(spec: wire.ContextSpec, parents: Mapping[str, FakeState]) -> tuple[dict[Instance, Seen], int]:
    """What `spec` sees, in contract order, and where new tokens begin."""
    visible: dict[Instance, Seen] = {}
    for number, ref in enumerate(spec.refs):
        found = parents[ref.id].selected(ref, f"refs.{number}")
        shift = 0 if ref.base is None or not found else ref.base - min(found.values())
        for one, position in found.items():
            first = visible.get(one, Seen(position + shift, propagate=False))
            visible[one] = Seen(first.effective, first.propagate or ref.propagate)
    after = 1 + max((seen.effective for seen in visible.values()), default=-1)
    match spec:
        case wire.ContextSpec(place="concat"):
            return {one: Seen(i, seen.propagate) for i, (one, seen) in enumerate(visible.items())}, len(visible)
        case wire.ContextSpec(place=wire.Explicit(start=int(start))):
            return visible, start
        case wire.ContextSpec(place=None, refs=(wire.Ref(kind="inherit") as ref,)):
            parent = parents[ref.id]
            return visible, parent.start + (len(parent.words) if ref.upto is None else ref.upto)
        case _:
            return visible, after


def explain(visible: Mapping[Instance, Seen], start: int, states: Mapping[str, FakeState]) -> wire.Explanation:
    """The same as intervals: runs of one state's tokens that were moved alike."""
    intervals: list[wire.Interval] = []
    for (name, i), seen in visible.items():
        native = states[name].start + i
        last = intervals[-1] if intervals else None
        run = (name, i, seen.effective - native, seen.propagate)
        if last is not None and (last.state, last.stop, last.delta, last.propagate) == run:
            intervals[-1] = last.model_copy(update={"stop": i + 1})
            continue
        intervals.append(
            wire.Interval(
                state=name, start=i, stop=i + 1, native=native, effective=seen.effective, propagate=seen.propagate
            )
        )
    return wire.Explanation(intervals=tuple(intervals), start=start, context_tokens=len(visible))
