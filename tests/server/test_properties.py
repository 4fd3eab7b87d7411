"""Laws of any DAG: the incremental compiler, a compiler that starts from scratch, and brute force on single tokens say
the same; and what positions must obey.

Worked-out cases are in `test_compile.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import InvalidRequestError
from anabranch.results import Explanation
from anabranch.wire import ContextSpec, Explicit, Policy, Ref
from anabranch.wire import Interval as WireInterval
from anabranch_server.compile import compile_context
from anabranch_server.plan import ContextPlan
from anabranch_server.segments import Segment
from anabranch_server.trunk import clear_shelf
from tests.server.instances import Node, Place, traverse

SLOW = settings(max_examples=120, deadline=None, derandomize=True, database=None)
DAGS = 5_000
SECONDS = 60.0  # of processor time: others may use the machine too
PLACES: tuple[Place, ...] = (None, "keep", "concat", "same_start", "right_aligned", Explicit())


def id_of(number: int) -> str:
    return f"{number:032x}"


@dataclass(frozen=True)
class State:
    segment: Segment
    input_tokens: int
    context: ContextPlan


@dataclass
class Graph:
    """States that are compiled in three ways at once; each new one is checked."""

    states: dict[str, State] = field(default_factory=dict)
    scratch: dict[str, State] = field(default_factory=dict)
    """The same, but nothing is shared: each context was written out, interval by interval."""
    nodes: dict[str, Node] = field(default_factory=dict)

    def add(self, refs: list[Ref], place: Place = None, n: int = 1, generated: int = 0) -> ContextPlan:
        name, spec = id_of(len(self.states)), ContextSpec(refs=tuple(refs), place=place)
        plan = compile_context(spec, self.states)
        again = compile_context(spec, self.scratch)
        node = traverse(refs, place, self.nodes, n, n - generated)
        assert again == plan
        assert seen(plan) == [(one, at, one in node.handed_on) for one, at in node.visible.items()]
        assert plan.start == node.start
        assert len(plan) == len(node.visible)
        segment = Segment(name, plan.start, range(n), None)
        self.states[name] = State(segment, n - generated, plan)
        self.scratch[name] = State(segment, n - generated, ContextPlan(again.intervals, again.start))
        self.nodes[name] = node
        return plan


def seen(plan: ContextPlan) -> list[tuple[tuple[str, int], int, bool]]:
    return [
        ((part.segment.id, part.start + t), part.effective + t, part.propagate)
        for part in plan.intervals
        for t in range(len(part))
    ]


def random_refs(dice: Random, states: dict[str, State], place: Place, most: int) -> list[Ref]:
    refs: list[Ref] = []
    names = list(states)
    for _ in range(dice.randint(0, most) if names else 0):
        name = dice.choice(names[-8:] if dice.random() < 0.8 else names)
        n = len(states[name].segment)
        base = dice.randrange(60) if isinstance(place, Explicit) and dice.random() < 0.6 else None
        propagate = dice.random() < 0.8
        if dice.random() < 0.6:
            upto = dice.randint(0, n) if dice.random() < 0.3 else None
            refs.append(Ref(kind="inherit", id=name, upto=upto, propagate=propagate, base=base))
        else:
            begin = dice.randint(0, n)
            span = (begin, dice.randint(begin, n)) if dice.random() < 0.6 else None
            refs.append(Ref(kind="artifact", id=name, span=span, propagate=propagate, base=base))
    return refs


def random_graph(dice: Random, size: int) -> Graph:
    graph = Graph()
    for _ in range(size):
        place = dice.choice(PLACES) if dice.random() < 0.6 else None
        if isinstance(place, Explicit) and dice.random() < 0.5:
            place = Explicit(start=dice.randrange(60))
        n = dice.randint(0, 4)
        graph.add(random_refs(dice, graph.states, place, 4), place, n, dice.randint(0, n))
        if dice.random() < 0.1:
            clear_shelf()  # what was written out can be written out again
    return graph


def test_5000_dags_are_compiled_alike_incrementally_from_scratch_and_by_brute_force():
    started = process_time()
    for seed in range(DAGS):
        random_graph(Random(seed), 2 + seed % 9)
    assert process_time() - started < SECONDS


def test_long_dags_are_compiled_alike_too():
    for seed in range(4):
        random_graph(Random(seed), 60)


@SLOW
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_a_union_is_a_set_in_order_of_first_occurrence(dice: Random, size: int):
    graph = random_graph(dice, size)
    refs = random_refs(dice, graph.states, None, 6)
    plan = graph.add(refs, "keep")
    tokens = [one for one, _, _ in seen(plan)]
    assert len(tokens) == len(set(tokens))
    alone = [one for ref in refs for one, _, _ in seen(compile_context(ContextSpec(refs=(ref,)), graph.states))]
    assert tokens == list(dict.fromkeys(alone))
    for mine, following in pairwise(plan.intervals):
        glued = mine.segment is following.segment and mine.stop == following.start
        assert not (glued and (mine.delta, mine.propagate) == (following.delta, following.propagate))


@SLOW
@given(st.randoms(use_true_random=False), st.integers(1, 10))
def test_plans_that_exist_never_change(dice: Random, size: int):
    graph = random_graph(dice, size)
    before = {name: (state.context.intervals, state.context.columns.tolist()) for name, state in graph.states.items()}
    for _ in range(10):
        graph.add(random_refs(dice, graph.states, None, 3), None, 2)
    assert {
        name: (graph.states[name].context.intervals, graph.states[name].context.columns.tolist()) for name in before
    } == before


# ---------------------------------------------------------------- positions


def explained(plan: ContextPlan) -> Explanation:
    parts = tuple(
        WireInterval(state=i.segment.id, start=i.start, stop=i.stop, native=i.native, effective=i.effective)
        for i in plan.intervals
    )
    return Explanation(intervals=parts, start=plan.start, context_tokens=len(plan))


def placed(graph: Graph, parent: str, *bases: int) -> ContextPlan:
    """`parent`'s own tokens and all it sees, placed at one base after the other, each by a state of its own."""
    plan = graph.states[parent].context
    for base in bases:
        plan = graph.add([Ref(kind="inherit", id=parent, base=base)], Explicit(), n=0)
        parent = id_of(len(graph.states) - 1)
    return plan


