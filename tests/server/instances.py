"""What each state of a DAG sees, by brute force: dictionaries of single tokens, in order, at effective positions.

No intervals and no numpy, and nothing of the compiler: `test_properties.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch.wire import Explicit, Policy, Ref

Instance = tuple[str, int]
Place = Policy | Explicit | None


@dataclass(frozen=True)
class Node:
    """One state. `visible` is in compiled order."""

    visible: dict[Instance, int]
    handed_on: set[Instance]
    start: int
    n: int
    input_tokens: int

    def full(self, state_id: str) -> dict[Instance, int]:
        """What inheriting it selects."""
        own = {(state_id, i): self.start + i for i in range(self.n)}
        return {one: at for one, at in self.visible.items() if one in self.handed_on} | own


def traverse(refs: Sequence[Ref], place: Place, nodes: Mapping[str, Node], n: int, input_tokens: int) -> Node:
    """A new state with `n` own tokens."""
    choices = {ref: _selected(ref, nodes[ref.id]) for ref in refs}
    seen: dict[Instance, int] = {}
    for choice in choices.values():
        for one, at in choice.items():
            seen.setdefault(one, at)
    handed_on = {one for ref, choice in choices.items() if ref.propagate for one in choice}
    start = 1 + max(seen.values(), default=-1)
    match place:
        case "concat":
            seen, start = {one: i for i, one in enumerate(seen)}, len(seen)
        case "same_start" | "right_aligned":
            seen, start = _parallel(seen, list(choices.values()), place)
        case Explicit(start=int(given)):
            start = given
        case None if [ref.kind for ref in refs] == ["inherit"]:
            parent = nodes[refs[0].id]
            start = parent.start + (parent.n if refs[0].upto is None else refs[0].upto)
    return Node(seen, handed_on, start, n, input_tokens)


def _selected(ref: Ref, parent: Node) -> dict[Instance, int]:
    if ref.kind == "artifact":
        begin, end = ref.span or (parent.input_tokens, parent.n)
        choice = {(ref.id, i): parent.start + i for i in range(begin, end)}
    else:
        upto = parent.n if ref.upto is None else ref.upto
        choice = {(u, i): at for (u, i), at in parent.full(ref.id).items() if u != ref.id or i < upto}
    if ref.base is not None and choice:
        by = ref.base - min(choice.values())
        choice = {one: at + by for one, at in choice.items()}
    return choice


def _parallel(
    seen: dict[Instance, int], choices: list[dict[Instance, int]], place: str
) -> tuple[dict[Instance, int], int]:
    shared = {one for one in seen if sum(one in choice for choice in choices) > 1}
    after_shared = 1 + max((seen[one] for one in shared), default=-1)
    alone = [{one: at for one, at in choice.items() if one not in shared} for choice in choices]
    alone = [part for part in alone if part]
    extent = max((max(part.values()) + 1 - min(part.values()) for part in alone), default=0)
    placed = dict(seen)
    for part in alone:
        low, high = min(part.values()), max(part.values())
        to = after_shared - low if place == "same_start" else after_shared + extent - 1 - high
        placed |= {one: at + to for one, at in part.items()}
    if place == "right_aligned":
        return placed, after_shared + extent
    return placed, 1 + max(placed.values(), default=-1)
