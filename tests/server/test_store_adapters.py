"""Adapters that may read what others computed, because the operator declares it: one way, by name, and no further."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.wire import ContextSpec, Ref
from anabranch_server.compile import compile_context
from anabranch_server.limits import Limits, declared_reads
from anabranch_server.models import ModelStamp
from anabranch_server.states import Running, State
from tests.server.pool import ID, STAMP, Pool, artifact, inherit, refused

BASE = STAMP
CALM = replace(STAMP, adapter="c1", adapter_name="calm")
CALM_AGAIN = replace(STAMP, adapter="c2", adapter_name="calm")
BOLD = replace(STAMP, adapter="b1", adapter_name="bold")
NAMED_BASE = replace(STAMP, adapter="n1", adapter_name="base")
NAMELESS = replace(STAMP, adapter="calm")


def declared(text: str) -> Pool:
    return Pool(Limits(adapter_reads=text))


def make(pool: Pool, letter: str, stamp: ModelStamp, *refs: Ref) -> State:
    context = compile_context(ContextSpec(refs=refs), pool.store.parents("", refs, stamp))
    running = Running(ID[letter], context, 1, stamp, refs)
    pool.store.open(running)
    state = pool.store.seal(running, range(3), pool.memory.take(letter, 3))
    pool.store.check()
    return state


def told(pool: Pool, stamp: ModelStamp, ref: Ref) -> str:
    """Why it is refused."""
    with refused("state_incompatible") as refusal:
        pool.store.parents("", [ref], stamp)
    return refusal.value.message


def test_what_is_declared_can_be_read_and_nothing_else():
    pool = declared("calm:base,bold")
    for letter, stamp in zip("abc", (BASE, BOLD, CALM), strict=True):
        make(pool, letter, stamp)
    assert len(pool.store.parents("", [inherit("a"), inherit("b"), inherit("c")], CALM)) == 3
    assert told(pool, BASE, inherit("c")) == f"state {ID['c']} was computed under adapter calm, not none"
    assert told(pool, BOLD, inherit("c")) == f"state {ID['c']} was computed under adapter calm, not bold"
    assert told(pool, BOLD, inherit("a")) == f"state {ID['a']} was computed under adapter none, not bold"


def test_nothing_is_readable_that_is_not_declared():
    pool = declared("")
    make(pool, "a", BASE)
    assert "adapter none, not calm" in told(pool, CALM, inherit("a"))


def test_all_else_must_still_be_equal():
    pool = declared("calm:base")
    make(pool, "a", BASE)
    other = replace(CALM, weights_version="2", kv_dtype="fp8_e5m2")
    assert told(pool, other, inherit("a")).endswith(
        "weights_version 1, not 2; kv_dtype auto, not fp8_e5m2; adapter none, not calm"
    )


def test_an_adapter_that_was_loaded_again_does_not_read_its_predecessors_states():
    pool = declared("calm:base,bold;bold:calm;base:calm")
    make(pool, "a", CALM)
    assert told(pool, CALM_AGAIN, inherit("a")).endswith("under adapter calm, not another load of that name")
    assert pool.store.parents("", [inherit("a")], BOLD)


def test_nor_through_the_state_of_another_that_may():
    """bold reads calm, and the next calm reads bold: it still sees nothing of the calm before it."""
    pool = declared("calm:bold;bold:calm")
    make(pool, "a", CALM)
    make(pool, "b", BOLD, inherit("a"))
    assert ID["a"] in told(pool, CALM_AGAIN, inherit("b"))
    assert pool.store.parents("", [artifact("b", 0, 2)], CALM_AGAIN), "b's own tokens are bold's"
    assert pool.store.parents("", [inherit("b")], CALM), "this is the calm that computed them"


def test_a_reader_is_not_shown_through_others_what_it_may_not_read_itself():
    pool = declared("calm:bold;bold:base")
    make(pool, "a", BASE)
    make(pool, "b", BOLD, inherit("a"))
    message = told(pool, CALM, inherit("b"))
    assert message == f"state {ID['a']}, which {ID['b']} sees, was computed under adapter none, not calm"


def test_what_is_not_handed_on_does_not_matter():
    pool = declared("calm:bold;bold:base")
    make(pool, "a", BASE)
    make(pool, "b", BOLD, inherit("a", propagate=False))
    assert pool.store.parents("", [inherit("b")], CALM)


def test_an_adapter_that_is_called_base_is_not_the_model():
    pool = declared("calm:base")
    make(pool, "a", NAMED_BASE)
    assert "adapter base, not calm" in told(pool, CALM, inherit("a"))


def test_an_adapter_without_a_name_is_not_the_model():
    pool = declared("bold:base")
    make(pool, "a", NAMELESS)
    told(pool, BOLD, inherit("a"))


def test_an_id_keeps_its_stamp_as_long_as_its_tokens_are_seen():
    """Else one instance would have two contents, for a reader of both."""
    pool = declared("calm:base")
    state = make(pool, "a", BASE)
    make(pool, "b", BASE, inherit("a"))
    pool.release("a")
    pool.store.check_remade("", ID["a"], state.context, range(3), BASE)
    with refused("invalid_request"):
        pool.store.check_remade("", ID["a"], state.context, range(3), CALM)


def test_the_setting_is_read_as_pairs_of_names():
    assert declared_reads(" calm : base , bold ; base:bold;; ") == {("calm", None), ("calm", "bold"), (None, "bold")}
    assert declared_reads("") == frozenset()


@pytest.mark.parametrize("text", ["calm", "calm:", ":bold", "calm:bold,", "calm:calm", "calm:bold,calm", "base:base"])
def test_a_setting_that_makes_no_sense_is_refused_by_the_name_of_the_variable(text: str):
    with pytest.raises(ValueError, match="ANABRANCH_ADAPTER_READS"):
        Limits.read({"ANABRANCH_ADAPTER_READS": text})
