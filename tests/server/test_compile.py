"""The context compiler against contexts worked out by hand.

No store, no tokenizer: a parent is what the compiler asks of it, and no more. Any DAG is asked in `test_properties.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from anabranch.wire import ContextSpec, Explicit, Policy, Ref
from anabranch_server.compile import ContextPlan, check_limits, compile_context, referenced, select
from anabranch_server.errors import Refusal
from anabranch_server.segments import Interval, Segment

Place = Policy | Explicit | None
ID = {letter: f"{ord(letter):032x}" for letter in "abcdefgh"}
LETTER = {state_id: letter for letter, state_id in ID.items()}


@dataclass(frozen=True)
class Parent:
    segment: Segment
    input_tokens: int
    context: ContextPlan = field(default_factory=ContextPlan)


class World:
    """States by letter, each compiled from its references when it is made."""

    def __init__(self) -> None:
        self.parents: dict[str, Parent] = {}

    def compile(self, *refs: Ref, place: Place = None) -> ContextPlan:
        return compile_context(ContextSpec(refs=refs, place=place), self.parents)

    def make(self, letter: str, n: int, *refs: Ref, place: Place = None, generated: int = 0) -> ContextPlan:
        """A state of `n` own tokens, of which the last `generated` were generated; returns its context."""
        context = self.compile(*refs, place=place)
        segment = Segment(ID[letter], context.start, [ord(letter) * 100 + i for i in range(n)], None)
        self.parents[ID[letter]] = Parent(segment, n - generated, context)
        return context


def inherit(letter: str, upto: int | None = None, propagate: bool = True, base: int | None = None) -> Ref:
    return Ref(kind="inherit", id=ID[letter], upto=upto, propagate=propagate, base=base)


def artifact(letter: str, *span: int, propagate: bool = True, base: int | None = None) -> Ref:
    return Ref(
        kind="artifact", id=ID[letter], span=(span[0], span[1]) if span else None, propagate=propagate, base=base
    )


def show(plan: ContextPlan) -> str:
    """Like `a[0:3]@0 ~b[2:4]@17 | 5`: where each interval is seen, ~ if it is not handed on; then the start."""
    parts = (
        f"{'' if i.propagate else '~'}{LETTER[i.segment.id]}[{i.start}:{i.stop}]@{i.effective}" for i in plan.intervals
    )
    return " ".join([*parts, "|", str(plan.start)])


@pytest.fixture
def world() -> World:
    """a: 4 tokens, the last generated; b and c continue it with 3 and 6 tokens; d is another root of 5."""
    world = World()
    world.make("a", 4, generated=1)  # at 0..3
    world.make("b", 3, inherit("a"), generated=2)  # at 4..6
    world.make("c", 6, inherit("a"), generated=4)  # at 4..9
    world.make("d", 5, generated=2)  # at 0..4
    return world


# ---------------------------------------------------------------- what one reference selects


def test_a_root_sees_nothing_and_starts_at_0(world: World):
    places: list[Place] = [None, "keep", "concat", Explicit()]
    for place in places:
        plan = world.compile(place=place)
        assert (plan.intervals, plan.start, len(plan)) == ((), 0, 0)
    assert world.compile(place=Explicit(start=9)) == ContextPlan((), 9)


def test_inherit_sees_all_the_parent_sees_and_its_own_tokens(world: World):
    assert show(world.compile(inherit("c"))) == "a[0:4]@0 c[0:6]@4 | 10"


@pytest.mark.parametrize("k", range(1, 7))
def test_a_rewind_sees_the_first_k_own_tokens_and_continues_after_them(world: World, k: int):
    assert show(world.compile(inherit("c", upto=k))) == f"a[0:4]@0 c[0:{k}]@4 | {4 + k}"


def test_a_rewind_to_0_sees_what_the_parent_saw_and_starts_where_it_started(world: World):
    assert show(world.compile(inherit("c", upto=0))) == "a[0:4]@0 | 4"
    assert show(world.compile(inherit("d", upto=0))) == "| 0"


def test_a_rewind_to_0_of_a_state_that_starts_elsewhere_starts_there_too():
    world = World()
    world.make("a", 3, place=Explicit(start=50))
    assert show(world.compile(inherit("a", upto=0))) == "| 50"
    assert show(world.compile(inherit("a", upto=2))) == "a[0:2]@50 | 52"
    assert show(world.compile(inherit("a", upto=0), place="keep")) == "| 0"


def test_an_artifact_sees_its_span_only_and_nothing_the_parent_saw(world: World):
    assert show(world.compile(artifact("c", 1, 3))) == "c[1:3]@5 | 7"
    assert show(world.compile(artifact("c", 0, 6))) == "c[0:6]@4 | 10"


def test_an_artifact_without_a_span_is_what_the_state_generated(world: World):
    assert show(world.compile(artifact("c"))) == "c[2:6]@6 | 10"
    assert show(world.compile(artifact("b"))) == "b[1:3]@5 | 7"


def test_an_artifact_without_a_span_of_a_state_that_generated_nothing_is_empty(world: World):
    world.make("e", 3)
    assert show(world.compile(artifact("e"))) == "| 0"
    assert show(world.compile(artifact("e"), inherit("b"))) == "a[0:4]@0 b[0:3]@4 | 7"
    assert show(world.compile(artifact("e", 0, 3))) == "e[0:3]@0 | 3"


@pytest.mark.parametrize("at", [0, 2, 6])
def test_an_empty_span_selects_nothing(world: World, at: int):
    assert show(world.compile(artifact("c", at, at))) == "| 0"
    assert show(world.compile(artifact("c", at, at), inherit("b"))) == "a[0:4]@0 b[0:3]@4 | 7"


def test_the_token_ids_come_in_the_order_of_the_contract(world: World):
    plan = world.compile(artifact("c", 1, 3), inherit("d", upto=2))
    assert list(plan.tokens()) == [9901, 9902, 10000, 10001]
    assert len(plan) == 4
    assert [LETTER[segment.id] for segment in plan.segments] == ["c", "d"]


# ---------------------------------------------------------------- the union


def test_the_same_parent_twice_is_seen_once(world: World):
    assert show(world.compile(inherit("b"), inherit("b"))) == "a[0:4]@0 b[0:3]@4 | 7"
    assert show(world.compile(inherit("b", upto=1), inherit("b"))) == "a[0:4]@0 b[0:3]@4 | 7"


def test_shared_ancestors_are_seen_once(world: World):
    assert show(world.compile(inherit("b"), inherit("c"))) == "a[0:4]@0 b[0:3]@4 c[0:6]@4 | 10"
    world.make("e", 2, inherit("b"), inherit("c"))  # a diamond, at 10
    assert show(world.compile(inherit("c"), inherit("e"))) == "a[0:4]@0 c[0:6]@4 b[0:3]@4 e[0:2]@10 | 12"


def test_equal_text_in_two_states_is_two_sets_of_tokens(world: World):
    world.parents[ID["e"]] = Parent(Segment(ID["e"], 0, world.parents[ID["d"]].segment.tokens, None), 5)
    assert show(world.compile(inherit("d"), inherit("e"))) == "d[0:5]@0 e[0:5]@0 | 5"


def test_overlapping_spans_and_a_span_of_an_inherited_state_are_seen_once(world: World):
    assert show(world.compile(artifact("c", 1, 4), artifact("c", 2, 6))) == "c[1:6]@5 | 10"
    assert show(world.compile(artifact("c", 4, 6), artifact("c", 0, 5))) == "c[4:6]@8 c[0:4]@4 | 10"
    assert show(world.compile(artifact("b", 1, 2), inherit("b"))) == "b[1:2]@5 a[0:4]@0 b[0:1]@4 b[2:3]@6 | 7"
    assert show(world.compile(inherit("b"), artifact("b", 1, 2))) == "a[0:4]@0 b[0:3]@4 | 7"


def test_a_segment_in_several_intervals_is_listed_once(world: World):
    plan = world.compile(artifact("c", 4, 6), inherit("d"), artifact("c", 0, 2))
    assert [LETTER[segment.id] for segment in plan.segments] == ["c", "d"]


def test_a_parent_never_sees_its_child_and_siblings_not_each_other(world: World):
    assert show(world.parents[ID["b"]].context) == "a[0:4]@0 | 4"
    assert show(world.parents[ID["c"]].context) == "a[0:4]@0 | 4"


# ---------------------------------------------------------------- propagation


def test_a_reference_that_does_not_propagate_is_kept_from_grandchildren(world: World):
    context = world.make("e", 2, inherit("b"), inherit("d", propagate=False))
    assert show(context) == "a[0:4]@0 b[0:3]@4 ~d[0:5]@0 | 7"
    assert show(world.compile(inherit("e"))) == "a[0:4]@0 b[0:3]@4 e[0:2]@7 | 9"


def test_a_child_continues_after_its_parent_though_the_longest_reference_is_not_handed_on(world: World):
    world.make("e", 2, inherit("c", propagate=False))
    assert show(world.compile(inherit("e"))) == "e[0:2]@10 | 12"
    assert show(world.compile(inherit("e", upto=0))) == "| 10"


def test_what_one_reference_hides_another_hands_on(world: World):
    context = world.make("e", 1, inherit("c", propagate=False), artifact("c", 2, 3))
    assert show(context) == "~a[0:4]@0 ~c[0:2]@4 c[2:3]@6 ~c[3:6]@7 | 10"
    assert show(world.compile(inherit("e"))) == "c[2:3]@6 e[0:1]@10 | 11"


def test_a_hidden_part_returns_if_a_grandchild_references_it_itself(world: World):
    world.make("e", 2, inherit("d"), artifact("c", propagate=False))  # at 10
    assert show(world.compile(inherit("e"), artifact("c", 0, 6))) == "d[0:5]@0 e[0:2]@10 c[0:6]@4 | 12"


def test_a_span_that_does_not_propagate_is_hidden_exactly(world: World):
    context = world.make("e", 1, inherit("d"), artifact("c", 1, 3, propagate=False), artifact("b", 0, 1))
    assert show(context) == "d[0:5]@0 ~c[1:3]@5 b[0:1]@4 | 7"
    assert show(world.compile(inherit("e"))) == "d[0:5]@0 b[0:1]@4 e[0:1]@7 | 8"


def test_an_inherited_part_can_be_hidden_later(world: World):
    world.make("e", 1, inherit("c"))
    world.make("f", 1, inherit("e", propagate=False), inherit("d"))
    assert show(world.compile(inherit("f"))) == "d[0:5]@0 f[0:1]@11 | 12"


# ---------------------------------------------------------------- policies


def test_keep_starts_one_past_the_largest_position_whatever_the_order(world: World):
    assert world.compile(inherit("c"), inherit("b")).start == 10
    assert world.compile(inherit("b"), inherit("c"), place="keep").start == 10


def test_several_references_without_a_policy_are_kept(world: World):
    for refs in ([inherit("b"), inherit("c")], [inherit("b"), artifact("d")], [artifact("c")], [artifact("d", 0, 1)]):
        assert world.compile(*refs) == world.compile(*refs, place="keep")


def test_keep_by_name_measures_what_is_visible_but_no_policy_continues_the_parent(world: World):
    world.make("e", 2, inherit("b"), inherit("c", propagate=False))  # at 10
    assert show(world.compile(inherit("e", upto=0))) == "a[0:4]@0 b[0:3]@4 | 10"
    assert show(world.compile(inherit("e", upto=0), place="keep")) == "a[0:4]@0 b[0:3]@4 | 7"


def test_one_inherit_keeps_every_delta_of_its_parent(world: World):
    world.make("e", 2, artifact("c", 1, 3), inherit("d"), place="concat")  # c at 0, d at 2, e at 7
    assert show(world.compile(inherit("e"))) == "c[1:3]@0 d[0:5]@2 e[0:2]@7 | 9"


def test_concat_lays_the_visible_tokens_end_to_end(world: World):
    plan = world.compile(inherit("b"), inherit("c"), artifact("d", 1, 3), place="concat")
    assert show(plan) == "a[0:4]@0 b[0:3]@4 c[0:6]@7 d[1:3]@13 | 15"
    assert [interval.delta for interval in plan.intervals] == [0, 0, 3, 12]


def test_order_is_part_of_the_contract(world: World):
    assert show(world.compile(inherit("c"), inherit("b"), place="concat")) == "a[0:4]@0 c[0:6]@4 b[0:3]@10 | 13"
    assert show(world.compile(inherit("d"), inherit("c"), place="concat")) == "d[0:5]@0 a[0:4]@5 c[0:6]@9 | 15"
    assert show(world.compile(inherit("c"), inherit("d"), place="concat")) == "a[0:4]@0 c[0:6]@4 d[0:5]@10 | 15"
    assert show(world.compile(inherit("d"), inherit("b"))) == "d[0:5]@0 a[0:4]@0 b[0:3]@4 | 7"


def test_concat_counts_each_token_once_and_hidden_tokens_too(world: World):
    plan = world.compile(inherit("c", propagate=False), artifact("c", 2, 3), inherit("d"), place="concat")
    assert show(plan) == "~a[0:4]@0 ~c[0:2]@4 c[2:3]@6 ~c[3:6]@7 d[0:5]@10 | 15"


def test_concat_closes_gaps(world: World):
    assert show(world.compile(artifact("c", 4, 6), place="concat")) == "c[4:6]@0 | 2"
    world.make("e", 1, inherit("d"), place=Explicit(start=500))
    assert show(world.compile(inherit("e"))) == "d[0:5]@0 e[0:1]@500 | 501"
    assert show(world.compile(inherit("e"), place="concat")) == "d[0:5]@0 e[0:1]@5 | 6"


def test_keep_takes_the_first_references_delta_where_two_disagree(world: World):
    world.make("e", 1, artifact("d", 0, 2), place=Explicit(start=90))  # sees d where it was computed
    world.make("f", 1, artifact("d", 0, 2, base=40), place=Explicit(start=91))  # sees it at 40
    assert show(world.compile(inherit("e"), inherit("f"))) == "d[0:2]@0 e[0:1]@90 f[0:1]@91 | 92"
    assert show(world.compile(inherit("f"), inherit("e"))) == "d[0:2]@40 f[0:1]@91 e[0:1]@90 | 92"


# ---------------------------------------------------------------- parallel parts


def test_same_start_moves_what_only_one_selects_after_what_all_share(world: World):
    plan = world.compile(inherit("b"), inherit("c"), artifact("d", 1, 3), place="same_start")
    assert show(plan) == "a[0:4]@0 b[0:3]@4 c[0:6]@4 d[1:3]@4 | 10"


def test_same_start_without_anything_shared_begins_at_0(world: World):
    assert show(world.compile(artifact("c", 2, 5), artifact("d", 3, 5), place="same_start")) == "c[2:5]@0 d[3:5]@0 | 3"
    assert show(world.compile(inherit("c"), place="same_start")) == "a[0:4]@0 c[0:6]@4 | 10"
    assert show(world.compile(artifact("c", 3, 5), place="same_start")) == "c[3:5]@0 | 2"


def test_right_aligned_ends_every_private_part_where_new_tokens_begin(world: World):
    plan = world.compile(inherit("b"), inherit("c"), artifact("d", 1, 3), place="right_aligned")
    assert show(plan) == "a[0:4]@0 b[0:3]@7 c[0:6]@4 d[1:3]@8 | 10"
    assert show(world.compile(artifact("c", 2, 5), artifact("d", 3, 5), place="right_aligned")) == (
        "c[2:5]@0 d[3:5]@1 | 3"
    )


@pytest.mark.parametrize("place", ["same_start", "right_aligned"])
def test_a_private_part_moves_rigidly_gaps_and_all(world: World, place: Policy):
    world.make("e", 1, inherit("d"), place=Explicit(start=20))  # d at 0, e at 20
    plan = world.compile(inherit("e"), artifact("c", 0, 2), place=place)
    c = 0 if place == "same_start" else 19
    assert show(plan) == f"d[0:5]@0 e[0:1]@20 c[0:2]@{c} | 21"


@pytest.mark.parametrize("place", ["same_start", "right_aligned"])
def test_where_all_is_shared_nothing_moves_and_new_tokens_follow(world: World, place: Policy):
    plan = world.compile(inherit("b"), inherit("b", propagate=False), place=place)
    assert show(plan) == "a[0:4]@0 b[0:3]@4 | 7"


@pytest.mark.parametrize("place", ["same_start", "right_aligned"])
def test_the_same_reference_twice_shares_nothing_with_itself(world: World, place: Policy):
    once = world.compile(artifact("c", 3, 5), artifact("d", 0, 1), place=place)
    assert world.compile(artifact("c", 3, 5), artifact("d", 0, 1), artifact("c", 3, 5), place=place) == once


def test_parts_of_one_state_can_be_shared_and_private(world: World):
    # c[2:4] is shared and stays at 6, 7; c[0:2] and c[4:5] are private to one each
    refs = [artifact("c", 0, 4), artifact("c", 2, 5)]
    assert show(world.compile(*refs, place="same_start")) == "c[0:2]@8 c[2:5]@6 | 10"
    assert show(world.compile(*refs, place="right_aligned")) == "c[0:2]@8 c[2:4]@6 c[4:5]@9 | 10"


def test_the_shared_part_stays_where_the_first_reference_has_it(world: World):
    world.make("e", 1, artifact("d", 0, 2), place=Explicit(start=90))
    world.make("f", 1, artifact("d", 0, 2, base=40), place=Explicit(start=91))
    refs = [inherit("f"), inherit("e")]
    assert show(world.compile(*refs, place="same_start")) == "d[0:2]@40 f[0:1]@42 e[0:1]@42 | 43"


def test_parallel_parts_of_nothing_are_nothing(world: World):
    for place in ("same_start", "right_aligned"):
        assert show(world.compile(place=place)) == "| 0"
        assert show(world.compile(artifact("d", 2, 2), place=place)) == "| 0"


# ---------------------------------------------------------------- explicit placement


def test_explicit_moves_each_reference_to_its_own_base(world: World):
    plan = world.compile(artifact("c", 1, 3, base=100), inherit("d", base=20), artifact("b", 0, 1), place=Explicit())
    assert show(plan) == "c[1:3]@100 d[0:5]@20 b[0:1]@4 | 102"
    assert [interval.delta for interval in plan.intervals] == [95, 20, 0]


def test_a_base_moves_the_whole_view_of_the_parent_rigidly(world: World):
    assert show(world.compile(inherit("c", base=30), place=Explicit())) == "a[0:4]@30 c[0:6]@34 | 40"
    assert show(world.compile(inherit("c", upto=0, base=30), place=Explicit(start=3))) == "a[0:4]@30 | 3"


def test_a_base_below_the_native_position_gives_a_negative_delta(world: World):
    plan = world.compile(artifact("c", 3, 6, base=0), artifact("b", base=2), place=Explicit(start=4))
    assert show(plan) == "c[3:6]@0 b[1:3]@2 | 4"
    assert [interval.delta for interval in plan.intervals] == [-7, -3]
    assert plan.shifted


def test_a_base_counts_from_the_lowest_token_before_duplicates_are_dropped(world: World):
    # a is c's lowest token; it is taken from the first reference, where it stays
    plan = world.compile(artifact("a", 0, 4), inherit("c", base=50), place=Explicit())
    assert show(plan) == "a[0:4]@0 c[0:6]@54 | 60"


def test_the_lowest_token_of_a_reference_need_not_be_its_first(world: World):
    world.make("e", 1, artifact("c", 4, 6), inherit("d"))  # c at 8, d at 0, e at 10
    plan = world.compile(inherit("e", base=1000), place=Explicit())
    assert show(plan) == "c[4:6]@1008 d[0:5]@1000 e[0:1]@1010 | 1011"


def test_a_base_of_a_reference_that_selects_nothing_moves_nothing(world: World):
    assert show(world.compile(artifact("d", 2, 2, base=70), inherit("b"), place=Explicit())) == "a[0:4]@0 b[0:3]@4 | 7"


def test_explicit_without_base_and_start_is_keep(world: World):
    for refs in ([inherit("b"), inherit("c")], [inherit("c", upto=0)], [artifact("c", 2, 4)]):
        assert world.compile(*refs, place=Explicit()) == world.compile(*refs, place="keep")


def test_an_explicit_start_may_lie_anywhere(world: World):
    assert world.compile(inherit("c"), place=Explicit(start=0)).start == 0
    assert world.compile(inherit("c"), place=Explicit(start=777)).start == 777


# ---------------------------------------------------------------- shifts


def test_shifted_says_whether_anything_is_read_elsewhere_than_computed(world: World):
    assert not world.compile(inherit("b"), inherit("c")).shifted
    assert not world.compile(inherit("c"), place="concat").shifted
    assert not world.compile(inherit("c"), place=Explicit(start=400)).shifted
    assert world.compile(inherit("b"), inherit("c"), place="concat").shifted


def test_a_hundred_replacements_are_one_integer():
    world = World()
    world.make("a", 3)
    plan = world.compile(inherit("a", base=1), place=Explicit())
    for step in range(100):
        segment = Segment(ID["b"], plan.start, [], None)
        world.parents[ID["b"]] = Parent(segment, 0, plan)
        plan = world.compile(inherit("b", base=(step * 37) % 101), place=Explicit())
    assert 99 * 37 % 101 == 27
    assert plan == world.compile(inherit("a", base=27), place=Explicit()) == ContextPlan(plan.intervals, 30)
    assert [interval.delta for interval in plan.intervals] == [27]


def test_a_shift_of_a_shift_is_their_sum(world: World):
    world.make("e", 2, artifact("c", 1, 3, base=60), place=Explicit())  # delta 55; e at 62
    plan = world.compile(inherit("e", base=10), place=Explicit())
    assert show(plan) == "c[1:3]@10 e[0:2]@12 | 14"
    assert [interval.delta for interval in plan.intervals] == [5, -50]


def test_an_artifact_arrives_at_native_position_however_others_moved_it(world: World):
    world.make("e", 2, artifact("c", 1, 3, base=60), place=Explicit())
    assert show(world.compile(artifact("c", 1, 3))) == "c[1:3]@5 | 7"
    assert show(world.compile(artifact("e", 0, 2))) == "e[0:2]@62 | 64"


def test_compiling_leaves_the_parents_as_they_were(world: World):
    before = {name: show(parent.context) for name, parent in world.parents.items()}
    world.compile(inherit("c", base=400), artifact("b", 0, 2, propagate=False), place=Explicit())
    world.compile(inherit("b", propagate=False), inherit("c"), place="concat")
    assert {name: show(parent.context) for name, parent in world.parents.items()} == before
    assert [parent.segment.start for parent in world.parents.values()] == [0, 4, 4, 0]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ref", "param"),
    [
        (inherit("c", upto=7), "refs.1.upto"),
        (inherit("c", upto=2**31 - 1), "refs.1.upto"),
        (artifact("c", 0, 7), "refs.1.span"),
        (artifact("c", 7, 7), "refs.1.span"),
        (artifact("c", 8, 9), "refs.1.span"),
    ],
)
def test_leaving_the_state_is_refused_and_names_the_field(world: World, ref: Ref, param: str):
    with pytest.raises(Refusal) as refused:
        world.compile(inherit("a"), ref)
    assert (refused.value.code, refused.value.param, refused.value.status) == ("invalid_request", param, 400)
    assert ID["c"] in refused.value.message
    assert "6 own tokens" in refused.value.message


def test_select_hands_out_what_arrives_before_any_policy(world: World):
    chosen = select(world.parents[ID["c"]], inherit("c", upto=2, propagate=False, base=9), "refs.0")
    assert not chosen.on
    assert show(ContextPlan.of(chosen.view, 0)) == "a[0:4]@0 c[0:2]@4 | 0"
    assert select(world.parents[ID["c"]], artifact("c", 3, 3), "refs.0").view.rows == 0


def test_referenced_names_each_id_once_in_order():
    refs = [inherit("c"), artifact("a"), inherit("c", upto=1), inherit("b")]
    assert referenced(refs) == [ID["c"], ID["a"], ID["b"]]
    assert referenced([]) == []


def visible(*parts: tuple[int, int], start: int) -> ContextPlan:
    """A plan with intervals at (effective position, length)."""
    return ContextPlan(tuple(Interval(Segment("x", at, range(n), None), 0, n) for at, n in parts), start)


def refusal(plan: ContextPlan, new_tokens: int, max_positions: int, max_context: int) -> Refusal:
    with pytest.raises(Refusal) as refused:
        check_limits(plan, new_tokens, max_positions, max_context)
    return refused.value


def test_the_context_may_be_filled_to_the_last_token():
    plan = visible((0, 6), start=6)
    check_limits(plan, 4, max_positions=100, max_context=10)
    refused = refusal(plan, 5, 100, 10)
    assert (refused.code, refused.status) == ("context_too_long", 413)
    assert "6 visible and 5 new" in refused.message


def test_positions_may_be_filled_to_the_last_one():
    plan = visible((0, 6), start=90)
    check_limits(plan, 10, max_positions=100, max_context=100)
    refused = refusal(plan, 11, 100, 100)
    assert (refused.code, refused.status, refused.param) == ("position_overflow", 422, "place")
    assert "0 to 100 leave the model's range 0 to 99" in refused.message


def test_a_visible_token_past_the_models_positions_is_refused_too():
    check_limits(visible((96, 4), start=0), 1, max_positions=100, max_context=100)
    assert refusal(visible((97, 4), start=0), 1, 100, 100).code == "position_overflow"


def test_a_visible_token_at_a_negative_position_is_refused():
    assert refusal(visible((5, 2), (-1, 1), start=8), 1, 100, 100).code == "position_overflow"
    check_limits(visible((5, 2), (0, 1), start=8), 1, max_positions=100, max_context=100)


def test_few_tokens_far_apart_fit_the_context_but_not_the_positions():
    assert refusal(visible((0, 1), start=2**20), 1, 2**20, 10).code == "position_overflow"
    assert refusal(visible((0, 11), start=0), 0, 2**20, 10).code == "context_too_long"


def test_an_empty_plan_is_within_every_limit():
    check_limits(ContextPlan(), 0, max_positions=0, max_context=0)
    check_limits(ContextPlan(), 8, max_positions=8, max_context=8)
    assert refusal(ContextPlan(), 9, 8, 9).code == "position_overflow"
