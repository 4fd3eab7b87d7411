"""The state store: which ids may be used, what may be referenced, who waits, and what is told of a state.

What keeps tokens alive is in `test_store.py`.
"""

from __future__ import annotations

import pytest

from anabranch_server import store as module
from anabranch_server.compile import ContextPlan
from anabranch_server.errors import StateRunning
from anabranch_server.models import ModelStamp
from anabranch_server.states import Running
from tests.server.pool import ID, STAMP, Pool, artifact, inherit, refused


def test_an_unknown_id_is_not_found(pool: Pool):
    for question in (pool.store.state, pool.store.info, pool.store.release, pool.store.renew):
        with refused("state_not_found"):
            question("", ID["a"])
    with refused("state_not_found") as refusal:
        pool.store.parents("", [inherit("a")], STAMP)
    assert (refusal.value.param, refusal.value.status) == ("refs", 404)


def test_a_released_id_says_so_and_is_released_only_once(pool: Pool):
    pool.make("a")
    pool.release("a")
    for question in (pool.store.state, pool.store.info, pool.store.release, pool.store.renew):
        with refused("state_released"):
            question("", ID["a"])
    with refused("state_released") as refusal:
        pool.store.parents("", [inherit("a")], STAMP)
    assert (refusal.value.param, refusal.value.status) == ("refs", 410)
    assert pool.gone == "a"


def test_a_released_parent_cannot_be_referenced_though_its_child_keeps_its_tokens(pool: Pool):
    pool.make("a")
    pool.make("b", inherit("a"))
    pool.release("a")
    with refused("state_released"):
        pool.open("c", artifact("a", 0, 1))
    pool.make("c", inherit("b"))
    assert pool.store.info("", ID["c"]).context_tokens == 6


def test_an_id_is_used_once(pool: Pool):
    pool.make("a")
    pool.open("b", inherit("a"))
    pool.make("c")
    pool.release("c")
    pool.wait("d", "a")
    for letter in "abcd":
        with refused("state_released" if letter == "c" else "invalid_request") as refusal:
            pool.open(letter, inherit("a"))
        assert refusal.value.param == "id"
    pool.store.check()  # what was refused retained nothing
    pool.store.check_new("", ID["e"])


def test_a_running_or_waiting_parent_is_waited_for(pool: Pool):
    pool.make("a")
    pool.open("b")
    pool.wait("c", "a")
    for letter in "bc":
        with pytest.raises(StateRunning) as running:
            pool.store.parents("", [inherit("a"), inherit(letter)], STAMP)
        assert running.value.state_id == ID[letter]
    pool.seal("b")
    parents = pool.store.parents("", [inherit("b"), inherit("a"), artifact("b", 0, 1)], STAMP)
    assert list(parents) == [ID["b"], ID["a"]]


def test_of_several_parents_that_are_not_sealed_the_first_is_waited_for(pool: Pool):
    pool.open("a")
    pool.open("b")
    with pytest.raises(StateRunning) as running:
        pool.store.parents("", [inherit("b"), inherit("a")], STAMP)
    assert running.value.state_id == ID["b"]


def test_what_can_never_run_does_not_wait_first(pool: Pool):
    pool.open("b")
    with refused("state_not_found"):
        pool.store.parents("", [inherit("b"), inherit("a")], STAMP)


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
        with refused("state_incompatible") as refusal:
            pool.store.parents("", [inherit("a")], stamp)
        assert refusal.value.status == 409
        assert words in refusal.value.message
        assert ID["a"] in refusal.value.message
    assert list(pool.store.parents("", [inherit("a")])) == [ID["a"]], "without a stamp, any will do"


def test_a_state_released_while_it_waits_will_not_be_kept(pool: Pool):
    waiting = pool.wait("a", "b")
    assert pool.store.info("", ID["a"]).status == "waiting"
    pool.store.release("", ID["a"])
    assert not waiting.keep


def test_who_waits_is_ready_once_the_parent_is_sealed_or_gone(pool: Pool):
    pool.wait("b", "a", "child")
    pool.wait("c", "b", "grandchild")
    first, second = pool.store.next_ready(), pool.store.next_ready()
    assert first is not None and first.request == "child", "nobody runs as a, but b still waits"
    assert second is not None and second.request == "grandchild"
    assert pool.store.next_ready() is None
    assert pool.store.spaces == {}


def test_who_waits_for_one_that_waits_is_not_ready_before_it(pool: Pool):
    pool.wait("c", "b", "grandchild")
    pool.wait("b", "a", "child")
    ready = pool.store.next_ready()
    assert ready is not None and ready.request == "child"


def test_who_waits_is_not_ready_while_the_parent_runs(pool: Pool):
    pool.open("a")
    pool.wait("b", "a")
    assert pool.store.next_ready() is None
    pool.close("a", "failed")
    ready = pool.store.next_ready()
    assert ready is not None and ready.id == ID["b"]


def test_a_child_that_is_ready_together_with_its_parent_still_finds_it_waiting(pool: Pool):
    """d waits for b, and will then see that it also needs c, which is ready at the same moment."""
    pool.wait("d", "b")
    pool.wait("c", "a")
    assert pool.store.next_ready() is not None
    with pytest.raises(StateRunning):
        pool.store.parents("", [inherit("c")])


