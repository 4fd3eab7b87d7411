"""The state store: which states exist, whose they are, and until when.

Plain bookkeeping, driven by one caller. It uses no clock, no thread and no garbage collector, so that every rank of a
tensor-parallel server, fed the same requests, holds the same store. What is in memory is `holdings.py`'s business.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch import wire
from anabranch_server.chat import Turn
from anabranch_server.compile import ContextPlan, referenced
from anabranch_server.errors import Refusal, StateRunning
from anabranch_server.holdings import Holdings
from anabranch_server.leases import Key, Leases
from anabranch_server.limits import Limits, declared_reads
from anabranch_server.mappers import Derivation, origin
from anabranch_server.models import ModelStamp
from anabranch_server.segments import Interval, Segment, seen
from anabranch_server.states import Known, Running, Space, State, Waiting
from anabranch_server.tenancy import is_unnamed, label

REMEMBERED_IDS = 65_536  # released ids that still answer "released" and cannot be used again


@dataclass(slots=True)
class StateStore:
    """All states of one server rank. `free(slots, start, stop)` gives the KV of some tokens back to the pool."""

    free: Callable[[Any, int, int], None]
    limits: Limits = field(default_factory=Limits)
    page_size: int = 1
    leases: Leases = field(default_factory=Leases)
    counts: Counter[Key] = field(default_factory=Counter)
    """(tenant, event): how often."""
    holdings: Holdings = field(init=False)
    _spaces: dict[str, Space] = field(default_factory=dict)
    _reads: frozenset[tuple[str | None, str | None]] = field(init=False)
    """(reader, read): adapters, by name, of which one may read what the other computed."""
    _released: OrderedDict[Key, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.holdings = Holdings(self.free, self.limits.evict, self.page_size, on_event=self.count)
        self._reads = declared_reads(self.limits.adapter_reads)

    def count(self, tenant: str, event: str) -> None:
        together = is_unnamed(tenant) and tenant not in self._spaces
        self.counts[label(tenant) if together else tenant, event] += 1

    # ------------------------------------------------------------ look up

    @property
    def spaces(self) -> dict[str, Space]:
        """By tenant; only those that have something in them."""
        return self._spaces

    def space(self, tenant: str) -> Space:
        return self._spaces.get(tenant) or Space()

    def parents(self, tenant: str, refs: Sequence[wire.Ref], stamp: ModelStamp | None = None) -> dict[str, State]:
        """The sealed states that `refs` name; with a stamp, only if a request under it may read what they select.

        Raises StateRunning if one is accepted but not sealed; Refusal `state_not_found`, `state_released` or
        `state_incompatible`.
        """
        space = self.space(tenant)
        found: dict[str, State] = {}
        not_sealed: str | None = None
        for state_id in referenced(refs):
            if state_id in space.running or state_id in space.waiting:
                not_sealed = not_sealed or state_id
            else:
                found[state_id] = self.state(tenant, state_id, param="refs")
                if stamp is not None and not self._may_read(stamp, found[state_id].stamp):
                    raise _incompatible(f"state {state_id}", found[state_id].stamp, stamp)
        if not_sealed is not None:
            raise StateRunning(not_sealed)
        if stamp is not None and self._reads:  # else all that a state sees was computed under its own stamp
            for ref in refs:
                for segment in found[ref.id].selected(ref):
                    if not self._may_read(stamp, segment.stamp):
                        raise _incompatible(f"state {origin(segment)[0]}, which {ref.id} sees,", segment.stamp, stamp)
        return found

    def derivation(self) -> Derivation:
        """For one compile: where a reference with a mapper finds its segments."""
        return Derivation(self.holdings)

    def state(self, tenant: str, state_id: str, param: str = "id") -> State:
        """A sealed state; raises Refusal."""
        space = self.space(tenant)
        if state_id in space.states:
            return space.states[state_id]
        if (tenant, state_id) in self._released:
            raise Refusal("state_released", f"state {state_id} was released", param=param)
        raise Refusal(
            "state_not_found",
            f"there is no state {state_id}",
            hint="it was never made here, its request failed, its lease ran out, or the server was restarted",
            param=param,
        )

    def known(self, tenant: str, state_id: str, param: str = "id") -> Known:
        """A state in any condition; raises Refusal."""
        space = self.space(tenant)
        return space.running.get(state_id) or space.waiting.get(state_id) or self.state(tenant, state_id, param)

    def info(self, tenant: str, state_id: str) -> wire.StateInfo:
        known = self.known(tenant, state_id)
        return known.info().model_copy(update={"lease": self._lease_left(tenant, known)})

    def list(self, tenant: str) -> Iterator[wire.StateInfo]:
        space = self.space(tenant)
        for known in (*space.states.values(), *space.running.values(), *space.waiting.values()):
            yield known.info().model_copy(update={"lease": self._lease_left(tenant, known)})

    def turn_after(self, tenant: str, refs: Sequence[wire.Ref]) -> Turn | None:
        """How the conversation ends that a new state with these references continues. Raises Refusal."""
        last = refs[-1] if refs else None
        if last is None or last.kind == "artifact":
            return None
        state = self.known(tenant, last.id, param="refs")
        cut = last.upto is not None and last.upto <= state.input_tokens
        return "closed" if cut and state.turn is not None else state.turn

    def next_ready(self) -> Waiting | None:
        """One whose parent is sealed or gone by now; it no longer waits. One at a time, because the next may be its
        child, which must find it somewhere."""
        for tenant, space in self._spaces.items():
            for waiting in space.waiting.values():
                if waiting.parent not in space.running and waiting.parent not in space.waiting:
                    return self.stop_waiting(tenant, waiting.id)
        return None

    # ------------------------------------------------------------ the life of a state

    def check_new(self, tenant: str, state_id: str, *, again: bool = False) -> None:
        """Raise Refusal if an id is in use, or was released (unless it is made `again`), or if the tenant may not make
        another state."""
        space = self.space(tenant)
        if state_id in space:
            raise self._in_use(state_id)
        if (tenant, state_id) in self._released and not again:
            hint = "every generate makes a new state and needs a fresh random id"
            raise Refusal("state_released", f"state {state_id} was released", hint=hint, param="id")
        unfinished = len(space.running) + len(space.waiting)
        self._check_limit(unfinished, self.limits.max_unfinished, "unfinished requests", "wait for some of them")
        hint = "release states that are no longer needed"
        self._check_limit(len(space.states) + unfinished, self.limits.max_states, "states", hint)

    def check_remade(
        self,
        tenant: str,
        state_id: str,
        context: ContextPlan,
        tokens: Sequence[int],
        stamp: ModelStamp | None = None,
    ) -> None:
        """Raise Refusal if the id was that of other tokens that are still seen, or of the same under another stamp: an
        instance has one content."""
        for segment in (*self.holdings.named(tenant, state_id), *self.holdings.derived(tenant, state_id)):
            same = segment.start == context.start and list(segment.tokens) == list(tokens)
            same &= stamp is None or segment.stamp == stamp
            if segment.mapper is not None:
                same &= segment.origin == seen(context.intervals)  # its own context is its source
            elif segment.context is not None:
                same &= seen(segment.context) == seen(context.intervals)
            if not same:
                raise self._in_use(state_id)

    def check_tokens(self, tenant: str, new: int) -> None:
        """Raise Refusal if `new` tokens are more than the tenant may still hold."""
        held, limit = self.holdings.owned_tokens.get(tenant, 0), self.limits.max_held_tokens
        if limit and held + new > limit:
            raise Refusal(
                "rate_limited",
                f"this API key may hold {limit} tokens; it holds {held}, and asks for {new}",
                hint="release states that are no longer needed, or ask for fewer tokens",
            )

    def derived_tokens(self, refs: Sequence[wire.Ref], context: ContextPlan) -> int:
        """How many tokens `open` will add, because nobody has derived them yet."""
        return sum(stop - start for one in self._new(refs, context) for start, stop in self.holdings.kept(one))

    def wait(self, waiting: Waiting) -> None:
        """A request has to wait for a parent."""
        self._spaces.setdefault(waiting.tenant, Space()).waiting[waiting.id] = waiting

    def stop_waiting(self, tenant: str, state_id: str) -> Waiting:
        waiting = self._spaces[tenant].waiting.pop(state_id)
        self._tidy(tenant)
        return waiting

    def open(self, running: Running, *, again: bool = False) -> None:
        """A request starts: everything it will read is retained, and stays in memory or comes back."""
        self.check_new(running.tenant, running.id, again=again)
        self._released.pop((running.tenant, running.id), None)
        self._spaces.setdefault(running.tenant, Space()).running[running.id] = running
        derived = self._adopted(running)
        self.read(running.context.intervals)
        self.holdings.let_go(derived)
        for ref in running.refs:
            if (key := (running.tenant, ref.id)) in self.leases:
                self.leases.renew(key)

    def seal(self, running: Running, tokens: Sequence[int], slots: Any) -> State:
        """A request ended well: its tokens become a state. `tokens` and `slots` are its own, input and output."""
        assert running.keep, "only a state that is kept is sealed"
        assert len(tokens) >= running.input_tokens, "the input is part of the state"
        tenant, space = running.tenant, self._spaces[running.tenant]
        del space.running[running.id]
        context = running.context
        segment = Segment(
            running.id, context.start, tokens, slots, context.intervals, stamp=running.stamp, owner=tenant
        )
        state = State(segment, context, running.input_tokens, running.stamp, running.refs, running.turn)
        space.states[running.id] = state
        self.holdings.hold(segment)
        self.holdings.retain(context.handed_on)
        self.done_reading(context.intervals)
        self.count(tenant, "created")
        lease = self.limits.default_lease if running.lease is None else min(running.lease, self.limits.max_lease)
        self.leases.begin((tenant, state.id), lease)
        return state

    def close(self, running: Running, outcome: str) -> None:
        """A request ended and leaves no state. `outcome` is "done", "cancelled" or "failed"."""
        tenant = running.tenant
        del self._spaces[tenant].running[running.id]
        self._tidy(tenant)
        if outcome == "done":
            self.count(tenant, "created")
            self.count(tenant, "freed")
            self._remember((tenant, running.id))
        else:
            self.count(tenant, outcome)
        self.done_reading(running.context.intervals)

    def release(self, tenant: str, state_id: str) -> None:
        """Give a state up; one that is not finished will not be kept. What its descendants or running requests still
        see stays. Raises Refusal."""
        known = self.known(tenant, state_id)
        if isinstance(known, State):
            self._remember((tenant, state_id))
            self.count(tenant, "freed")
            self._drop(tenant, known)
        else:
            known.keep = False
            if isinstance(known, Running):
                known.keep_partial = False

    def renew(self, tenant: str, state_id: str, seconds: float | None = None) -> None:
        """Begin the lease of a state anew; that of an unfinished one has not begun. Raises Refusal."""
        known = self.known(tenant, state_id)
        seconds = None if seconds is None else min(seconds, self.limits.max_lease)
        if isinstance(known, State):
            self.leases.renew((tenant, state_id), seconds)
        elif isinstance(known, Running) and seconds is not None:
            known.lease = seconds

    def expire(self, now: float) -> int:
        """It is `now`: states whose leases are over are gone, as if they had never been. Returns how many."""
        expired = 0
        for tenant, state_id in self.leases.advance(now):
            self._drop(tenant, self._spaces[tenant].states[state_id])
            self.count(tenant, "expired")
            expired += 1
        return expired

    def reset(self) -> None:
        """The pool behind the states was cleared, and nothing runs: what can be computed again stays known, and the
        rest is gone. Nothing is given back."""
        lost = self.holdings.clear_pool()
        for tenant, space in list(self._spaces.items()):
            for state in list(space.states.values()):
                if not lost.isdisjoint(interval.segment for interval in state.handed_on):
                    self._drop(tenant, state)
                    self.count(tenant, "lost")

    # ------------------------------------------------------------ reading

    def read(self, intervals: Sequence[Interval]) -> None:
        """Somebody is about to read these: they are kept until `done_reading`, and stay in memory or come back."""
        self.holdings.retain(intervals)
        self.holdings.pin(intervals)

    def done_reading(self, intervals: Sequence[Interval]) -> None:
        self.holdings.unpin(intervals)
        self.holdings.let_go(intervals)

    # ------------------------------------------------------------ conservation

    def check(self, readers: Iterable[Sequence[Interval]] = ()) -> None:
        """Raise AssertionError unless every token is kept exactly as often as something needs it.

        `readers`: what is read beside the requests that the store knows, see `read`.
        """
        kept: list[Interval] = []
        pinned: list[Segment] = []
        states = 0
        for tenant, space in self._spaces.items():
            assert space, f"tenant {tenant!r} has nothing"
            assert not space.states.keys() & space.running.keys(), "a state is sealed and running"
            states += len(space.states)
            for state in space.states.values():
                kept += state.handed_on
                assert (tenant, state.id) in self.leases, f"state {state.id} has no lease"
            readers = (*readers, *(running.context.intervals for running in space.running.values()))
        for intervals in readers:
            kept += intervals
            pinned += dict.fromkeys(interval.segment for interval in intervals)
        assert len(self.leases) == states, f"{len(self.leases)} leases of {states} states"
        self.holdings.check(kept, pinned)

    # ------------------------------------------------------------ inside

    def _new(self, refs: Sequence[wire.Ref], context: ContextPlan) -> list[Segment]:
        """The derived segments that a compile has made. All others that it finds are held."""
        if all(ref.mapper is None for ref in refs):
            return []
        return [segment for segment in context.segments if segment not in self.holdings]

    def _adopted(self, running: Running) -> list[Interval]:
        """Make known what is new of what it reads. Returns what of that is kept until it is read."""
        derived = self._new(running.refs, running.context)
        for segment in derived:
            self.holdings.adopt(segment)
        return [replace(part, segment=segment) for segment in derived for part in segment.context or ()]

    def _may_read(self, reader: ModelStamp, read: ModelStamp) -> bool:
        """Whether KV that was computed under `read` means something to a request under `reader`."""
        if read == reader or not self._reads:
            return read == reader
        if (_adapter_name(reader), _adapter_name(read)) not in self._reads:
            return False
        return replace(read, adapter=reader.adapter) == reader

    def _drop(self, tenant: str, state: State) -> None:
        """The client's handle is gone."""
        del self._spaces[tenant].states[state.id]
        self._tidy(tenant)
        self.leases.end((tenant, state.id))
        self.holdings.let_go(state.handed_on)

    def _tidy(self, tenant: str) -> None:
        """Keys that nobody named come and go: what they did is then remembered together."""
        if self._spaces[tenant]:
            return
        del self._spaces[tenant]
        if is_unnamed(tenant):
            for key in [key for key in self.counts if key[0] == tenant]:
                self.counts[label(tenant), key[1]] += self.counts.pop(key)

    def _lease_left(self, tenant: str, known: Known) -> float | None:
        if isinstance(known, State):
            return self.leases.left((tenant, known.id))
        return known.lease if isinstance(known, Running) else None

    def _check_limit(self, have: int, limit: int, what: str, hint: str) -> None:
        if limit and have >= limit:
            raise Refusal("rate_limited", f"this API key may have {limit} {what}, and has {have}", hint=hint)

    def _in_use(self, state_id: str) -> Refusal:
        return Refusal(
            "invalid_request",
            f"the id {state_id} is already in use",
            hint="every generate makes a new state and needs a fresh random id",
            param="id",
        )

    def _remember(self, key: Key) -> None:
        self._released[key] = None
        if len(self._released) > REMEMBERED_IDS:
            self._released.popitem(last=False)


def _adapter_name(stamp: ModelStamp) -> str | None:
    """None only for the model itself: an adapter without a name is nobody's, whatever is declared."""
    return stamp.adapter and (stamp.adapter_name or stamp.adapter)


def _incompatible(what: str, theirs: ModelStamp, mine: ModelStamp) -> Refusal:
    return Refusal(
        "state_incompatible",
        f"{what} was computed under {theirs.differences(mine)}",
        hint="KV of one model, weight version or adapter means nothing to another: compute it anew",
        param="refs",
    )
