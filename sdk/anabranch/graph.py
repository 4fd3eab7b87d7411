"""The graph that states form: frozen nodes, their references, their order, and what they become on the wire.

No I/O, and no knowledge of what exists on a server.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from pydantic import ValidationError

from anabranch.errors import InvalidRequestError, invalid
from anabranch.wire import ContextSpec, Explicit, MessagePiece, Piece, Policy, Ref

Kind: TypeAlias = Literal["inherit", "artifact"]
Rules: TypeAlias = Literal["strict"]


def new_id() -> str:
    """A fresh state id: 128 random bits, so that nobody guesses it and no two clients meet."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Node:
    """A state as it was built: a value that never changes. Sharing is identity: equal content is not the same node.

    `generated` nodes own their input and what the model made of it; others own their input only.
    """

    refs: tuple[Reference, ...] = ()
    input: tuple[Piece, ...] = ()
    place: Policy | Explicit | None = None
    rules: Rules | None = None
    generated: bool = False
    id: str = field(default_factory=new_id)

    @property
    def owns_tokens(self) -> bool:
        return self.generated or bool(self.input)

    @property
    def short_id(self) -> str:
        return self.id[:8]

    def __repr__(self) -> str:
        return f"Node({self.short_id})"


@dataclass(frozen=True, slots=True)
class Reference:
    """An edge to an earlier node. The fields are those of `wire.Ref`, except that it holds the node itself."""

    kind: Kind
    target: Node
    span: tuple[int, int] | None = None
    upto: int | None = None
    propagate: bool = True
    base: int | None = None
    mapper: str | None = None

    def __str__(self) -> str:
        part = f"[{self.span[0]}:{self.span[1]}]" if self.span else "" if self.upto is None else f"[:{self.upto}]"
        notes = "" if self.mapper is None else f" through {self.mapper}"
        notes += ("" if self.propagate else " (not propagated)") + ("" if self.base is None else f" @{self.base}")
        return f"{self.kind}{part}{notes}"

    def wire(self) -> Ref:
        """Raises InvalidRequestError if the fields do not fit together."""
        try:
            return Ref(
                kind=self.kind,
                id=self.target.id,
                span=self.span,
                upto=self.upto,
                propagate=self.propagate,
                base=self.base,
                mapper=self.mapper,
            )
        except ValidationError as error:
            raise invalid(error) from None


def fresh(node: Node, **changes: object) -> Node:
    """A new node, with an id of its own, that differs from `node` in `changes`."""
    return replace(node, **{"id": new_id(), **changes})


def check_reference(ref: Reference) -> None:
    """Raise InvalidRequestError for a reference that no server could accept."""
    ref.wire()
    if ref.kind == "artifact" and ref.span is None and ref.target.input and not ref.target.generated:
        raise InvalidRequestError(
            f"state {ref.target.short_id} generated nothing, so an artifact of it would be empty",
            param="span",
            hint="say which of its own tokens are meant, for example span=(0, 20), or inherit it",
        )
    if not ref.target.owns_tokens and (ref.kind == "artifact" or ref.upto):
        raise InvalidRequestError(
            f"state {ref.target.short_id} has no tokens of its own to select from",
            param="span" if ref.kind == "artifact" else "upto",
            hint="append text to it, or reference the states that it references",
        )


def answer_due(node: Node) -> bool:
    """Whether `node` continues a conversation whose last message waits for its answer, so that no input is needed."""
    while not node.owns_tokens and node.refs and node.refs[-1].kind == "inherit" and node.refs[-1].upto is None:
        node = node.refs[-1].target
    last = node.input[-1] if node.input and not node.generated else None
    return isinstance(last, MessagePiece) and last.role != "assistant"


def check_rules(node: Node) -> None:
    """Raise InvalidRequestError if `node` breaks the rules that it asked for."""
    if node.rules == "strict" and len({ref.kind for ref in node.refs}) > 1:
        raise InvalidRequestError(
            "strict rules: one state may not mix inherit and artifact references",
            param="refs",
            hint="use one kind, or join in two steps: one state per kind",
        )


def placement(policy: str | None, start: int | None) -> Policy | Explicit:
    """The wire form of `.place(policy, start=start)`; raises InvalidRequestError."""
    if policy is None or policy == "explicit":
        try:
            return Explicit(start=start)
        except ValidationError as error:
            raise invalid(error) from None
    for known in get_args(Policy):
        if policy == known:
            if start is not None:
                raise InvalidRequestError(
                    f"{policy} decides itself where new tokens start",
                    param="start",
                    hint='use place("explicit", start=...) with base= on the references',
                )
            return known
    names = ", ".join(map(repr, (*get_args(Policy), "explicit")))
    raise InvalidRequestError(f"there is no position policy {policy!r}", param="place", hint=f"one of {names}")


