"""From an operation's dice and what is alive to a request: references, placement, input, sampling.

It sends nothing. Every request is one that the server must be able to serve: small enough, and within all limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from anabranch.wire import Explicit, Policy, Ref
from tests.oracle.brute import Node, look, selected

from .operations import SHAPES, Operation
from .tiny import BYTES
from .world import Known, World, lineage

LINEAGE = 260
"""Most tokens of a new state and all that it was made from: what brute force checks within a moment."""
HIGHEST = 3000
"""A placement may reach this position; what is made from it stays below the model's limit."""
WORDS = ("river", " arm", " island", "; and", " then", " joins", ".\n", "Q: ", " why?", " 1974", "the ", "map")


@dataclass(slots=True)
class Draw:
    """One operation's way to requests."""

    operation: Operation
    dice: Random
    world: World
    has: Callable[[str], bool]
    key: str | None = None
    made: int = 0

    def shape(self) -> str:
        return self.dice.choice([shape for shape in SHAPES if self.has(shape)] or ["root"])

    def state(self, shape: str, *, longest: int = 12, shortest: int = 0, **more: Any) -> Known:
        """A new state of this shape; a root if there is nothing that it could be made from."""
        refs, parents = self.refs(shape)
        return self.child(refs, parents, longest=longest, shortest=shortest, **more)

    def child(
        self, refs: tuple[Ref, ...], parents: tuple[Known, ...], *, longest: int = 12, shortest: int = 0, **more: Any
    ) -> Known:
        dice = self.dice
        pieces, tokens = self._input()
        asked = max(shortest, dice.choice((0, 0, 1, 2, 3, 4, 6, 8, longest)))
        refs, place = self._place(refs, parents)
        node = Node(self.operation.state_id(self.made), refs, place, tokens, (0,) * asked, name=self._name())
        if _highest(node, parents) > HIGHEST:
            node, parents = Node(node.id, (), None, tokens, node.generated, name=node.name), ()
        self.made += 1
        return Known(node, self._body(node, pieces, asked, more), parents, self.key, asked, lease=more.get("lease"))

    def long_root(self) -> Known:
        """One that takes a good part of the pool."""
        tokens = tuple(self.dice.randrange(BYTES) for _ in range(self.dice.randint(150, 400)))
        node = Node(self.operation.state_id(self.made), input=tokens, generated=(0,) * 2, name=self._name())
        self.made += 1
        return Known(node, self._body(node, [{"tokens": list(tokens)}], 2, {}), (), self.key, 2)

    def probe(self, parent: Known) -> Known:
        """A short continuation of one state, with logprobs."""
        node = Node(
            self.operation.state_id(100 + self.made),
            (Ref(kind="inherit", id=parent.id),),
            input=(self.dice.randrange(BYTES),),
            generated=(0, 0, 0),
            name=f"probe of {parent.node.name}",
        )
        self.made += 1
        body = self._body(node, [{"tokens": list(node.input)}], 3, {})
        body["sampling"] |= {"logprobs": True, "top_logprobs": 4}
        return Known(node, body, (parent,), self.key, 3)

    def refs(self, shape: str) -> tuple[tuple[Ref, ...], tuple[Known, ...]]:
        """References of one shape and the states that they name; none if nothing fits."""
        dice = self.dice
        if shape == "root" or not (near := self._parents()):
            return (), ()
        count = {"join": dice.choice((2, 2, 3, 4)), "artifact": dice.choice((1, 1, 2, 3))}.get(shape, 1)
        chosen: list[Known] = []
        for _ in range(count if shape != "once" else dice.choice((1, 2, 3))):
            parent = dice.choice(chosen if chosen and dice.random() < 0.15 else near)
            if _weight([*chosen, parent]) <= LINEAGE - 60:
                chosen.append(parent)
        refs = tuple(self._ref(shape, parent, first=not at) for at, parent in enumerate(chosen))
        return refs, tuple(dict.fromkeys(chosen))

    def _parents(self) -> list[Known]:
        """Mostly sealed states; now and then also such as still run. Often only the newest, so that DAGs get deep."""
        parents = self.world.sealed(self.key)
        if self.dice.random() < 0.25:
            parents += [known for known in self.world.running() if known.key == self.key]
        return parents[-4:] if self.dice.random() < 0.4 else parents

    def _ref(self, shape: str, parent: Known, *, first: bool) -> Ref:
        dice = self.dice
        # What a running parent will have generated is not known yet: it may be cut short.
        sure = len(parent.node.own if parent.phase == "sealed" else parent.node.input)
        propagate = not (shape == "once" and (first or dice.random() < 0.5))
        luck = dice.random()
        if shape == "rewind" or (shape in ("join", "once") and luck < 0.2):
            return Ref(kind="inherit", id=parent.id, upto=dice.randint(0, sure), propagate=propagate)
        if shape == "artifact" or (shape in ("join", "once") and luck < 0.4):
            begin = dice.randint(0, sure)
            span = None if dice.random() < 0.3 else (begin, dice.randint(begin, sure))
            return Ref(kind="artifact", id=parent.id, span=span, propagate=propagate)
        return Ref(kind="inherit", id=parent.id, propagate=propagate)

    def _place(
        self, refs: tuple[Ref, ...], parents: tuple[Known, ...]
    ) -> tuple[tuple[Ref, ...], Policy | Explicit | None]:
        """A placement, and the references with the bases that belong to it."""
        dice, by_id = self.dice, {parent.id: parent for parent in parents}
        if len(refs) == 1 and refs[0].kind == "inherit" and dice.random() < 0.8:
            return refs, None
        place = dice.choice((None, "keep", "concat", "concat", "explicit"))
        if place != "explicit":
            return refs, place
        based, largest = [], 0
        for ref in refs:
            parent = by_id[ref.id]
            seen = selected(ref, parent.node, parent.view).values() if parent.view else ()
            near = max(0, min(seen, default=0) + dice.randint(-40, 40))
            base = dice.choice((None, near, dice.randint(0, 600)))
            largest = max([largest, base or 0, *seen])
            based.append(ref.model_copy(update={"base": base}))
        return tuple(based), Explicit(start=dice.choice((None, dice.randint(0, largest + 300))))

    def _input(self) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
        """Pieces, and the tokens they stand for: at least one, now and then more than a prefill chunk."""
        dice = self.dice
        if dice.random() < 0.2:
            text = "".join(dice.choices(WORDS, k=dice.randint(1, 4)))
            return [{"text": text}], tuple(text.encode())
        count = dice.randint(17, 48) if dice.random() < 0.12 else dice.randint(1, 10)
        tokens = tuple(dice.randrange(BYTES) for _ in range(count))
        return [{"tokens": list(tokens)}], tokens

    def _body(self, node: Node, pieces: list[dict[str, Any]], asked: int, more: dict[str, Any]) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_tokens": asked, "temperature": 0, "ignore_eos": True}
        if asked and self.dice.random() < 0.25:
            sampling |= {"logprobs": True, "top_logprobs": 4}
        place = node.place.model_dump(exclude_none=True) if isinstance(node.place, Explicit) else node.place
        body = {
            "id": node.id,
            "refs": [ref.model_dump(mode="json", exclude_none=True) for ref in node.refs],
            "input": pieces,
            "sampling": sampling,
            **more,
        }
        return body if place is None else {**body, "place": place}

    def _name(self) -> str:
        return f"operation {self.operation.index} ({self.operation.kind}) state {self.made}"


def _weight(states: list[Known]) -> int:
    return sum(len(one.node.input) + one.asked for one in lineage(states))


def _highest(node: Node, parents: tuple[Known, ...]) -> int:
    """The largest position of a state, where its parents are known."""
    above = {parent.id: (parent.node, parent.view) for parent in parents if parent.view is not None}
    if len(above) < len(parents):
        return 0
    view = look(node, above)  # pyright: ignore[reportArgumentType]
    return max([view.start + len(node.own), *view.visible.values()])
