"""Any life of a store, held against the truth about every single token (`truth.py`).

Two tenants with the same ids make, read, evict, rebuild, renew and release states until their leases are over or the
pool is cleared. The fake pool sees a second free and a read after a free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.wire import ContextSpec, Ref
from anabranch_server.compile import ContextPlan, compile_context
from anabranch_server.counting import counts_by_label, counts_of
from anabranch_server.limits import Limits
from anabranch_server.segments import Interval, Segment
from anabranch_server.store import Running, StateStore
from anabranch_server.tenancy import label
from tests.server.pool import STAMP, Memory, refused
from tests.server.truth import Name, Read, Token, Truth

TENANTS = ("x", "key:1")
SECONDS = st.integers(5, 40).map(float)
SELDOM = st.sampled_from([False] * 11 + [True])


class Lives(RuleBasedStateMachine):
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.truth = Memory(self.page_size), Truth(self.page_size)
        self.store = StateStore(self.memory.free, Limits(default_lease=20.0, max_lease=40.0))
        self.store.holdings.page_size = self.page_size
        self.segments: dict[Name, Segment] = {}
        self.requests: dict[Name, Running] = {}
        self.used: list[Name] = []
        self.free_again: set[Name] = set()
        self.events: Counter[tuple[str, str]] = Counter()
        self.contexts: dict[Name, tuple[Interval, ...]] = {}
        """What those that are being computed again read."""
        self.need: Counter[Token] = Counter()
        self.now = 0.0

    def long(self, n: int) -> int:
        """How many tokens a state gets that is `n` at page size 1: it is to have about as many pages, and a rest."""
        return n if self.page_size == 1 else n * (self.page_size // 4 + 1) - n // 2

    def pick(self, data: st.DataObject, names: Any) -> Name:
        return data.draw(st.sampled_from(list(names)))

    def name_of(self, segment: Segment) -> Name:
        return segment.owner, segment.id

    def happened(self, name: Name, *events: str) -> None:
        self.events.update((label(name[0]), event) for event in events)

    def sealed(self, name: Name, n: int) -> None:
        running = self.requests.pop(name)
        self.memory.read(running.context.intervals)
        lease = self.truth.running[name].lease
        self.segments[name] = self.store.seal(running, range(n), self.memory.take(name, n)).segment
        self.truth.seal(name, n)
        lease = 20.0 if lease is None else lease
        self.truth.leases[name] = lease, inf
        self.happened(name, "created")

    # ------------------------------------------------------------ requests

    @initialize()
    def begin_with_some(self) -> None:
        """A root, a child that inherits it, one that does not hand it on, and one of the other tenant."""
        for tenant, refs in [("x", ()), ("x", ("inherit", 0)), ("x", ("apart", 0)), ("key:1", ())]:
            parent = f"{refs[1]:032x}" if refs else ""
            made = (Ref(kind="inherit", id=parent, propagate=refs[0] == "inherit"),) if refs else ()
            sees = set(self.truth.states[tenant, parent]) if refs else set()
            name = self.opened(tenant, made, sees, sees if refs and refs[0] == "inherit" else set(), None)
            self.sealed(name, self.long(6))

    def opened(self, tenant: str, refs: tuple[Ref, ...], sees: set, passes: set, lease: float | None) -> Name:
        name = tenant, f"{sum(owner == tenant for owner, _ in self.used):032x}"
        context = compile_context(ContextSpec(refs=refs), self.store.parents(tenant, refs, STAMP))
        self.requests[name] = running = Running(name[1], context, 1, STAMP, refs, lease=lease, tenant=tenant)
        self.store.open(running)
        self.used.append(name)
        self.truth.running[name] = Read(sees, passes, lease=lease)
        for ref in refs:
            seconds = self.truth.leases[tenant, ref.id][0]
            self.truth.leases[tenant, ref.id] = seconds, inf
        return name

    @rule(data=st.data(), tenant=st.sampled_from(TENANTS), n_refs=st.integers(0, 3), lease=st.none() | SECONDS)
    def open(self, data: st.DataObject, tenant: str, n_refs: int, lease: float | None) -> None:
        self.drawn(data, tenant, n_refs, lease)

    def drawn(self, data: st.DataObject, tenant: str, n_refs: int, lease: float | None) -> Name:
        mine = [name for name in self.truth.states if name[0] == tenant]
        refs, sees, passes = [], set(), set()
        for _ in range(n_refs if mine else 0):
            name, propagate = self.pick(data, mine), data.draw(st.booleans())
            n, seen = self.truth.length[name], self.truth.states[name]
            match data.draw(st.sampled_from(["inherit", "upto", "span"])):
                case "inherit":
                    refs.append(Ref(kind="inherit", id=name[1], propagate=propagate))
                    picked = seen
                case "upto":
                    cut = data.draw(st.integers(0, n))
                    refs.append(Ref(kind="inherit", id=name[1], upto=cut, propagate=propagate))
                    picked = {(one, i) for one, i in seen if one != name or i < cut}
                case _:
                    start = data.draw(st.integers(0, n - 1))
                    stop = data.draw(st.integers(start, n))
                    refs.append(Ref(kind="artifact", id=name[1], span=(start, stop), propagate=propagate))
                    picked = {(name, i) for i in range(start, stop)}
            sees |= picked
            passes |= picked if propagate else set()
        return self.opened(tenant, tuple(refs), sees, passes, lease)

    @rule(data=st.data(), tenant=st.sampled_from(TENANTS), n_refs=st.integers(1, 3), n=st.integers(1, 7))
    def make(self, data: st.DataObject, tenant: str, n_refs: int, n: int) -> None:
        """Open and seal in one step, if all that it reads is in memory."""
        name = self.drawn(data, tenant, n_refs, None)
        if not self.store.holdings.missing(self.requests[name].context.intervals):
            self.sealed(name, self.long(n))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), n=st.integers(1, 5))
    def end_well(self, data: st.DataObject, n: int) -> None:
        """If all that it reads is in memory; else that is computed again."""
        name = self.pick(data, self.requests)
        missing = self.store.holdings.missing(self.requests[name].context.intervals)
        self.check_missing(missing, {one for one, _ in self.truth.running[name].sees})
        if missing:
            self.begin(self.name_of(missing[0]))
        elif self.truth.running[name].keep:
            self.sealed(name, self.long(n))
        else:
            self.memory.read(self.requests[name].context.intervals)
            del self.truth.running[name]
            self.store.close(self.requests.pop(name), "done")
            self.happened(name, "created", "freed")

    @precondition(lambda self: self.requests and self.truth.out)
    @rule(data=st.data(), n=st.integers(1, 5))
    def bring_back_what_it_reads_and_end_well(self, data: st.DataObject, n: int) -> None:
        name = self.pick(data, self.requests)
        while missing := self.store.holdings.missing(self.requests[name].context.intervals):
            self.begin(self.name_of(missing[0]))
            self.end(self.name_of(missing[0]), well=True)
            self.the_store_says_what_is_true()
        if self.truth.running[name].keep:
            self.sealed(name, self.long(n))

    def check_missing(self, missing: list[Segment], read: set[Name]) -> None:
        """All that must come back comes once, and after all that it needs."""
        there: set[Name] = set()
        for segment in missing:
            name = self.name_of(segment)
            assert name not in there
            assert not self.truth.missing(one for one, _ in self.truth.saw[name]) - there, "what it needs comes later"
            there.add(name)
        assert there == self.truth.missing(read)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), outcome=st.sampled_from(["failed", "cancelled"]))
    def end_badly(self, data: st.DataObject, outcome: str) -> None:
        self.ended(self.pick(data, self.requests), outcome)

    def ended(self, name: Name, outcome: str) -> None:
        del self.truth.running[name]
        self.store.close(self.requests.pop(name), outcome)
        self.free_again.add(name)
        self.happened(name, outcome)

    # ------------------------------------------------------------ states

    @precondition(lambda self: self.truth.states)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = self.pick(data, self.truth.states)
        self.truth.drop(name)
        self.store.release(*name)
        self.happened(name, "freed")

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release_while_running(self, data: st.DataObject) -> None:
        name = self.pick(data, self.requests)
        self.truth.running[name].keep = False
        self.store.release(*name)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), seconds=st.none() | SECONDS)
    def renew(self, data: st.DataObject, seconds: float | None) -> None:
        name = self.pick(data, self.used)
        if name in self.truth.states:
            self.store.renew(*name, seconds)
            seconds = self.truth.leases[name][0] if seconds is None else seconds
            self.truth.leases[name] = seconds, inf
        elif name in self.requests:
            self.store.renew(*name, seconds)
            read = self.truth.running[name]
            read.lease = read.lease if seconds is None else seconds

    @rule(seconds=st.integers(0, 3))
    def time_goes_by(self, seconds: int) -> None:
        self.now += seconds
        for name, (lease, end) in self.truth.leases.items():
            self.truth.leases[name] = lease, min(end, self.now + lease)  # what is new begins now
        over = [name for name, (_, end) in self.truth.leases.items() if end <= self.now]
        assert self.store.expire(self.now) + self.store.expire(self.now) == len(over)
        for name in over:
            self.truth.drop(name)
            self.free_again.add(name)
            self.happened(name, "expired")

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def misuse_an_id(self, data: st.DataObject) -> None:
        name = tenant, state_id = self.pick(data, self.used)
        other = (TENANTS[1] if tenant == TENANTS[0] else TENANTS[0]), state_id
        if other not in self.used:
            with refused("state_not_found"):
                self.store.release(*other)
        if name not in self.free_again:
            in_use = name in self.truth.states or name in self.requests
            with refused("invalid_request" if in_use else "state_released"):
                self.store.open(Running(state_id, ContextPlan(), 1, STAMP, tenant=tenant))
        if name not in self.truth.states and name not in self.requests:
            with refused("state_not_found" if name in self.free_again else "state_released"):
                self.store.release(*name)

    # ------------------------------------------------------------ out of memory and back

    @rule(tokens=st.integers(1, 12))
    def evict(self, tokens: int) -> None:
        before, able = self.slots_by_name(self.need), self.truth.evictable(self.need)
        freed = self.store.holdings.evict(tokens)
        gone = {name for name, one in self.segments.items() if before[name] and one.slots is None} - self.truth.out
        assert gone <= able
        assert freed == sum(before[name] for name in gone)
        assert gone == able if freed < tokens else freed - max(before[name] for name in gone) < tokens
        self.truth.out |= gone
        for name in gone:
            self.happened(name, "evictions")

    def slots_by_name(self, tokens: Iterable[Token]) -> Counter[Name]:
        pages = {(name, i // self.page_size) for name, i in tokens}
        return Counter(name for name, _ in pages for _ in range(self.page_size))

    def begin(self, name: Name) -> None:
        """Begin to compute it again, unless that is under way."""
        if name in self.truth.rebuilding:
            return
        segment, needed = self.segments[name], [i for one, i in self.need if one == name]
        assert segment.context is not None
        assert self.store.holdings.needed_of(segment) == max(needed) + 1
        self.truth.rebuilding[name] = Read(self.truth.saw[name], length=max(needed) + 1)
        self.contexts[name] = segment.context
        self.store.read(segment.context)

    @precondition(lambda self: self.truth.out)
    @rule(data=st.data())
    def begin_a_rebuild(self, data: st.DataObject) -> None:
        name = self.pick(data, sorted(self.truth.out))
        missing = self.store.holdings.missing([Interval(self.segments[name], 0, 1)])
        self.check_missing(missing, {name})
        self.begin(self.name_of(missing[0]))

    @precondition(lambda self: self.truth.rebuilding)
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def end_a_rebuild(self, data: st.DataObject, well: bool) -> None:
        self.end(self.pick(data, self.truth.rebuilding), well)

    def end(self, name: Name, well: bool) -> None:
        context, segment, read = self.contexts.pop(name), self.segments[name], self.truth.rebuilding.pop(name)
        self.memory.read(context)
        if well:
            slots = self.memory.take(name, read.length)
            assert (segment in self.store.holdings) == (name in self.truth.out)
            if name in self.truth.out:
                self.store.holdings.restore(segment, slots)
                self.truth.out.remove(name)
                self.happened(name, "rebuilds")
            else:
                self.memory.free(slots, 0, self.store.holdings.in_pages(len(slots)))
        self.store.done_reading(context)

    @rule(really=SELDOM)
    def clear_the_pool(self, really: bool) -> None:
        """All requests are gone first, as when SGLang is told to flush."""
        if not really:
            return
        for name in list(self.requests):
            self.ended(name, "failed")
        for name in list(self.truth.rebuilding):
            self.end(name, well=False)
        self.memory.clear()
        freed = len(self.memory.freed)
        self.store.reset()
        self.truth.settle()
        for name in self.truth.clear():
            self.free_again.add(name)
            self.happened(name, "lost")
        assert len(self.memory.freed) == freed, "given back to a cleared pool"

    # ------------------------------------------------------------ the comparison

    @invariant()
    def the_store_says_what_is_true(self) -> None:
        truth, holdings = self.truth, self.store.holdings
        self.need = need = truth.settle()
        self.store.check(self.contexts.values())
        inside = {token for token in need if token[0] not in truth.out}
        assert self.memory.in_memory == inside
        assert {self.name_of(one) for one, _ in holdings.items()} == {name for name, _ in need}
        assert {self.name_of(one) for one, _ in holdings.items() if one.slots is None} == truth.out
        evictable = truth.evictable(need)
        slots = self.truth.slots
        assert self.memory.used == holdings.held_tokens == slots(inside)
        assert holdings.reclaimable_tokens == slots(token for token in need if token[0] in evictable)
        owned: Counter[str] = Counter()
        for (tenant, _), n in self.slots_by_name(need).items():
            owned[tenant] += n
        assert holdings.owned_tokens == owned
        self.readers_find_what_they_read(evictable)
        self.spaces_are_true()
        self.numbers_are_true(evictable)

    def readers_find_what_they_read(self, evictable: set[Name]) -> None:
        for name, running in self.requests.items():
            read = self.truth.running[name]
            read.started = read.started or not self.store.holdings.missing(running.context.intervals)
            if read.started:
                self.memory.read(running.context.intervals)
            unmovable = {name for name, _ in self.need} - self.truth.out - evictable | {one for one, _ in read.sees}
            coming = unmovable & self.truth.out  # all tokens up to the last one that is needed are computed
            last = {name: max(i for one, i in self.need if one == name) for name in coming}
            stays = [token for token in self.need if token[0] in unmovable - coming]
            expected = self.truth.slots(stays + [(name, i) for name in coming for i in range(last[name] + 1)])
            assert self.store.holdings.unmovable_beside(running.context.intervals) == expected
        for context in self.contexts.values():
            self.memory.read(context)
        for name in self.truth.states:
            assert self.segments[name].slots is None or all(
                slot in self.memory.live for slot in self.segments[name].slots
            ), "of a state, all tokens are in memory or none"

    def spaces_are_true(self) -> None:
        spaces = self.store.spaces
        assert {(tenant, one) for tenant in spaces for one in spaces[tenant].states} == self.truth.states.keys()
        assert {(tenant, one) for tenant in spaces for one in spaces[tenant].running} == self.requests.keys()
        for name, (seconds, end) in self.truth.leases.items():
            assert self.store.leases.left(name) == min(seconds, end - self.now)

    def numbers_are_true(self, evictable: set[Name]) -> None:
        labels = counts_by_label(self.store)
        for tenant in TENANTS:
            mine = {token: n for token, n in self.need.items() if token[0][0] == tenant}
            inside = {token: n for token, n in mine.items() if token[0] not in self.truth.out}
            counts = counts_of(self.store, tenant)
            slots = self.truth.slots
            assert counts["held_tokens"] == slots(inside)
            assert counts["evicted_tokens"] == slots(mine) - slots(inside)
            shared = slots(token for token, n in inside.items() if n > 1)
            assert shared <= counts["shared_tokens"] <= slots(inside), "who needs a page twice shares it with himself"
            assert self.page_size > 1 or shared == counts["shared_tokens"]
            assert counts["pinned_tokens"] == slots(token for token in inside if token[0] in self.truth.pinned)
            assert counts["reclaimable_tokens"] == slots(token for token in inside if token[0] in evictable)
            states = [name for name in self.truth.states if name[0] == tenant]
            assert counts["states"] == len(states)
            assert counts["evicted_states"] == sum(name in self.truth.out for name in states)
            assert labels[label(tenant)]["held_tokens"] == slots(inside)
        told: Counter[tuple[str, str]] = Counter()
        for (tenant, event), n in self.store.counts.items():
            told[label(tenant), event] += n
        assert told == self.events

    def teardown(self) -> None:
        for name in list(self.requests):
            self.store.close(self.requests[name], "failed")
        for name in list(self.truth.rebuilding):
            self.end(name, well=False)
        for name in list(self.truth.states):
            self.store.release(*name)
        self.store.check()
        assert (self.memory.live, list(self.store.holdings.items()), self.store.spaces) == (set(), [], {})
        assert (self.store.holdings.held_tokens, self.store.holdings.reclaimable_tokens) == (0, 0)


class LivesInPagesOf4(Lives):
    page_size = 4


class LivesInPagesOf16(Lives):
    page_size = 16


class LivesInPagesOf64(Lives):
    page_size = 64


SETTINGS = settings(stateful_step_count=60, deadline=None, derandomize=True, database=None)
TestLives = Lives.TestCase
TestLives.settings = settings(SETTINGS, max_examples=100)
TestLivesInPagesOf4 = LivesInPagesOf4.TestCase
TestLivesInPagesOf4.settings = settings(SETTINGS, max_examples=40)
TestLivesInPagesOf16 = LivesInPagesOf16.TestCase
TestLivesInPagesOf16.settings = settings(SETTINGS, max_examples=15)
TestLivesInPagesOf64 = LivesInPagesOf64.TestCase
TestLivesInPagesOf64.settings = settings(SETTINGS, max_examples=15)
