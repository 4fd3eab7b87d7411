"""The state store: what keeps a segment alive, when it is freed, and which ids may be used.

Slots are names here and the pool is a list of what came back; contexts come from the real compiler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.wire import ContextSpec, Ref
from anabranch_server import store as module
from anabranch_server.compile import ContextPlan, compile_context
from anabranch_server.errors import Refusal, StateRunning
from anabranch_server.models import ModelStamp
from anabranch_server.store import Running, StateStore, Waiting

Tokens = set[tuple[str, int]]

STAMP = ModelStamp(model="m", weights_version="1", dtype="bfloat16", kv_dtype="auto", rope="rope_theta=10000.0")
ID = {letter: f"{ord(letter):032x}" for letter in "abcdefgh"}


def inherit(letter: str, upto: int | None = None, propagate: bool = True) -> Ref:
    return Ref(kind="inherit", id=ID[letter], upto=upto, propagate=propagate)


def artifact(letter: str, start: int, stop: int, propagate: bool = True) -> Ref:
    return Ref(kind="artifact", id=ID[letter], span=(start, stop), propagate=propagate)


@dataclass
class Pool:
    """A store, and the slots that it gave back, in order."""

    freed: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = StateStore(free=self.freed.append)

    def open(self, letter: str, *refs: Ref, input_tokens: int = 1) -> Running:
        context = compile_context(ContextSpec(refs=refs), self.store.parents(refs, STAMP))
        running = Running(ID[letter], context, input_tokens, STAMP, refs)
        self.store.open(running)
        self.store.check()
        return running

    def seal(self, letter: str, n: int = 3) -> None:
        self.store.seal(ID[letter], range(n), f"slots of {letter}")
        self.store.check()

    def make(self, letter: str, *refs: Ref, n: int = 3) -> None:
        self.open(letter, *refs)
        self.seal(letter, n)

    def close(self, letter: str, failed: bool = False) -> None:
        self.store.close(ID[letter], failed=failed)
        self.store.check()

    def release(self, *letters: str) -> None:
        for letter in letters:
            self.store.release(ID[letter])
            self.store.check()

    @property
    def gone(self) -> str:
        return "".join(slots.removeprefix("slots of ") for slots in self.freed)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def refused(code: str):
    return pytest.raises(Refusal, check=lambda refusal: refusal.code == code)


# ---------------------------------------------------------------- keeping and freeing


def test_a_state_is_held_until_it_is_released(pool: Pool):
    pool.make("a", n=5)
    assert (pool.store.held_tokens, pool.gone) == (5, "")
    pool.release("a")
    assert (pool.store.held_tokens, pool.gone, pool.store.states) == (0, "a", {})


def test_a_running_request_holds_no_tokens_of_its_own_but_keeps_what_it_reads(pool: Pool):
    pool.make("a", n=5)
    pool.open("b", inherit("a"))
    pool.release("a")
    assert (pool.store.held_tokens, pool.gone) == (5, "")
    pool.close("b", failed=True)
    assert (pool.store.held_tokens, pool.gone) == (0, "a")


def test_a_released_parent_stays_while_a_child_sees_it_and_goes_once_with_the_child(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.release("a")
    assert (pool.store.held_tokens, pool.gone) == (6, "")
    pool.release("b")
    assert pool.store.held_tokens == 0
    assert sorted(pool.gone) == ["a", "b"]


def test_a_grandchild_keeps_what_it_inherits_through_a_released_parent(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.make("c", inherit("b"), n=1)
    pool.release("a", "b")
    assert (pool.store.held_tokens, pool.gone) == (7, "")
    pool.make("d", inherit("c"), n=1)
    pool.release("c")
    assert pool.gone == ""
    pool.release("d")
    assert sorted(pool.gone) == ["a", "b", "c", "d"]


def test_the_last_of_several_children_frees_the_shared_parent(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.make("c", inherit("a"), inherit("b"), inherit("a", upto=1))
    pool.release("a", "c")
    assert pool.gone == "c"
    pool.release("b")
    assert sorted(pool.gone) == ["a", "b", "c"]


def test_children_released_first_free_only_themselves(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.release("b")
    assert pool.gone == "b"
    pool.release("a")
    assert pool.gone == "ba"


def test_an_artifact_keeps_its_state_but_not_what_that_state_saw(pool: Pool):
    pool.make("a", n=7)
    pool.make("b", inherit("a"), n=4)
    pool.make("c", artifact("b", 1, 3), n=2)
    pool.release("a", "b")
    assert (pool.gone, pool.store.held_tokens) == ("a", 6)
    pool.release("c")
    assert sorted(pool.gone) == ["a", "b", "c"]


def test_a_rewind_to_0_keeps_the_grandparent_but_not_the_parent(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.make("c", inherit("b", upto=0))
    pool.release("a", "b")
    assert pool.gone == "b"


def test_an_empty_span_keeps_nothing(pool: Pool):
    pool.make("a")
    pool.make("b", artifact("a", 2, 2))
    pool.release("a")
    assert pool.gone == "a"


def test_context_that_does_not_propagate_is_needed_while_running_and_dropped_when_sealed(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", n=2)
    pool.open("c", inherit("a", propagate=False), inherit("b"))
    pool.release("a", "b")
    assert (pool.gone, pool.store.held_tokens) == ("", 6)
    pool.seal("c", n=1)
    assert (pool.gone, pool.store.held_tokens) == ("a", 3)
    pool.release("c")
    assert sorted(pool.gone) == ["a", "b", "c"]


def test_a_segment_that_propagates_in_part_is_kept(pool: Pool):
    pool.make("a", n=6)
    pool.make("b", inherit("a", propagate=False), artifact("a", 2, 3))
    pool.release("a")
    assert pool.gone == ""
    pool.release("b")
    assert sorted(pool.gone) == ["a", "b"]


def test_sealing_needs_at_least_the_input(pool: Pool):
    pool.open("a", input_tokens=4)
    with pytest.raises(AssertionError):
        pool.store.seal(ID["a"], range(3), "slots of a")


def test_a_state_may_consist_of_its_input_alone(pool: Pool):
    pool.open("a", input_tokens=4)
    pool.seal("a", n=4)
    info = pool.store.info(ID["a"])
    assert (info.input_tokens, info.generated_tokens) == (4, 0)


# ---------------------------------------------------------------- ends of a request


def test_release_while_running_waits_for_the_end_and_then_leaves_no_state(pool: Pool):
    pool.make("a", n=4)
    running = pool.open("b", inherit("a"))
    pool.release("a", "b", "b")
    assert not running.keep
    assert ID["b"] in pool.store.running
    assert pool.gone == ""
    pool.close("b")
    assert (pool.gone, pool.store.held_tokens) == ("a", 0)
    with refused("state_released"):
        pool.store.state(ID["b"])


def test_what_is_not_kept_is_never_sealed(pool: Pool):
    pool.open("a")
    pool.release("a")
    with pytest.raises(AssertionError):
        pool.store.seal(ID["a"], range(3), "slots of a")


def test_a_request_that_was_not_to_be_kept_ends_as_released(pool: Pool):
    pool.open("a").keep = False
    pool.close("a")
    with refused("state_released"):
        pool.store.state(ID["a"])
    with refused("invalid_request"):
        pool.store.check_new(ID["a"])
    assert (pool.store.counts["created"], pool.store.counts["freed"], pool.store.counts["failed"]) == (1, 1, 0)


def test_a_failed_request_was_never_a_state_and_its_id_is_free_again(pool: Pool):
    pool.open("a")
    pool.close("a", failed=True)
    with refused("state_not_found"):
        pool.store.state(ID["a"])
    pool.make("a")
    assert (pool.store.counts["created"], pool.store.counts["freed"], pool.store.counts["failed"]) == (1, 0, 1)


def test_counts_follow_the_lives_of_states(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.release("a")
    assert (pool.store.counts["created"], pool.store.counts["freed"]) == (2, 1)


def test_reset_forgets_all_states_and_gives_nothing_back(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.open("c", inherit("b"))
    pool.store.reset()
    pool.store.check()
    assert (pool.store.states, pool.store.running, pool.store.held_tokens, pool.freed) == ({}, {}, 0, [])
    assert pool.store.counts["freed"] == 2
    with refused("state_not_found"):
        pool.store.state(ID["a"])
    pool.make("d", n=1)
    assert pool.store.held_tokens == 1


# ---------------------------------------------------------------- ids and look-up


def test_an_unknown_id_is_not_found(pool: Pool):
    for question in (pool.store.state, pool.store.info, pool.store.release):
        with refused("state_not_found"):
            question(ID["a"])
    with pytest.raises(Refusal) as refusal:
        pool.store.parents([inherit("a")], STAMP)
    assert (refusal.value.code, refusal.value.param, refusal.value.status) == ("state_not_found", "refs", 404)


def test_a_released_id_says_so_and_is_released_only_once(pool: Pool):
    pool.make("a")
    pool.release("a")
    for question in (pool.store.state, pool.store.info, pool.store.release):
        with refused("state_released"):
            question(ID["a"])
    with pytest.raises(Refusal) as refusal:
        pool.store.parents([inherit("a")], STAMP)
    assert (refusal.value.code, refusal.value.param, refusal.value.status) == ("state_released", "refs", 410)
    assert pool.gone == "a"


def test_a_released_parent_cannot_be_referenced_though_its_child_keeps_its_tokens(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.release("a")
    with refused("state_released"):
        pool.open("c", artifact("a", 0, 1))
    pool.make("c", inherit("b"))
    assert pool.store.info(ID["c"]).context_tokens == 6


def test_an_id_is_used_once(pool: Pool):
    pool.make("a")
    pool.open("b", inherit("a"))
    pool.make("c")
    pool.release("c")
    pool.store.waiting[ID["d"]] = Waiting(ID["d"], ID["a"], None)
    for letter in "abcd":
        with pytest.raises(Refusal) as refusal:
            pool.open(letter, inherit("a"))
        assert (refusal.value.code, refusal.value.param) == ("invalid_request", "id")
    pool.store.check()  # what was refused retained nothing
    pool.store.check_new(ID["e"])


def test_a_running_or_waiting_parent_is_waited_for(pool: Pool):
    pool.make("a")
    pool.open("b")
    pool.store.waiting[ID["c"]] = Waiting(ID["c"], ID["a"], None)
    for letter in "bc":
        with pytest.raises(StateRunning) as running:
            pool.store.parents([inherit("a"), inherit(letter)], STAMP)
        assert running.value.state_id == ID[letter]
    pool.seal("b")
    assert list(pool.store.parents([inherit("b"), inherit("a"), artifact("b", 0, 1)], STAMP)) == [ID["b"], ID["a"]]


def test_what_can_never_run_does_not_wait_first(pool: Pool):
    pool.open("b")
    with refused("state_not_found"):
        pool.store.parents([inherit("b"), inherit("a")], STAMP)


def test_a_state_computed_under_anything_else_is_refused_by_the_names_of_the_fields(pool: Pool):
    pool.make("a")
    for change, words in [
        ({"model": "other"}, "model m, not other"),
        ({"weights_version": "2"}, "weights_version 1, not 2"),
        ({"dtype": "float16"}, "dtype bfloat16, not float16"),
        ({"kv_dtype": "fp8_e5m2"}, "kv_dtype auto, not fp8_e5m2"),
        ({"rope": "x"}, "rope rope_theta=10000.0, not x"),
        ({"adapter": "poet"}, "adapter none, not poet"),
    ]:
        stamp = ModelStamp(**{**{f: getattr(STAMP, f) for f in STAMP.__slots__}, **change})
        with pytest.raises(Refusal) as refusal:
            pool.store.parents([inherit("a")], stamp)
        assert (refusal.value.code, refusal.value.status) == ("state_incompatible", 409)
        assert words in refusal.value.message
        assert ID["a"] in refusal.value.message


def test_a_state_released_while_it_waits_will_not_be_kept(pool: Pool):
    pool.store.waiting[ID["a"]] = Waiting(ID["a"], ID["b"], None)
    assert pool.store.info(ID["a"]).status == "waiting"
    pool.store.release(ID["a"])
    assert not pool.store.waiting[ID["a"]].keep


def test_who_waits_is_ready_once_the_parent_is_sealed_or_gone(pool: Pool):
    pool.store.waiting = {
        ID["b"]: Waiting(ID["b"], ID["a"], "child"),
        ID["c"]: Waiting(ID["c"], ID["b"], "grandchild"),
    }
    first, second = pool.store.next_ready(), pool.store.next_ready()
    assert first is not None and first.request == "child", "nobody runs as a, but b still waits"
    assert second is not None and second.request == "grandchild"
    assert pool.store.next_ready() is None


def test_a_child_that_is_ready_together_with_its_parent_still_finds_it_waiting(pool: Pool):
    """d waits for b, and will then see that it also needs c, which is ready at the same moment."""
    pool.store.waiting = {ID["d"]: Waiting(ID["d"], ID["b"], None), ID["c"]: Waiting(ID["c"], ID["a"], None)}
    assert pool.store.next_ready() is not None
    with pytest.raises(StateRunning):
        pool.store.parents([Ref(kind="inherit", id=ID["c"])])


def test_remembered_ids_are_bounded_and_the_oldest_is_forgotten_first(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "REMEMBERED_IDS", 3)
    for letter in "abcd":
        pool.make(letter)
        pool.release(letter)
    assert list(pool.store.released) == [ID["b"], ID["c"], ID["d"]]
    with refused("state_not_found"):
        pool.store.state(ID["a"])
    with refused("state_released"):
        pool.store.state(ID["b"])
    pool.make("a")


def test_info_describes_sealed_and_running_states(pool: Pool):
    pool.make("a", n=4)
    refs = (inherit("a", upto=3),)
    pool.open("b", *refs, input_tokens=2)
    info = pool.store.info(ID["b"])
    assert (info.status, info.input_tokens, info.generated_tokens) == ("running", 2, 0)
    assert (info.start, info.context_tokens, info.refs) == (3, 3, refs)
    pool.seal("b", n=7)
    info = pool.store.info(ID["b"])
    assert (info.id, info.status, info.input_tokens, info.generated_tokens) == (ID["b"], "sealed", 2, 5)
    assert (info.start, info.context_tokens, info.refs) == (3, 3, refs)


def test_sealing_keeps_what_the_request_said_of_itself(pool: Pool):
    running = Running(ID["a"], ContextPlan((), 17), 2, STAMP, turn="due")
    pool.store.open(running)
    state = pool.store.seal(ID["a"], [5, 6], "slots of a")
    assert (state.id, state.turn, state.stamp) == (ID["a"], "due", STAMP)
    assert (state.segment.start, list(state.segment.tokens), state.segment.slots) == (17, [5, 6], "slots of a")


# ---------------------------------------------------------------- the check itself


def test_check_finds_every_kind_of_miscount(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.open("c", inherit("b"))
    store, segment = pool.store, pool.store.states[ID["a"]].segment
    assert segment.keepers == 3  # itself, b, and the running c

    segment.keepers += 1
    with pytest.raises(AssertionError, match="4 keepers, 3 needed"):
        store.check()
    segment.keepers -= 1
    store.held_tokens += 1
    with pytest.raises(AssertionError, match="7 tokens held, 6 needed"):
        store.check()
    store.held_tokens -= 1
    store.check()
    lost = store.states.pop(ID["b"])
    with pytest.raises(AssertionError):
        store.check()
    store.states[ID["b"]] = store.states[ID["c"]] = lost
    with pytest.raises(AssertionError):
        store.check()


def test_check_finds_a_segment_that_nobody_needs_and_nobody_freed(pool: Pool):
    pool.make("a")
    del pool.store.states[ID["a"]]
    with pytest.raises(AssertionError, match="3 tokens held, 0 needed"):
        pool.store.check()


# ---------------------------------------------------------------- any life


class Lives(RuleBasedStateMachine):
    """Random lives of states beside a model that knows, for each, the single tokens it sees and hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[Any] = []
        self.store = StateStore(free=self.freed.append)
        self.sees: dict[str, Tokens] = {}  # running requests
        self.passes: dict[str, Tokens] = {}  # running requests: what they will hand on
        self.hands_on: dict[str, Tokens] = {}  # sealed states, their own tokens included
        self.length: dict[str, int] = {}  # every segment that ever was
        self.used: list[str] = []  # every id that was opened
        self.failed: set[str] = set()

    def pick(self, data: st.DataObject, ids: Any) -> str:
        return data.draw(st.sampled_from(list(ids)))

    @rule(data=st.data(), n_refs=st.integers(0, 3))
    def open(self, data: st.DataObject, n_refs: int) -> None:
        state_id = f"{len(self.used):032x}"
        refs, sees, passes = [], set(), set()
        for _ in range(n_refs if self.hands_on else 0):
            parent, propagate = self.pick(data, self.hands_on), data.draw(st.booleans())
            cut = data.draw(st.integers(0, self.length[parent]))
            match data.draw(st.sampled_from(["inherit", "upto", "span"])):
                case "inherit":
                    refs.append(Ref(kind="inherit", id=parent, propagate=propagate))
                    picked = self.hands_on[parent]
                case "upto":
                    refs.append(Ref(kind="inherit", id=parent, upto=cut, propagate=propagate))
                    picked = {(u, i) for u, i in self.hands_on[parent] if u != parent or i < cut}
                case _:
                    refs.append(Ref(kind="artifact", id=parent, span=(0, cut), propagate=propagate))
                    picked = {(parent, i) for i in range(cut)}
            sees |= picked
            passes |= picked if propagate else set()
        context = compile_context(ContextSpec(refs=tuple(refs)), self.store.parents(refs, STAMP))
        self.store.open(Running(state_id, context, 1, STAMP, tuple(refs)))
        self.used.append(state_id)
        self.sees[state_id], self.passes[state_id] = sees, passes

    @precondition(lambda self: self.sees)
    @rule(data=st.data(), n=st.integers(1, 4))
    def end_well(self, data: st.DataObject, n: int) -> None:
        state_id = self.pick(data, self.sees)
        passes = self.passes.pop(state_id)
        del self.sees[state_id]
        if self.store.running[state_id].keep:
            self.store.seal(state_id, range(n), state_id)
            self.length[state_id] = n
            self.hands_on[state_id] = passes | {(state_id, i) for i in range(n)}
        else:
            self.store.close(state_id, failed=False)

    @precondition(lambda self: self.sees)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        state_id = self.pick(data, self.sees)
        del self.sees[state_id], self.passes[state_id]
        self.store.close(state_id, failed=True)
        self.failed.add(state_id)

    @precondition(lambda self: self.hands_on)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        state_id = self.pick(data, self.hands_on)
        del self.hands_on[state_id]
        self.store.release(state_id)

    @precondition(lambda self: self.sees)
    @rule(data=st.data())
    def release_while_running(self, data: st.DataObject) -> None:
        self.store.release(self.pick(data, self.sees))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def misuse_an_id(self, data: st.DataObject) -> None:
        state_id = self.pick(data, self.used)
        if state_id not in self.failed:
            with refused("invalid_request"):
                self.store.open(Running(state_id, ContextPlan(), 1, STAMP))
        if state_id not in self.hands_on and state_id not in self.sees:
            with refused("state_not_found" if state_id in self.failed else "state_released"):
                self.store.release(state_id)

    @invariant()
    def what_is_needed_is_held_and_all_else_was_freed_once(self) -> None:
        self.store.check()
        needed = {u for seen in (*self.hands_on.values(), *self.sees.values()) for u, _ in seen}
        assert len(self.freed) == len(set(self.freed)), "freed twice"
        assert set(self.freed) == self.length.keys() - needed
        assert self.store.held_tokens == sum(self.length[u] for u in needed)
        assert self.store.states.keys() == self.hands_on.keys()
        assert self.store.running.keys() == self.sees.keys()
        assert self.store.counts["created"] - self.store.counts["freed"] == len(self.hands_on)
        assert self.store.counts["failed"] == len(self.failed)

    def teardown(self) -> None:
        for state_id in list(self.store.running):
            self.store.close(state_id, failed=True)
        for state_id in list(self.store.states):
            self.store.release(state_id)
        self.store.check()
        assert sorted(self.freed) == sorted(self.length)
        assert self.store.held_tokens == 0


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None)
