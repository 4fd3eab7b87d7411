"""What is attended to: segments that requests see, at which shifts. Shared by the benchmark and the kernel tests.

Lengths only: slots are given in `placing.py`, and nothing is measured or computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple


class Seen(NamedTuple):
    """Tokens `start:stop` of a segment, as a request sees them."""

    segment: int
    start: int
    stop: int
    delta: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a request sees: its context in order, then `own` tokens of its own, of which the last `new` ask.

    A lane that is only there to fill the batch asks with one token and sees nothing: `Request((), 0)`.
    """

    context: tuple[Seen, ...]
    own: int
    new: int = 1

    def __post_init__(self) -> None:
        assert self.own >= self.new >= 1 or (not self.context and self.own == 0 and self.new == 1)

    @property
    def length(self) -> int:
        """Tokens that its last query sees."""
        return sum(seen.stop - seen.start for seen in self.context) + self.own


@dataclass(frozen=True, slots=True)
class Workload:
    """One step. segments: their lengths. page: slots that belong together in the pool."""

    name: str
    segments: tuple[int, ...]
    requests: tuple[Request, ...]
    page: int = 1

    @property
    def rows(self) -> int:
        return sum(request.new for request in self.requests)

    @property
    def union(self) -> int:
        """Tokens that somebody sees, each counted once."""
        seen: dict[int, set[int]] = {}
        for request in self.requests:
            for part in request.context:
                seen.setdefault(part.segment, set()).update(range(part.start, part.stop))
        return sum(map(len, seen.values())) + sum(request.own for request in self.requests)

    @property
    def read_by_each(self) -> int:
        """Tokens that are read if every request reads all that it sees."""
        return sum(request.length for request in self.requests)

    @property
    def unshifted(self) -> Workload:
        """The same with everything where it was computed: what kernels that cannot shift are given."""
        requests = tuple(
            replace(request, context=tuple(seen._replace(delta=0) for seen in request.context))
            for request in self.requests
        )
        return replace(self, requests=requests)


def fork(readers: int, shared: int, own: int) -> Workload:
    """`readers` requests over one context, most of them at shifts of their own."""
    dice = Random(0)
    deltas = [0 if dice.random() < 0.3 else dice.randint(-3000, 3000) for _ in range(readers)]
    requests = tuple(Request((Seen(0, 0, shared, delta),), own) for delta in deltas)
    return Workload(f"{readers} x {shared} + {own}", (shared,), requests)


def dag() -> Workload:
    """A root that all 16 see, 8 branches of which each is seen by 8 at different shifts, and 256 own tokens."""
    dice = Random(0)
    contexts = [[Seen(0, 0, 4096, 0)] for _ in range(16)]
    for branch in range(1, 9):
        for reader in sorted(dice.sample(range(16), 8)):
            contexts[reader].append(Seen(branch, 0, 2048, dice.randint(-16000, 16000)))
    return Workload("DAG", (4096, *[2048] * 8), tuple(Request(tuple(context), 256) for context in contexts))


def join(new: int, parts: int, length: int, *, shifts: bool) -> Workload:
    """A prompt of `new` tokens over a join of `parts` states, which were computed at one shift or at different ones."""
    context = tuple(Seen(part, 0, length, (part + 1) * -length if shifts else 0) for part in range(parts))
    how = "different" if shifts else "equal"
    return Workload(f"{new} over {parts} x {length}, {how} shifts", (length,) * parts, (Request(context, new, new),))


def decodes() -> tuple[Workload, ...]:
    forks = [(readers, 32768, 256) for readers in (1, 8, 16, 32, 64)]
    forks += [(16, 8192, 1024), (64, 4096, 512), (1, 131072, 256)]
    return (*(fork(*sizes) for sizes in forks), dag())


def prefills() -> tuple[Workload, ...]:
    return (join(4096, 8, 4096, shifts=False), join(4096, 8, 4096, shifts=True))


# Lengths at which kernels go wrong: nothing, one, and around every border of a tile.
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 333, 640, 1000)
FAR = 100_000