# ---------------------------------------------------------------- order


def order(*ends: Node) -> list[Node]:
    """All nodes that `ends` are made from, and `ends`: each once, every node after those that it references."""
    done: dict[Node, None] = {}
    stack = [(node, False) for node in reversed(ends)]
    while stack:
        node, parents_done = stack.pop()
        if node in done:
            continue
        if parents_done:
            done[node] = None
        else:
            stack.append((node, True))
            stack.extend((ref.target, False) for ref in reversed(node.refs) if ref.target not in done)
    return list(done)


# ---------------------------------------------------------------- states without own tokens


@dataclass(frozen=True, slots=True)
class Context:
    """What a node references, once states without own tokens are replaced by what they reference."""

    refs: tuple[Reference, ...] = ()
    place: Policy | Explicit | None = None
    rules: Rules | None = None

    @property
    def targets(self) -> list[Node]:
        return list(dict.fromkeys(ref.target for ref in self.refs))

    def spec(self) -> ContextSpec:
        """The wire form, without an id; raises InvalidRequestError."""
        place = self.place
        if place is None and any(ref.base is not None for ref in self.refs):
            place = Explicit()  # a base can mean nothing else
        try:
            return ContextSpec(refs=tuple(ref.wire() for ref in self.refs), place=place, rules=self.rules)
        except ValidationError as error:
            raise invalid(error) from None


def context(node: Node) -> Context:
    """What `node` references on the server, where states without own tokens do not exist.

    Raises InvalidRequestError if such a state was placed in a way that its references alone cannot express.
    """
    known: dict[Node, Context] = {}
    for one in _empty_ancestors(node):
        known[one] = _spliced(one, known)
    return known[node]


def _empty_ancestors(node: Node) -> list[Node]:
    """`node` and the states without own tokens that it is made from, referenced ones first."""
    found: dict[Node, None] = {}
    stack = [(node, False)]
    while stack:
        one, parents_done = stack.pop()
        if parents_done:
            found.setdefault(one)
        elif one not in found:
            stack.append((one, True))
            stack.extend((ref.target, False) for ref in one.refs if not ref.target.owns_tokens)
    return list(found)


def _spliced(node: Node, known: dict[Node, Context]) -> Context:
    only_parent = len(node.refs) == 1 and node.place is None and node.refs[0].base is None
    refs: list[Reference] = []
    place = node.place
    for ref in node.refs:
        if ref.target.owns_tokens:
            refs.append(ref)
            continue
        inner = known[ref.target]
        _check_mapped_once(inner, ref)
        if only_parent:
            place = inner.place
        elif place != "concat":
            _check_movable(inner, ref, whole=place in ("same_start", "right_aligned"))
        refs.extend(_handed_on(inner, ref, keep_bases=only_parent))
    return Context(tuple(dict.fromkeys(refs)), place, node.rules)


def _check_movable(inner: Context, ref: Reference, *, whole: bool) -> None:
    """States at their own places can be spliced among others; states that were moved lose their places. `whole`: what
    one reference selects moves as one."""
    moved = inner.place not in (None, "keep") or any(one.base is not None for one in inner.refs)
    if moved or ((whole or ref.base is not None) and len(inner.refs) != 1):
        raise InvalidRequestError(
            f"state {ref.target.short_id} has a placement but no tokens of its own, so it fits no other place",
            param="place",
            hint="append text to it first, or reference the states that it references",
        )


def _check_mapped_once(inner: Context, ref: Reference) -> None:
    """One reference has one mapper: two in a row need a state between them."""
    if ref.mapper is not None and any(one.mapper is not None for one in inner.refs if one.propagate):
        raise InvalidRequestError(
            f"state {ref.target.short_id} sees through a mapper and has no tokens of its own, so no other fits",
            param="mapper",
            hint="append text to it first, or reference the states that it references",
        )


def _handed_on(inner: Context, outer: Reference, *, keep_bases: bool) -> Iterable[Reference]:
    for ref in inner.refs:
        if ref.propagate:
            base = ref.base if keep_bases else outer.base
            mapper = outer.mapper if ref.mapper is None else ref.mapper
            yield replace(ref, propagate=outer.propagate, base=base, mapper=mapper)
