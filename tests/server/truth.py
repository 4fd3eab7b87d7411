"""The truth beside a store: every single token, who needs it and what became of it, by brute force.

No test is in here, and nothing of the store is used: `test_lives.py` compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Name = tuple[str, str]
"""(tenant, state id)."""
Token = tuple[Name, int]


@dataclass
class Read:
    """A running request, or a segment that is being computed again. `passes` is what it will hand on."""

    sees: set[Token]
    passes: set[Token] = field(default_factory=set)
    keep: bool = True
    lease: float | None = None
    started: bool = False
    length: int = 0
    """Of a rebuild: tokens that were needed when it began."""


@dataclass
class Truth:
    page_size: int = 1
    length: dict[Name, int] = field(default_factory=dict)
    """Every segment that ever was."""
    saw: dict[Name, set[Token]] = field(default_factory=dict)
    """What was visible when it was computed."""
    out: set[Name] = field(default_factory=set)
    """Those out of memory, while anything needs them."""
    states: dict[Name, set[Token]] = field(default_factory=dict)
    """Sealed: what each hands on, its own tokens included."""
    running: dict[Name, Read] = field(default_factory=dict)
    rebuilding: dict[Name, Read] = field(default_factory=dict)
    leases: dict[Name, tuple[float, float]] = field(default_factory=dict)
    """Seconds, and the end; infinity until the time is told."""
    dead: set[Token] = field(default_factory=set)
    """Tokens that nothing needed at some time."""

    # ------------------------------------------------------------ who needs what

    def keepers(self) -> Counter[Token]:
        """How many need each token: states, readers, and what is out of memory while itself is needed. With one token
        of a page they need the page."""
        need: Counter[Token] = Counter()
        for tokens in self.states.values():
            need.update(self.in_pages(tokens))
        for read in (*self.running.values(), *self.rebuilding.values()):
            need.update(self.in_pages(read.sees))
        asked: set[Name] = set()
        while more := {name for name, _ in need if name in self.out} - asked:
            for name in more:
                need.update(self.in_pages(self.saw[name]))
            asked |= more
        return need

    def in_pages(self, tokens: set[Token]) -> set[Token]:
        """These, and all that share a page with one of them."""
        if self.page_size == 1:
            return tokens
        pages = {(name, i - i % self.page_size) for name, i in tokens}
        ends = {name: self.length[name] for name, _ in pages}
        return {(name, i) for name, at in pages for i in range(at, min(at + self.page_size, ends[name]))}

    def slots(self, tokens: Iterable[Token]) -> int:
        """Of all the pages that these lie in."""
        return len({(name, i // self.page_size) for name, i in tokens}) * self.page_size

    def settle(self) -> Counter[Token]:
        """After any change: what is needed now. What is not, is dead and stays dead."""
        need = self.keepers()
        assert not need.keys() & self.dead, "somebody needs what is gone"
        self.dead |= {(name, i) for name, n in self.length.items() for i in range(n)} - need.keys()
        self.out &= {name for name, _ in need}
        return need

    @property
    def pinned(self) -> set[Name]:
        reads = (*self.running.values(), *self.rebuilding.values())
        return {name for read in reads for name, _ in read.sees}

    def repeatable(self, name: Name) -> bool:
        """Whether all that it saw is still there, or could be again."""
        return not self.saw[name] & self.dead

    def evictable(self, need: Iterable[Token]) -> set[Name]:
        names = {name for name, _ in need} - self.out - self.pinned
        return {name for name in names if self.repeatable(name)}

    def missing(self, names: Iterable[Name]) -> set[Name]:
        """All that must come back before these can be read."""
        found: set[Name] = set()
        todo = [name for name in names if name in self.out]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [needed for needed, _ in self.saw[name] if needed in self.out]
        return found

    # ------------------------------------------------------------ what happens

    def seal(self, name: Name, n: int) -> None:
        read = self.running.pop(name)
        self.length[name], self.saw[name] = n, read.sees
        self.states[name] = read.passes | {(name, i) for i in range(n)}

    def drop(self, name: Name) -> None:
        del self.states[name], self.leases[name]

    def clear(self) -> set[Name]:
        """Nothing is in memory any more, and nothing runs. Gives the states that are lost."""
        alive = {name for name, _ in self.keepers()}
        lost: set[Name] = set()
        for name in self.length:  # in the order in which they were made
            seen = {one for one, _ in self.saw[name]}
            if name in alive and (not self.repeatable(name) or seen & lost):
                lost.add(name)
        gone = {name for name, tokens in self.states.items() if any(one in lost for one, _ in tokens)}
        for name in gone:
            self.drop(name)
        self.out = alive - lost
        return gone
