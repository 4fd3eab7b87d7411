"""The graph behind states, drawn as a text tree for terminals, from what the client knows.

It asks the server nothing and draws no pictures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from anabranch import sync
from anabranch.graph import Node, Reference, order
from anabranch.results import Generation
from anabranch.session import Session
from anabranch.state import State
from anabranch.wire import MessagePiece, TextPiece

Drawable: TypeAlias = State | sync.State | Generation[Any]

LABEL_WIDTH = 32
"""Characters of an input or output that are shown."""


def tree(states: Drawable | Iterable[Drawable]) -> str:
    """The states and everything they are made from: roots at the left, what references a state below it.

    Each state is drawn once; where a further reference leads to it, an arrow and its id stand for it.
    """
    given = [_state(one) for one in ([states] if isinstance(states, (State, sync.State, Generation)) else states)]
    nodes = order(*(state.node for state in given))
    for state in given:
        given[0].session.check_own(state.session)
    children: dict[Node, list[tuple[Reference, Node]]] = {node: [] for node in nodes}
    for node in nodes:
        for ref in node.refs:
            children[ref.target].append((ref, node))

    lines: list[str] = []
    drawn: set[Node] = set()
    roots = [node for node in nodes if not node.refs]
    # (prefix of the first line, prefix of what stands below, reference that leads here, node)
    stack: list[tuple[str, str, Reference | None, Node]] = [("", "", None, root) for root in reversed(roots)]
    while stack:
        first, below, ref, node = stack.pop()
        edge = f"{ref} " if ref else ""
        if node in drawn:
            lines.append(f"{first}{edge}↑ {node.short_id}")
            continue
        drawn.add(node)
        lines.append(f"{first}{edge}{_describe(node, given[0].session)}")
        edges = children[node]
        for i in range(len(edges) - 1, -1, -1):
            last = i == len(edges) - 1
            stack.append((below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), *edges[i]))
    return "\n".join(lines)


def _state(one: Drawable) -> State:
    state: State | sync.State = one.state if isinstance(one, Generation) else one
    return state.inner if isinstance(state, sync.State) else state


def _describe(node: Node, session: Session) -> str:
    record = session.record(node)
    parts = [f"● {node.short_id}"]
    texts = [_input(node)] if node.input else []
    counts: list[str] = []
    if record.response is not None:
        used = record.response.usage
        counts.append(str(used.computed_tokens))
        if node.generated:
            counts.append(str(used.generated_tokens))
            texts.append(_cut(record.response.text))
    if texts:
        parts.append(" → ".join(texts))
    notes = [f"{' + '.join(counts)} tokens"] if counts else []
    if not node.owns_tokens:
        notes.append("no own tokens")
    elif record.standing.value != "on server":
        notes.append(record.standing.value)
    return "  ".join([*parts, f"({', '.join(notes)})"] if notes else parts)


def _input(node: Node) -> str:
    words: list[str] = []
    for piece in node.input:
        if isinstance(piece, TextPiece):
            words.append(piece.text)
        elif isinstance(piece, MessagePiece):
            words.append(f"{piece.role}: {piece.content}")
        else:
            words.append(f"<{len(piece.tokens)} tokens>")
    return _cut(" ".join(words))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= LABEL_WIDTH else f'"{line[: LABEL_WIDTH - 1]}…"'
