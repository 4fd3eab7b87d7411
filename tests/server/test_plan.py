"""Context plans: what is shared between them, what growing costs, and that nobody can change one.

That they are right is asked in `test_properties.py`.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from anabranch.wire import ContextSpec, Ref
from anabranch_server.compile import compile_context
from anabranch_server.plan import ContextPlan, written_out
from anabranch_server.segments import Interval, Segment
from anabranch_server.trunk import SHELF_ROWS, Head, Piece, Rows, clear_shelf


@dataclass(frozen=True)
class State:
    segment: Segment
    context: ContextPlan
    input_tokens: int = 2


class World(dict[str, State]):
    def add(self, *refs: Ref, n: int = 2, place: str | None = None) -> str:
        name = f"{len(self):032x}"
        plan = self.compile(*refs, place=place)
        self[name] = State(Segment(name, plan.start, range(n), None), plan)
        return name

    def compile(self, *refs: Ref, place: str | None = None) -> ContextPlan:
        return compile_context(ContextSpec.model_validate({"refs": refs, "place": place}), self)


def inherit(name: str, upto: int | None = None, propagate: bool = True) -> Ref:
    return Ref(kind="inherit", id=name, upto=upto, propagate=propagate)


@pytest.fixture
def world() -> World:
    return World()


def test_a_chain_is_one_trunk_and_a_row_for_each_state(world: World):
    name = world.add()
    for _ in range(50):
        name = world.add(inherit(name))
    trunk = world[name].context.view.trunk
    assert {state.context.view.trunk for state in list(world.values())[1:]} == {trunk}
    assert (len(trunk.own), world[name].context.rows) == (50, 50)


def test_children_of_one_state_share_its_rows(world: World):
    parent = world.add(inherit(world.add()))
    children = [world.compile(inherit(parent)) for _ in range(20)]
    assert len({child.view.trunk for child in children}) == 1
    assert len({id(child) for child in children}) == 20


def test_a_sibling_branches_and_leaves_the_first_as_it_was(world: World):
    root = world.add()
    a, b = world.add(inherit(root)), world.add(inherit(root))
    a_child, b_child = world.compile(inherit(a)), world.compile(inherit(b))
    assert [i.segment.id for i in a_child.intervals] == [root, a]
    assert [i.segment.id for i in b_child.intervals] == [root, b]
    assert len(b_child.view.trunk.own) == 1, "the root's row is not copied"
    assert a_child.intervals[0] is b_child.intervals[0]


def test_a_rewind_shares_all_but_the_last_row(world: World):
    parent = world.add(inherit(world.add()), n=5)
    whole, cut = world.compile(inherit(parent)), world.compile(inherit(parent, upto=3))
    assert whole.intervals[0] is cut.intervals[0]
    assert [(i.start, i.stop) for i in cut.intervals] == [(0, 2), (0, 3)]
    assert [(i.start, i.stop) for i in whole.intervals] == [(0, 2), (0, 5)]


def test_asking_a_plan_does_not_write_it_out(world: World):
    plan = world.compile(inherit(world.add(inherit(world.add()))))
    assert (len(plan), plan.rows, plan.shifted) == (4, 2, False)
    assert plan.view.trunk.own._intervals == []
    assert plan.intervals == plan.intervals
    assert len(plan.view.trunk.own._intervals) == 2


def test_a_plan_is_frozen(world: World):
    plan = world.compile(inherit(world.add()))
    for name in ("start", "view", "intervals", "anything"):
        with pytest.raises(AttributeError):
            setattr(plan, name, 0)
    with pytest.raises(ValueError, match="read-only"):
        plan.columns[0, 0] = 1


def test_plans_are_equal_by_what_is_seen(world: World):
    parent = world.add(inherit(world.add()))
    plan = world.compile(inherit(parent))
    written = ContextPlan(plan.intervals, plan.start)
    assert plan == written
    assert hash(plan) == hash(written)
    assert repr(plan) == repr(written)
    assert plan != ContextPlan(plan.intervals, plan.start + 1)
    assert plan != ContextPlan(plan.intervals[1:], plan.start)
    assert plan != ContextPlan((plan.intervals[0].moved(1), *plan.intervals[1:]), plan.start)
    assert plan != plan.intervals


def test_thousands_of_branches_deep_nothing_recurses(world: World):
    clear_shelf()
    parent = world.add()
    for _ in range(6_000):
        world.compile(inherit(world.add(inherit(parent))))  # takes the place that the next one would have had
        parent = world.add(inherit(parent))
    plan = world.compile(inherit(parent))
    assert plan.rows == 6_001
    assert len(plan.intervals) == 6_001
    assert plan.columns.shape == (6, 6_001)
    del plan
    world.clear()
    gc.collect()


def test_what_is_forgotten_is_written_out_again(world: World):
    root = world.add()
    sides = [world.add(inherit(world.add(inherit(root)))) for _ in range(5)]
    plan = world.compile(*map(inherit, sides), place="concat")
    before = (plan.intervals, plan.columns.tolist())
    clear_shelf()
    assert plan.view.trunk.head.written is None
    assert (plan.intervals, plan.columns.tolist()) == before


def test_the_shelf_has_a_size():
    view = written_out([Interval(Segment("a", 0, range(1), None), 0, 1)])
    rows = SHELF_ROWS // 4
    heads = [
        Head((Piece(0, view.trunk, 0, 1),), Rows(np.zeros((6, rows), np.int64), view.segments * rows)) for _ in range(6)
    ]
    assert [head.written is None for head in heads] == [True, True, True, False, False, False]
    clear_shelf()


def memory_of(make: Callable[[int], None]) -> float:
    """Bytes a state, without what can be written out again."""
    make(100)  # so that what is allocated once is not counted
    clear_shelf()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        make(500)
        clear_shelf()
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / 500
    finally:
        tracemalloc.stop()


def test_memory_of_a_state_does_not_grow_with_what_it_sees():
    bytes_of: dict[int, float] = {}
    for depth in (10, 2000):
        world = World()
        name = world.add()
        for _ in range(depth):
            name = world.add(inherit(name))
        sides = [world.add(inherit(name)) for _ in range(4)]

        def make(n: int, world: World = world, sides: list[str] = sides) -> None:
            for _ in range(n):
                world.add(*map(inherit, sides))

        bytes_of[depth] = memory_of(make)
    assert bytes_of[2000] < 1.2 * bytes_of[10] + 200
