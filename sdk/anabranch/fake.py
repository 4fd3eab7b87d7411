"""What a state sees, computed token by token, and how long it is there: the rules behind `testing.FakeServer`.

It is written to be short, not fast, and knows neither paths nor replies. The server has its own compiler and store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from anabranch import wire
from anabranch.errors import BY_CODE, APIStatusError

Done: TypeAlias = tuple[wire.GenerateRequest, wire.GenerateResponse]
Instance: TypeAlias = tuple[str, int, str | None]
"""A token instance: own token number i of a state, and the mappers through which it is seen, joined by "+"."""
MAPPERS = ("identity",)
"""A server without settings has these."""


def refusal(code: wire.ErrorCode, message: str, param: str | None = None, *, hint: str | None = None) -> APIStatusError:
    """The error that a server's refusal becomes."""
    return BY_CODE[code](message, param=param, hint=hint, status=wire.HTTP_STATUS[code])


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
    lease: float | None

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
            lease=self.lease,
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
        found |= {(name, i, None): self.start + i for i in range(first, end)}
        if ref.mapper is None:
            return found
        return {
            (name, i, f"{before}+{ref.mapper}" if before else ref.mapper): position
            for (name, i, before), position in found.items()
        }


def see(spec: wire.ContextSpec, parents: Mapping[str, FakeState]) -> tuple[dict[Instance, Seen], int]:
    """What `spec` sees, in contract order, and where new tokens begin."""
    visible: dict[Instance, Seen] = {}
    readers: dict[Instance, set[wire.Ref]] = {}
    for number, ref in enumerate(spec.refs):
        found = parents[ref.id].selected(ref, f"refs.{number}")
        shift = 0 if ref.base is None or not found else ref.base - min(found.values())
        for one, position in found.items():
            first = visible.get(one, Seen(position + shift, propagate=False))
            visible[one] = Seen(first.effective, first.propagate or ref.propagate)
            readers.setdefault(one, set()).add(ref)
    after = 1 + max((seen.effective for seen in visible.values()), default=-1)
    match spec:
        case wire.ContextSpec(place="concat"):
            return {one: Seen(i, seen.propagate) for i, (one, seen) in enumerate(visible.items())}, len(visible)
        case wire.ContextSpec(place="same_start" | "right_aligned" as policy):
            return _aligned(visible, readers, at_end=policy == "right_aligned")
        case wire.ContextSpec(place=wire.Explicit(start=int(start))):
            return visible, start
        case wire.ContextSpec(place=None, refs=(wire.Ref(kind="inherit") as ref,)):
            parent = parents[ref.id]
            return visible, parent.start + (len(parent.words) if ref.upto is None else ref.upto)
        case _:
            return visible, after


def _aligned(
    visible: Mapping[Instance, Seen], readers: Mapping[Instance, set[wire.Ref]], *, at_end: bool
) -> tuple[dict[Instance, Seen], int]:
    """What only one reference selects, as a block that begins after what several select, or ends with the longest."""
    private: dict[wire.Ref, list[int]] = {}
    shared = [-1]
    for one, seen in visible.items():
        places = shared if len(readers[one]) > 1 else private.setdefault(next(iter(readers[one])), [])
        places.append(seen.effective)
    begin = 1 + max(shared)
    end = begin + max((1 + max(places) - min(places) for places in private.values()), default=0)
    by = {ref: end - 1 - max(places) if at_end else begin - min(places) for ref, places in private.items()}
    moved = {
        one: Seen(seen.effective + (by[next(iter(readers[one]))] if len(readers[one]) == 1 else 0), seen.propagate)
        for one, seen in visible.items()
    }
    return moved, end if at_end else 1 + max((seen.effective for seen in moved.values()), default=-1)