def drawn(seed: int, *, longest: int = 3001, most: int = 64) -> Workload:
    """A random step: of few or many requests, decoding or extending, that share much or nothing."""
    dice = Random(seed)
    lengths = [length for length in (*LENGTHS, 2048, 3001) if length <= longest]
    segments = tuple(dice.choice(lengths) for _ in range(dice.choice((1, 2, 5, 12))))
    shifts = [0, *(_shift(dice) for _ in range(dice.choice((0, 1, 5))))]
    """Few different ones, so that some readers agree."""
    extending = dice.random() < 0.4
    requests: list[Request] = []
    for _ in range(min(most, dice.choice((1, 2, 3, 7, 16, 17, 33, 64)))):
        if dice.random() < 0.05:
            requests.append(Request((), 0))
            continue
        chosen = dice.sample(range(len(segments)), dice.randint(0, len(segments)))
        context = tuple(_seen(dice, i, segments[i], dice.choice(shifts)) for i in sorted(chosen))
        new = dice.choice((1, 1, 2, 3, 16)) if extending else 1
        requests.append(Request(context, new + dice.choice((0, 0, 1, 62, 63, 64, 200)), new))
    return Workload(f"drawn {seed}", segments, tuple(requests), page=dice.choice((1, 16, 64)))


def _shift(dice: Random) -> int:
    return dice.choice((1, -1, FAR, -FAR, dice.randint(-300, 300), dice.randint(-FAR, FAR)))


def _seen(dice: Random, segment: int, length: int, delta: int) -> Seen:
    """All of it, or for one in four a part."""
    start, stop = sorted((dice.randint(0, length), dice.randint(0, length))) if dice.random() < 0.25 else (0, length)
    return Seen(segment, start, stop, delta)


def nasty() -> Iterator[Workload]:
    """What kernels are known to get wrong, one at a time."""
    yield Workload("one token", (), (Request((), 1),))
    yield Workload("nothing but empty lanes", (), (Request((), 0),) * 3)
    yield Workload("an empty lane between others", (70,), _around(Request((), 0), 70))
    yield Workload("an empty segment", (0, 65), (Request((Seen(0, 0, 0, 5), Seen(1, 0, 65, -7)), 1),) * 2)
    yield Workload("one token shared by all", (1,), tuple(Request((Seen(0, 0, 1, i),), 1) for i in range(20)))
    yield Workload("every border of a tile", LENGTHS, tuple(_one_each(LENGTHS)))
    yield Workload("200 segments", (3,) * 200, (Request(tuple(Seen(i, 0, 3, i - 100) for i in range(200)), 5),) * 2)
    yield Workload("200 segments of one shift", (3,) * 200, (Request(_chain(200, 3), 5), Request(_chain(200, 3), 9)))
    yield Workload("64 readers", (300,), tuple(Request((Seen(0, 0, 300, 7 * i),), 1 + i) for i in range(64)))
    yield Workload("65 readers at one place", (129,), tuple(Request((Seen(0, 0, 129, 0),), 1) for _ in range(65)))
    yield Workload("the farthest shifts", (100, 64), tuple(_far()))
    yield Workload("rewound", (500,), tuple(Request((Seen(0, 0, 500 - 31 * i, 0),), 3) for i in range(16)))
    yield Workload("parts that overlap", (500,), tuple(_overlapping()), page=16)
    yield Workload(
        "one segment twice, at two shifts", (77,), (Request((Seen(0, 0, 77, 0), Seen(0, 5, 70, 40)), 2),) * 3
    )
    yield Workload("an extend without context", (), (Request((), 100, 100),))
    yield Workload("extends over a shared context", (257,), tuple(_extends()))
    yield Workload("one long, many short", (3000, 5), (Request((Seen(0, 0, 3000, 9),), 1), *_short(40)))
    for page in (16, 64):
        yield Workload(f"unaligned tails, pages of {page}", (1, 65, 130), tuple(_one_each((1, 65, 130))), page=page)


def _around(middle: Request, length: int) -> tuple[Request, ...]:
    plain = Request((Seen(0, 0, length, 3),), 2)
    return (plain, middle, plain, middle)


def _one_each(lengths: tuple[int, ...]) -> Iterator[Request]:
    for segment, length in enumerate(lengths):
        yield Request((Seen(segment, 0, length, segment),), 1 + segment)


def _chain(parts: int, length: int) -> tuple[Seen, ...]:
    return tuple(Seen(i, 0, length, 0) for i in range(parts))


def _far() -> Iterator[Request]:
    for delta in (FAR, -FAR, FAR - 1, 1 - FAR, 0, 1, -1):
        yield Request((Seen(0, 0, 100, delta), Seen(1, 0, 64, -delta)), 4)


def _overlapping() -> Iterator[Request]:
    for i in range(12):
        yield Request((Seen(0, 20 * i, 500 - 11 * i, i % 3),), 1 + i)


def _extends() -> Iterator[Request]:
    for new in (1, 2, 15, 16, 17, 33):
        yield Request((Seen(0, 0, 257, new),), new + new % 3, new)


def _short(count: int) -> Iterator[Request]:
    for _ in range(count):
        yield Request((Seen(1, 0, 5, 0),), 1)