@SLOW
@given(st.randoms(use_true_random=False), st.lists(st.integers(0, 500), min_size=2, max_size=4))
def test_placing_again_and_again_is_placing_once(dice: Random, bases: list[int]):
    graph = random_graph(dice, 5)
    last = id_of(4)
    assert placed(graph, last, *bases) == placed(graph, last, bases[-1])


def test_llama_cpp_3825_two_shifts_compose_to_the_sum():
    graph = Graph()
    graph.add([], n=6)
    graph.add([Ref(kind="artifact", id=id_of(0), span=(1, 4), base=8)], Explicit(), n=0)  # by +7
    graph.add([Ref(kind="inherit", id=id_of(1), base=5)], Explicit(), n=0)  # by -3
    (interval,) = graph.states[id_of(2)].context.intervals
    assert interval.delta == 7 - 3
    assert interval.segment is graph.states[id_of(0)].segment, "the key is where it was computed"


def test_llama_cpp_4097_a_hundred_placements_in_a_row_equal_one():
    graph = Graph()
    graph.add([], n=3)
    graph.add([Ref(kind="inherit", id=id_of(0))], n=4)
    bases = [step * 37 % 101 for step in range(100)]
    assert placed(graph, id_of(1), *bases) == placed(graph, id_of(1), bases[-1])


def test_cacheblend_6_explain_prints_native_and_effective():
    graph = Graph()
    graph.add([], n=4)
    graph.add([Ref(kind="inherit", id=id_of(0))], n=3)
    plan = graph.add([Ref(kind="artifact", id=id_of(1), span=(1, 3)), Ref(kind="inherit", id=id_of(0))], "concat")
    told = explained(plan)
    assert [(i.state, i.start, i.stop, i.native, i.effective) for i in told.intervals] == [
        (id_of(1), 1, 3, 5, 0),
        (id_of(0), 0, 4, 0, 2),
    ]
    assert (told.start, told.distance(0, 1), told.distance(1, 2), told.distance(5, 6)) == (6, 1, 1, 1)


@SLOW
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_under_concat_distances_are_those_of_a_flattened_prompt(dice: Random, size: int):
    graph = random_graph(dice, size)
    plan = graph.add(random_refs(dice, graph.states, "concat", 4), "concat")
    told = explained(plan)
    for i in range(len(plan) + 1):
        for j in range(0, len(plan) + 1, 3):
            assert told.distance(i, j) == j - i


@SLOW
@given(st.randoms(use_true_random=False), st.integers(1, 8), st.sampled_from(PLACES))
def test_distances_are_differences_of_positions(dice: Random, size: int, place: Place):
    graph = random_graph(dice, size)
    plan = graph.add(random_refs(dice, graph.states, place, 4), place)
    told, at = explained(plan), [*(at for _, at, _ in seen(plan)), plan.start]
    for i in range(len(at)):
        assert [told.distance(i, j) for j in range(len(at))] == [there - at[i] for there in at]


@pytest.mark.parametrize("token", [-1, 8, 100])
def test_a_distance_to_a_token_that_is_not_there_is_an_error_that_says_so(token: int):
    graph = Graph()
    graph.add([], n=7)
    told = explained(graph.add([Ref(kind="inherit", id=id_of(0))]))
    assert told.distance(0, 7) == 7
    for pair in ((token, 0), (0, token)):
        with pytest.raises(InvalidRequestError, match=f"no visible token {token}: there are 7"):
            told.distance(*pair)


@SLOW
@given(st.randoms(use_true_random=False), st.integers(1, 8), st.sampled_from(["same_start", "right_aligned"]))
def test_parallel_parts_begin_or_end_together_and_keep_their_inner_distances(dice: Random, size: int, place: Policy):
    graph = random_graph(dice, size)
    refs = list(dict.fromkeys(random_refs(dice, graph.states, place, 5)))
    kept = {one: at for one, at, _ in seen(graph.add(refs, "keep"))}
    plan = graph.add(refs, place)
    moved = {one: at for one, at, _ in seen(plan)}
    assert list(moved) == list(kept)
    alone = [{one: at for one, at, _ in seen(compile_context(ContextSpec(refs=(ref,)), graph.states))} for ref in refs]
    private = [{one for one in part if sum(one in other for other in alone) == 1} for part in alone]
    shared = kept.keys() - set().union(*private)
    assert all(moved[one] == kept[one] for one in shared)
    begin = 1 + max((kept[one] for one in shared), default=-1)
    for part, before in zip(private, alone, strict=True):
        if part:
            assert len({moved[one] - before[one] for one in part}) == 1
            if place == "same_start":
                assert min(moved[one] for one in part) == begin
            else:
                assert max(moved[one] for one in part) + 1 == plan.start