def explain(visible: Mapping[Instance, Seen], start: int, states: Mapping[str, FakeState]) -> wire.Explanation:
    """The same as intervals: runs of one state's tokens that were moved alike."""
    intervals: list[wire.Interval] = []
    for (name, i, mapper), seen in visible.items():
        native = states[name].start + i
        last = intervals[-1] if intervals else None
        run = (name, i, mapper, seen.effective - native, seen.propagate)
        if last is not None and (last.state, last.stop, last.mapper, last.delta, last.propagate) == run:
            intervals[-1] = last.model_copy(update={"stop": i + 1})
            continue
        intervals.append(
            wire.Interval(
                state=name,
                start=i,
                stop=i + 1,
                native=native,
                effective=seen.effective,
                propagate=seen.propagate,
                mapper=mapper,
            )
        )
    return wire.Explanation(intervals=tuple(intervals), start=start, context_tokens=len(visible))


@dataclass(slots=True)
class FakeStore:
    """Which states there are. Those that are gone stay in `states`: descendants may still see their tokens."""

    states: dict[str, FakeState] = field(default_factory=dict[str, FakeState])
    gone: dict[str, wire.ErrorCode] = field(default_factory=dict[str, wire.ErrorCode])
    done: dict[str, Done] = field(default_factory=dict[str, Done])
    """What a request that is repeated gets; forgotten with the state, so that it can be made again."""
    counts: Counter[str] = field(default_factory=Counter[str])

    @property
    def held(self) -> list[FakeState]:
        return [state for name, state in self.states.items() if name not in self.gone]

    def state(self, name: str, param: str = "id") -> FakeState:
        if name not in self.states:
            raise refusal("state_not_found", f"there is no state {name}", param)
        if name in self.gone:
            raise refusal(self.gone[name], f"state {name} is gone", param)
        return self.states[name]

    def parents(self, spec: wire.ContextSpec) -> dict[str, FakeState]:
        for number, ref in enumerate(spec.refs):
            if ref.mapper is not None and ref.mapper not in MAPPERS:
                message, hint = f"there is no mapper {ref.mapper!r}", f"this server has {', '.join(MAPPERS)}"
                raise refusal("invalid_request", message, f"refs.{number}.mapper", hint=hint)
        return {ref.id: self.state(ref.id, "refs") for ref in spec.refs}

    def repeated(self, request: wire.GenerateRequest) -> wire.GenerateResponse | None:
        """The result of the same request; a different one under the same id is refused."""
        if self.gone.get(request.id) == "state_released" and not request.again and request.id not in self.done:
            raise refusal("state_released", f"state {request.id} was released", "id")
        before, response = self.done.get(request.id, (request, None))
        if before != request:
            raise refusal("invalid_request", f"the id {request.id} is already in use by another request", "id")
        return response

    def seal(self, state: FakeState, response: wire.GenerateResponse) -> None:
        """A request ended, and left a state or not."""
        name = state.request.id
        self.counts["cancelled" if response.finish_reason == "cancelled" else "created"] += 1
        if response.finish_reason != "cancelled" or response.kept:
            self.states[name] = state
            self.done[name] = (state.request, response)
            self.gone.pop(name, None)
            if not response.kept:
                self.gone[name] = "state_released"

    def renew(self, ids: Iterable[str], lease: float | None) -> wire.Renewal:
        renewed, lost = self._there(ids)
        for name in renewed:
            self.states[name] = replace(self.states[name], lease=lease or self.states[name].lease)
        return wire.Renewal(renewed=renewed, lost=lost)

    def release(self, ids: Iterable[str]) -> wire.Released:
        released, unknown = self._there(ids)
        self._end(released, "state_released", "freed")
        return wire.Released(released=released, unknown=unknown)

    def expire(self, ids: Iterable[str]) -> None:
        self._end(self._there(ids)[0], "state_not_found", "expired")

    def _there(self, ids: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        known, held = dict.fromkeys(ids), {state.request.id for state in self.held}
        return tuple(name for name in known if name in held), tuple(name for name in known if name not in held)

    def _end(self, ids: Iterable[str], code: wire.ErrorCode, event: str) -> None:
        for name in ids:
            self.gone[name] = code
            del self.done[name]
            self.counts[event] += 1
