"""Grouping: which tokens of a step are seen by the same readers, and where sharing pays. It looks at contexts only.

It knows neither how many own tokens there are nor any bin. `csrc/grouping.h` does the same fast, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from anabranch_kernels.tasks import Layout

TASK_TOKENS = 64
"""What a task costs besides its tokens, in tokens: starting it, and as much again for the partial results of a full
task (its 64 query rows of head_dim 16-bit numbers, written and read back, are the bytes of 64 tokens)."""


class Interval(NamedTuple):
    key: int
    start: int
    stop: int
    delta: int
    at: int
    """Where it begins in the context."""


class Context(NamedTuple):
    """What a row was set to. Intervals without tokens are left out."""

    intervals: tuple[Interval, ...] = ()
    length: int = 0
    version: int = 0


class Member(NamedTuple):
    """All new tokens of one request, looking at one delta. Deltas are numbered in order of use, 0 is number 0."""

    request: int
    delta_number: int
    delta: int


class Entry(NamedTuple):
    """An interval as one request of the step sees it."""

    interval: Interval
    member: Member


class Request(NamedTuple):
    index: int
    row: int
    context: Context
    first_query: int
    n_new: int


@dataclass(slots=True)
class Part:
    """Tokens of one key that no interval of the step divides. `entries` cover it, by number."""

    start: int
    stop: int
    entries: list[int]
    shared: SharedRun | None = None


@dataclass(slots=True)
class SharedRun:
    """All parts that the same members see."""

    members: tuple[Member, ...]
    tokens: int = 0
    dissolved: bool = False


@dataclass(slots=True)
class Run:
    """readers: (query row, delta) each. copies: [from, length]. own: the request whose own tokens end it; if `joined`,
    they follow the last copy's source without a gap."""

    readers: list[tuple[int, int]]
    copies: list[list[int]] = field(default_factory=list)
    own: Request | None = None
    joined: bool = False

    @property
    def context_tokens(self) -> int:
        return sum(length for _, length in self.copies)


def overhead(readers: int, layout: Layout) -> int:
    """What tasks of so many readers in all cost besides their tokens."""
    return TASK_TOKENS * groups(readers, layout) + TASK_TOKENS * readers // layout.readers_per_task


def groups(readers: int, layout: Layout) -> int:
    return -(-readers // layout.readers_per_task)


def grouped(requests: Sequence[Request], layout: Layout, table_width: int, *, sharing: bool) -> list[Run]:
    """The runs of a step, in the order of the line: most readers first, then in order of first use."""
    entries: list[Entry] = []
    for request in requests:
        numbers = {0: 0}
        for interval in request.context.intervals:
            number = numbers.setdefault(interval.delta, len(numbers))
            entries.append(Entry(interval, Member(request.index, number, interval.delta)))
    covering = _divided(entries, sharing)
    _share(covering, entries, {request.index: request.n_new for request in requests}, layout)

    runs: dict[tuple[Member, ...], Run] = {}
    by_index = {request.index: request for request in requests}

    def run_of(members: tuple[Member, ...]) -> Run:
        if members not in runs:
            readers = [
                (by_index[index].first_query + new_token, delta)
                for index, _, delta in members
                for new_token in range(by_index[index].n_new)
            ]
            runs[members] = Run(readers)
        return runs[members]

    def copy(run: Run, source: int, length: int) -> None:
        if run.copies and sum(run.copies[-1]) == source:
            run.copies[-1][1] += length
        else:
            run.copies.append([source, length])

    at = 0
    for request in requests:
        for number in range(at, at + len(request.context.intervals)):
            interval, member = entries[number]
            for part in covering[number]:
                source = request.row * table_width + interval.at + part.start - interval.start
                if part.shared is None or part.shared.dissolved:
                    copy(run_of((member,)), source, part.stop - part.start)
                elif part.entries[0] == number:
                    copy(run_of(part.shared.members), source, part.stop - part.start)
        at += len(request.context.intervals)
        run = run_of((Member(request.index, 0, 0),))
        run.own = request
        run.joined = bool(run.copies) and sum(run.copies[-1]) == request.row * table_width + request.context.length
    return sorted(runs.values(), key=lambda run: -len(run.readers))


def _divided(entries: Sequence[Entry], sharing: bool) -> list[list[Part]]:
    """The parts of each entry, in order. Without sharing each entry is one part of its own."""
    if not sharing:
        return [[Part(interval.start, interval.stop, [number])] for number, (interval, _) in enumerate(entries)]
    by_key: dict[int, list[int]] = defaultdict(list)
    for number, (interval, _) in enumerate(entries):
        by_key[interval.key].append(number)
    covering: list[list[Part]] = [[] for _ in entries]
    for numbers in by_key.values():
        ends = sorted({end for number in numbers for end in entries[number].interval[1:3]})
        for start, stop in pairwise(ends):
            part = Part(start, stop, [n for n in numbers if entries[n].interval[1] <= start < entries[n].interval[2]])
            for number in part.entries:
                covering[number].append(part)
    return covering


def _share(covering: Sequence[Sequence[Part]], entries: Sequence[Entry], n_new: dict[int, int], layout: Layout) -> None:
    """Give parts that several see their shared run, and dissolve the runs that do not pay, shortest first.

    Shared, a run is read once for each group of readers, but is tasks of its own. Dissolved, its parts are read once
    more by each member, in a private run, which costs a task only where the member had none at that delta.
    """
    private = {Member(index, 0, 0) for index in n_new}
    shared: dict[tuple[Member, ...], SharedRun] = {}
    for number, parts in enumerate(covering):
        for part in parts:
            if part.entries[0] != number:
                continue
            members = tuple(sorted(entries[n].member for n in part.entries))
            if len(members) == 1:
                private.add(members[0])
            else:
                part.shared = shared.setdefault(members, SharedRun(members))
                part.shared.tokens += part.stop - part.start
    for run in sorted(shared.values(), key=lambda run: run.tokens):
        readers = sum(n_new[member.request] for member in run.members)
        together = groups(readers, layout) * run.tokens + overhead(readers, layout)
        apart = 0
        for member in run.members:
            rows = n_new[member.request]
            apart += groups(rows, layout) * run.tokens + (0 if member in private else overhead(rows, layout))
        run.dissolved = apart < together
        if run.dissolved:
            private.update(run.members)