def test_who_stops_waiting_is_unknown_again(pool: Pool):
    waiting = pool.wait("a", "b")
    assert pool.store.stop_waiting("", ID["a"]) is waiting
    with refused("state_not_found"):
        pool.store.known("", ID["a"])
    pool.store.check()


def test_remembered_ids_are_bounded_and_the_oldest_is_forgotten_first(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "REMEMBERED_IDS", 3)
    for letter in "abcd":
        pool.make(letter)
        pool.release(letter)
    with refused("state_not_found"):
        pool.store.state("", ID["a"])
    for letter in "bcd":
        with refused("state_released"):
            pool.store.state("", ID[letter])
    pool.make("a")


def test_info_describes_sealed_and_running_states(pool: Pool):
    pool.make("a", n=4)
    refs = (inherit("a", upto=3),)
    pool.open("b", *refs, input_tokens=2, lease=7.0)
    info = pool.store.info("", ID["b"])
    assert (info.status, info.input_tokens, info.generated_tokens, info.lease) == ("running", 2, 0, 7.0)
    assert (info.start, info.context_tokens, info.refs) == (3, 3, refs)
    pool.seal("b", n=7)
    info = pool.store.info("", ID["b"])
    assert (info.id, info.status, info.input_tokens, info.generated_tokens) == (ID["b"], "sealed", 2, 5)
    assert (info.start, info.context_tokens, info.refs, info.lease) == (3, 3, refs, 7.0)


def test_info_says_whether_a_state_is_in_memory(pool: Pool):
    pool.make("a", n=4)
    assert pool.store.info("", ID["a"]).resident
    pool.evict(1)
    assert not pool.store.info("", ID["a"]).resident


def test_the_list_has_sealed_running_and_waiting_states(pool: Pool):
    pool.make("a")
    pool.open("b", lease=9.0)
    pool.wait("c", "b")
    pool.make("d", tenant="else")
    listed = [(info.id, info.status, info.lease) for info in pool.store.list("")]
    assert listed == [(ID["a"], "sealed", 3600.0), (ID["b"], "running", 9.0), (ID["c"], "waiting", None)]


def test_a_conversation_goes_on_where_the_state_it_continues_ended(pool: Pool):
    pool.make("a", input_tokens=2, turn="due", n=4)
    pool.open("b", turn="open")
    after = pool.store.turn_after
    assert after("", []) is None
    assert after("", [inherit("a")]) == "due"
    assert after("", [inherit("a", upto=3)]) == "due"
    assert after("", [inherit("a", upto=2)]) == "closed"
    assert after("", [inherit("a"), artifact("a", 0, 1)]) is None
    assert after("", [artifact("a", 0, 1), inherit("b")]) == "open", "a running parent's turn is known"
    with refused("state_not_found") as refusal:
        after("", [inherit("c")])
    assert refusal.value.param == "refs"


def test_a_text_that_is_no_conversation_stays_none_when_it_is_cut(pool: Pool):
    pool.make("a", input_tokens=2)
    assert pool.store.turn_after("", [inherit("a", upto=1)]) is None


# ---------------------------------------------------------------- states that are made once more


def test_a_released_state_may_be_made_once_more_by_who_says_so(pool: Pool):
    pool.make("a", n=4)
    pool.make("b", inherit("a"), n=2)
    pool.release("a")
    pool.store.check_new("", ID["a"], again=True)
    with refused("state_released"):
        pool.store.check_new("", ID["a"])
    with refused("state_released"):
        pool.store.state("", ID["a"])
    running = Running(ID["a"], ContextPlan(), 4, STAMP)
    pool.store.open(running, again=True)
    again = pool.store.seal(running, range(4), pool.memory.take(("", ID["a"]), 4))
    seen = pool.store.state("", ID["b"]).context.segments
    assert pool.holdings.named("", ID["a"]) == [*seen, again.segment]
    pool.release("b")
    assert (pool.holdings.named("", ID["a"]), pool.held) == ([again.segment], 4)
    pool.release("a")
    assert (pool.holdings.named("", ID["a"]), pool.held) == ([], 0)


@pytest.mark.parametrize("out", [False, True])
def test_what_is_made_once_more_has_the_same_content_while_anybody_sees_the_first(pool: Pool, out: bool):
    pool.make("d", n=2)
    a = pool.make("a", inherit("d"), n=4).context
    pool.make("b", inherit("a"), n=2)
    pool.release("a")
    if out:
        pool.evict(8)
    pool.store.check_remade("", ID["a"], a, range(4))
    elsewhere = ContextPlan(tuple(one.moved(1) for one in a.intervals), a.start)
    contents = [(ContextPlan(a.intervals, 1), range(4)), (ContextPlan((), a.start), range(4)), (elsewhere, range(4))]
    contents += [(a, tokens) for tokens in (range(3), range(5), [0, 1, 2, 4], ())]
    for context, tokens in contents:
        with refused("invalid_request") as refusal:
            pool.store.check_remade("", ID["a"], context, tokens)
        assert refusal.value.param == "id"
    pool.store.check_remade("else", ID["a"], ContextPlan((), 7), range(2))
    pool.release("b")
    pool.store.check_remade("", ID["a"], ContextPlan((), 7), range(2))
