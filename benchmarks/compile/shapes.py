"""The graphs that are measured: many states, and 64 of them to join.

Each is made from a seed, and differs in what its states share. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from anabranch.wire import ContextSpec, Ref
from anabranch_server.compile import compile_context
from anabranch_server.plan import ContextPlan
from anabranch_server.segments import Segment

TOKENS = 8
"""Own tokens of each state."""
JOINED = 64


@dataclass(slots=True)
class State:
    """A state, as the compiler asks for it, and as the baseline does."""

    segment: Segment
    context: ContextPlan
    parents: tuple[str, ...]
    input_tokens: int = TOKENS
    tokens: int = TOKENS

    @property
    def start(self) -> int:
        return self.segment.start


@dataclass(slots=True)
class Graph:
    states: dict[str, State] = field(default_factory=dict)

    def add(self, *parents: str) -> str:
        """A state that inherits these; returns its id."""
        return self.seal(compile_context(spec_of(*parents), self.states), *parents)

    def seal(self, plan: ContextPlan, *parents: str) -> str:
        name = f"{len(self.states):032x}"
        self.states[name] = State(Segment(name, plan.start, range(TOKENS), None), plan, parents)
        return name


def spec_of(*parents: str) -> ContextSpec:
    return ContextSpec(refs=tuple(Ref(kind="inherit", id=name) for name in parents))


Shape = Callable[[int, Random], Iterator[tuple[str, ...]]]
"""The parents of each state in turn, by number of states."""


def chains(size: int, dice: Random) -> Iterator[tuple[str, ...]]:
    """64 conversations that begin with one root, a turn of each after the other."""
    yield ()
    for i in range(1, size):
        yield (f"{max(0, i - JOINED):032x}",)


def line(size: int, dice: Random) -> Iterator[tuple[str, ...]]:
    """One conversation."""
    yield ()
    for i in range(1, size):
        yield (f"{i - 1:032x}",)


def tree(size: int, dice: Random) -> Iterator[tuple[str, ...]]:
    """Each state continues a random earlier one."""
    yield ()
    for i in range(1, size):
        yield (f"{dice.randrange(i):032x}",)


def late_forks(size: int, dice: Random) -> Iterator[tuple[str, ...]]:
    """One long conversation, and at its end 64 states that continue it."""
    yield ()
    for i in range(1, size):
        yield (f"{min(i - 1, size - JOINED - 1):032x}",)


def layers(size: int, dice: Random) -> Iterator[tuple[str, ...]]:
    """Layers of 64 states, each of which joins 4 of the layer before: nearly everybody sees nearly everything."""
    for i in range(size):
        above = range(i - i % JOINED - JOINED, i - i % JOINED)
        yield tuple(f"{one:032x}" for one in dice.sample(above, 4)) if i >= JOINED else ()


SHAPES: dict[str, Shape] = {
    "chains": chains,
    "late forks": late_forks,
    "tree": tree,
    "layers": layers,
    "line": line,
}


def build(shape: str, size: int, seed: int = 0) -> Graph:
    graph = Graph()
    for parents in SHAPES[shape](size, Random(seed)):
        graph.add(*parents)
    return graph


def to_join(graph: Graph) -> tuple[str, ...]:
    """The 64 youngest states."""
    return tuple(list(graph.states)[-JOINED:])
