"""The baseline: the same context by walking upwards through all ancestors, each time.

It shares nothing with the compiler, and can do less: all references inherit everything, and nothing is moved. For that
it is about as fast as plain Python gets: each ancestor is visited once, and costs one entry in a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Known(Protocol):
    """What it needs to know of a state."""

    @property
    def parents(self) -> Sequence[str]: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> int: ...


def look_up(parents: Sequence[str], states: Mapping[str, Known]) -> tuple[dict[str, tuple[int, int]], int]:
    """The visible states in compiled order, each with the positions of its tokens; and where new tokens begin."""
    visible: dict[str, tuple[int, int]] = {}
    entered: set[str] = set()
    stack = [(name, False) for name in reversed(parents)]
    after = 0
    while stack:
        name, parents_done = stack.pop()
        if parents_done:
            state = states[name]
            end = state.start + state.tokens
            visible[name] = (state.start, end)
            if end > after:
                after = end
        elif name not in entered:
            entered.add(name)
            stack.append((name, True))
            stack += [(parent, False) for parent in reversed(states[name].parents)]
    return visible, after
