"""The definition of a context DAG, token instance by token instance: what each state sees, where, and what follows.

It is not the server's compiler: no intervals, no sharing, nothing clever; only dictionaries of single tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.wire import Explicit, Policy, Ref

from .llama import Sight

Instance = tuple[str, int]
"""(state id, index among its own tokens)."""
Placed = dict[Instance, int]
"""Effective position of each token instance; the dictionary's order is the compiled order."""


@dataclass(frozen=True, slots=True)
class Node:
    """One state as it came out: what it was made from and what the model wrote.

    `top` holds, per generated token, the returned log probabilities by token id.
    """

    id: str
    refs: tuple[Ref, ...] = ()
    place: Policy | Explicit | None = None
    input: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    top: tuple[dict[int, float], ...] = ()
    name: str = ""

    @property
    def own(self) -> tuple[int, ...]:
        return self.input + self.generated


@dataclass(frozen=True, slots=True)
class View:
    """What one state sees (`visible`), what inheriting it hands on (`full`), and where its own tokens begin."""

    visible: Placed
    full: Placed
    start: int


def selected(ref: Ref, parent: Node, view: View) -> Placed:
    """All tokens that one reference selects, at the parent's view of them."""
    n = len(parent.own)
    if ref.kind == "artifact":
        begin, end = (len(parent.input), n) if ref.span is None else ref.span
        assert 0 <= begin <= end <= n, f"span {ref.span} of {n} own tokens"
        return {(parent.id, i): view.start + i for i in range(begin, end)}
    upto = n if ref.upto is None else ref.upto
    assert 0 <= upto <= n, f"upto {ref.upto} of {n} own tokens"
    return {(u, i): at for (u, i), at in view.full.items() if u != parent.id or i < upto}


def union(choices: Iterable[Placed]) -> Placed:
    """Each instance once: its first occurrence decides its place in the order and its position."""
    seen: Placed = {}
    for choice in choices:
        for instance, position in choice.items():
            if instance not in seen:
                seen[instance] = position
    return seen


def look(node: Node, above: dict[str, tuple[Node, View]]) -> View:
    """The view of one state, given all earlier states and their views."""
    choices = [selected(ref, *above[ref.id]) for ref in node.refs]
    visible, start = _place(node, choices, above)
    handed_on = {one for ref, choice in zip(node.refs, choices, strict=True) if ref.propagate for one in choice}
    full = {one: position for one, position in visible.items() if one in handed_on}
    full |= {(node.id, i): start + i for i in range(len(node.own))}
    return View(visible, full, start)


def look_all(nodes: Iterable[Node]) -> dict[str, View]:
    """The views of all states; a state comes after those that it references."""
    above: dict[str, tuple[Node, View]] = {}
    for node in nodes:
        assert node.id not in above, f"{node.id} twice"
        above[node.id] = (node, look(node, above))
    return {name: view for name, (_, view) in above.items()}


def _place(node: Node, choices: list[Placed], above: dict[str, tuple[Node, View]]) -> tuple[Placed, int]:
    """Effective positions of what is visible, and the position of the first own token."""
    place = node.place
    if place is None and len(node.refs) == 1 and node.refs[0].kind == "inherit":
        (ref,) = node.refs
        parent, view = above[ref.id]
        return union(choices), view.start + (len(parent.own) if ref.upto is None else ref.upto)
    if place == "concat":
        visible = {one: position for position, one in enumerate(union(choices))}
        return visible, len(visible)
    if isinstance(place, Explicit):
        moved = []
        for ref, choice in zip(node.refs, choices, strict=True):
            by = 0 if ref.base is None or not choice else ref.base - min(choice.values())
            moved.append({one: position + by for one, position in choice.items()})
        visible = union(moved)
        return visible, _after(visible) if place.start is None else place.start
    if place in ("same_start", "right_aligned"):
        return _lined_up(node.refs, choices, place)
    assert place in (None, "keep"), place
    visible = union(choices)
    return visible, _after(visible)


def _lined_up(refs: tuple[Ref, ...], choices: list[Placed], place: str) -> tuple[Placed, int]:
    """What several references select stays; what only one selects moves as a whole, to begin or end with the others.

    A reference that is listed again in every detail is one reference.
    """
    parts = list(dict(zip(refs, choices, strict=True)).values())
    selections = Counter(one for part in parts for one in part)
    visible = union(parts)
    begin = _after({one: position for one, position in visible.items() if selections[one] > 1})
    private = [{one: position for one, position in part.items() if selections[one] == 1} for part in parts]
    end = begin + max((_after(part) - min(part.values()) for part in private if part), default=0)
    for part in private:
        for one in part:
            visible[one] += begin - min(part.values()) if place == "same_start" else end - _after(part)
    return visible, _after(visible) if place == "same_start" else end


def _after(visible: Placed) -> int:
    return 1 + max(visible.values(), default=-1)


def sight(nodes: list[Node]) -> tuple[Tensor, Sight]:
    """All token instances of the DAG, [n] int64, in the order of `nodes`; the mask and the positions among them."""
    views = look_all(nodes)
    column = {one: j for j, one in enumerate((node.id, i) for node in nodes for i in range(len(node.own)))}
    n = len(column)
    mask, rows, row_of = [[False] * n for _ in range(n)], [[0] * n for _ in nodes], [0] * n
    for row, node in enumerate(nodes):
        view = views[node.id]
        for one, position in view.visible.items():
            rows[row][column[one]] = position
        for i in range(len(node.own)):
            me = column[node.id, i]
            row_of[me] = row
            rows[row][me] = view.start + i
            for one in view.visible:
                mask[me][column[one]] = True
            for j in range(i + 1):
                mask[me][column[node.id, j]] = True
    tokens = [token for node in nodes for token in node.own]
    return torch.tensor(tokens), Sight(torch.tensor(mask), torch.tensor(rows), torch.tensor(row_of))


class Forward(Protocol):
    """A model in which who sees whom, and where, are explicit: `llama.Llama` or `library.LibraryModel`."""

    def logprobs(self, tokens: Tensor, sight: Sight) -> Tensor: ...


def logprobs(nodes: list[Node], model: Forward) -> dict[str, Tensor]:
    """Per state, [n own, vocab]: row i is the distribution of what follows own token i."""
    tokens, what = sight(nodes)
    parts = model.logprobs(tokens, what).split([len(node.own) for node in nodes])
    return {node.id: part for node, part in zip(nodes, parts, strict=True)}
