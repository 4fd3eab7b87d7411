"""Cache mappers in the core: names and settings, and the life of the segments that come of them.

What a mapper does to keys and values is in `tests/engine/test_mappers.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.wire import ContextSpec, Ref
from anabranch_server.compile import compile_context
from anabranch_server.errors import Refusal
from anabranch_server.limits import Limits
from anabranch_server.mappers import IDENTITY, Configured, check_names, configured, origin
from anabranch_server.plan import ContextPlan
from anabranch_server.segments import Interval, Segment
from anabranch_server.states import Running, State
from tests.server.pool import ID, STAMP, Pool, refused

# ---------------------------------------------------------------- names and settings


def test_identity_is_always_there_and_others_have_a_kind_and_perhaps_an_argument():
    assert configured("") == {IDENTITY: Configured(IDENTITY)}
    found = configured(" short = low_rank:/a=b:c/d.safetensors, ,other=kind,third=kind: ")
    assert found["short"] == Configured("low_rank", "/a=b:c/d.safetensors")
    assert (found["other"], found["third"]) == (Configured("kind"), Configured("kind", ""))
    assert len(found) == 4


@pytest.mark.parametrize(
    "text", ["short", "=kind", "a=", "a=:x", "a+b=kind", "a b=kind", f"{'a' * 65}=kind", "a=x,a=y", "identity=kind"]
)
def test_a_setting_that_makes_no_sense_is_refused_by_the_name_of_the_variable(text: str):
    with pytest.raises(ValueError, match="ANABRANCH_MAPPERS"):
        Limits.read({"ANABRANCH_MAPPERS": text})


def test_an_unknown_name_is_refused_by_its_place_and_the_known_ones_are_told():
    refs = [mapped("a"), Ref(kind="inherit", id=ID["a"]), mapped("a", "short")]
    check_names(refs, {"identity", "short"})
    with pytest.raises(Refusal) as refusal:
        check_names(refs, {"identity", "long"}, "spec.refs")
    body = refusal.value.body()
    assert (body.code, body.param, body.hint) == (
        "invalid_request",
        "spec.refs.2.mapper",
        "this server has identity, long",
    )
    with pytest.raises(Refusal, match="no mapper 'identity'"):
        check_names(refs, {})


# ---------------------------------------------------------------- derived segments


def mapped(letter: str, mapper: str = IDENTITY, **more: Any) -> Ref:
    return Ref(kind="inherit", id=ID[letter], mapper=mapper, **more)


def span(letter: str, start: int, stop: int, mapper: str | None = IDENTITY) -> Ref:
    return Ref(kind="artifact", id=ID[letter], span=(start, stop), mapper=mapper)


def begin(pool: Pool, letter: str, *refs: Ref, tenant: str = "") -> Running:
    """As `Pool.open`, with mappers."""
    parents = pool.store.parents(tenant, refs, STAMP)
    context = compile_context(ContextSpec(refs=refs), parents, pool.store.derivation())
    running = Running(ID[letter], context, 1, STAMP, refs, tenant=tenant)
    pool.store.open(running)
    pool.requests[tenant, letter] = running
    pool.store.check()
    return running


def make(pool: Pool, letter: str, *refs: Ref, n: int = 3, tenant: str = "") -> State:
    derive(pool, begin(pool, letter, *refs, tenant=tenant))
    return pool.seal(letter, n, tenant)


def derive(pool: Pool, running: Running) -> list[Segment]:
    """As the engine does it: in this order, each with fresh slots."""
    missing = pool.holdings.missing(running.context.intervals)
    for segment in missing:
        context = segment.context
        assert context is not None
        pool.memory.read(context)
        slots = pool.memory.take(segment.id, pool.holdings.needed_of(segment))
        pool.holdings.restore(segment, slots)
        pool.store.check()
    return missing


def names(running: Running | State) -> list[tuple[str, str | None, int, int]]:
    return [(*origin(one.segment), one.start, one.stop) for one in running.context.intervals]


def test_a_derived_segment_is_out_of_memory_until_it_is_made_and_is_freed_with_its_last_reader(pool: Pool):
    pool.make("a", n=4)
    running = begin(pool, "b", mapped("a"))
    (derived,) = pool.holdings.missing(running.context.intervals)
    assert names(running) == [(ID["a"], IDENTITY, 0, 4)]
    assert (derived.slots, pool.held, running.context.start) == (None, 4, 4)
    derive(pool, running)
    assert (pool.held, derived.start, list(derived.tokens)) == (8, 0, [0, 1, 2, 3])
    pool.seal("b", 2)
    assert pool.held == 10
    pool.release("b")
    assert pool.here == {"a": [0, 1, 2, 3]}
    pool.release("a")
    assert pool.held == 0


def test_equal_pairs_of_segment_and_mapper_share_one(pool: Pool):
    pool.make("a", n=4)
    first = make(pool, "b", mapped("a"))
    for letter, ref in (("c", mapped("a")), ("d", span("a", 1, 3))):
        running = begin(pool, letter, ref)
        assert running.context.segments == first.context.segments
        assert not pool.holdings.missing(running.context.intervals)
        pool.seal(letter, 1)
    assert pool.held == 4 + 4 + 3 + 1 + 1
    assert begin(pool, "e", mapped("a", "other")).context.segments != first.context.segments


def test_what_is_not_kept_of_a_derived_segment_is_derived_anew_and_named_alike(pool: Pool):
    pool.make("a", n=8)
    part = make(pool, "b", span("a", 2, 5))
    assert pool.held == 8 + 3 + 3, "of the derived one, what is read"
    whole = make(pool, "c", mapped("a"))
    assert part.context.segments != whole.context.segments
    assert part.context.segments[0].id == whole.context.segments[0].id
    both = begin(pool, "d", span("a", 2, 5), mapped("a"))
    assert sum(map(len, both.context.intervals)) == 8, "it is one instance through both"


def test_two_references_of_one_state_make_one_segment_of_all_that_they_select(pool: Pool):
    pool.make("a", n=8)
    running = begin(pool, "b", span("a", 5, 7), span("a", 0, 2), span("a", 1, 6))
    (derived,) = pool.holdings.missing(running.context.intervals)
    assert pool.store.derived_tokens(running.refs, running.context) == 0, "it is adopted"
    assert pool.holdings.kept(derived) == [(0, 7)]
    derive(pool, running)
    assert pool.held == 8 + 7
    pool.close("b")
    assert pool.held == 8


def test_what_a_compile_makes_in_vain_leaves_nothing(pool: Pool):
    pool.make("a", n=4)
    refs = (mapped("a"),)
    plan = compile_context(ContextSpec(refs=refs), pool.store.parents("", refs, STAMP), pool.store.derivation())
    assert pool.store.derived_tokens(refs, plan) == 4
    assert pool.holdings.needed_of(plan.segments[0]) == 4
    assert pool.holdings.missing(plan.intervals) == list(plan.segments)
    assert pool.holdings.unmovable_beside(plan.intervals) == 4
    pool.store.check()
    pool.release("a")
    assert pool.held == 0


def test_all_that_is_inherited_is_mapped_and_mappers_add_up(pool: Pool):
    pool.make("a", n=4)
    make(pool, "b", mapped("a", "first"), n=2)
    running = begin(pool, "c", mapped("b", "second"))
    assert names(running) == [(ID["a"], "first+second", 0, 4), (ID["b"], "second", 0, 2)]
    assert running.context.start == 6
    derive(pool, running)
    pool.seal("c", 1)
    pool.release("a", "b")
    assert pool.held == 4 + 2 + 1, "only what c sees"
    pool.release("c")
    assert pool.held == 0


def test_what_left_memory_comes_back_after_its_source(pool: Pool):
    pool.make("a", n=4)
    make(pool, "b", mapped("a"), n=2)
    pool.evict(10)
    assert pool.held == 0
    running = begin(pool, "c", Ref(kind="inherit", id=ID["b"]))
    missing = pool.holdings.missing(running.context.intervals)
    assert [origin(one) for one in missing] == [(ID["a"], None), (ID["a"], IDENTITY), (ID["b"], None)]
    derive(pool, running)
    assert pool.held == 10
    pool.seal("c", 1)


def test_it_outlives_its_source_and_then_stays_in_memory(pool: Pool):
    pool.make("a", n=4)
    make(pool, "b", mapped("a"), n=2)
    pool.release("a")
    assert (pool.held, pool.reclaimable) == (6, 2), "b can be computed again, what it sees cannot be derived again"
    pool.evict(10)
    assert pool.held == 4
    make(pool, "c", Ref(kind="inherit", id=ID["b"]))


def test_an_id_is_not_made_again_with_other_content_while_what_came_of_the_first_is_seen(pool: Pool):
    """Through a mapper somebody still sees the first `a`, of which nothing else is left."""
    pool.make("d", n=2)
    a = pool.make("a", Ref(kind="inherit", id=ID["d"]), n=4).context
    b = make(pool, "b", mapped("a"), n=2).context
    make(pool, "e", Ref(kind="artifact", id=ID["b"], mapper=IDENTITY), n=2)
    pool.release("a")
    assert pool.holdings.named("", ID["a"]) == []
    pool.store.check_remade("", ID["a"], a, range(4), STAMP)
    contents = [(a, range(3)), (a, [0, 1, 2, 4]), (ContextPlan(), range(4)), (ContextPlan(a.intervals, 1), range(4))]
    for context, tokens in contents:
        with refused("invalid_request") as refusal:
            pool.store.check_remade("", ID["a"], context, tokens, STAMP)
        assert refusal.value.param == "id"
    pool.store.check_remade("else", ID["a"], ContextPlan(), range(2), STAMP)
    pool.release("b")
    pool.store.check_remade("", ID["a"], ContextPlan(), range(2), STAMP)
    pool.store.check_remade("", ID["b"], b, range(2), STAMP)
    with refused("invalid_request"):
        pool.store.check_remade("", ID["b"], ContextPlan(a.intervals, b.start), range(2), STAMP)


def test_a_source_that_is_released_stays_until_the_derived_one_is_made(pool: Pool):
    pool.make("a", n=4)
    running = begin(pool, "b", mapped("a"))
    pool.release("a")
    assert pool.here == {"a": [0, 1, 2, 3]}
    derive(pool, running)
    assert pool.held == 4
    assert "a" not in pool.here
    pool.seal("b")


def test_a_request_that_ends_before_it_was_made_leaves_nothing(pool: Pool):
    pool.make("a", n=4)
    begin(pool, "b", mapped("a"))
    pool.release("a")
    pool.close("b", "cancelled")
    assert (pool.held, pool.here) == (0, {})


def test_a_cleared_pool_loses_nothing_that_can_be_derived_again(pool: Pool):
    pool.make("a", n=4)
    make(pool, "b", mapped("a"), n=2)
    pool.memory.clear()
    pool.store.reset()
    pool.store.check()
    derive(pool, begin(pool, "c", Ref(kind="inherit", id=ID["b"])))
    assert pool.held == 10


def test_it_counts_as_the_owners(pool: Pool):
    pool.make("a", n=4, tenant="x")
    make(pool, "b", mapped("a"), n=2, tenant="x")
    assert pool.holdings.owned_tokens == {"x": 10}
    with refused("state_not_found"):
        pool.store.parents("y", [mapped("a")], STAMP)


def test_where_pages_have_several_slots_whole_pages_of_the_source_are_derived():
    """A reader of the rest of a page finds it made."""
    pool = Pool()
    pool.memory.page_size = pool.holdings.page_size = 4
    pool.make("a", n=10)
    first = begin(pool, "b", span("a", 1, 3))
    (derived,) = pool.holdings.missing(first.context.intervals)
    assert pool.holdings.kept(derived) == [(0, 4)]
    assert not pool.holdings.keeps(Interval(derived, 3, 5))
    derive(pool, first)
    pool.seal("b", 1)
    same_page, next_page = begin(pool, "c", span("a", 0, 4)), begin(pool, "d", span("a", 3, 5))
    assert same_page.context.segments == (derived,)
    assert next_page.context.segments != (derived,)
