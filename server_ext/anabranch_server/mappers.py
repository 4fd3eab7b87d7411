"""Cache mappers as the core knows them: their names, how the operator configures them, the segments that come of them.

What a mapper does to keys and values is not here: `engine/mapping.py` builds and runs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from anabranch import wire
from anabranch_server.errors import Refusal
from anabranch_server.holdings import Holdings
from anabranch_server.segments import JOINT, Cover, Interval, Segment, seen

IDENTITY = "identity"
"""The mapper that is always there, and changes nothing."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Configured(NamedTuple):
    """What a name stands for: a kind of mapper, and what it is made with."""

    kind: str
    argument: str | None = None


def configured(text: str) -> dict[str, Configured]:
    """By name: `short=low_rank:/path/file.safetensors,other=kind`, and `identity`. Raises ValueError."""
    found: dict[str, Configured] = {IDENTITY: Configured(IDENTITY)}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, made_of = map(str.strip, part.partition("="))
        kind, colon, argument = made_of.partition(":")
        if not _NAME.fullmatch(name) or not kind:
            raise ValueError(f"{part!r} is not name=kind or name=kind:argument, with a name of letters, digits and _.-")
        if name in found:
            raise ValueError(f"the name {name!r} is taken")
        found[name] = Configured(kind, argument if colon else None)
    return found


def check_names(refs: Iterable[wire.Ref], known: Collection[str], param: str = "refs") -> None:
    """Raise Refusal if a reference names a mapper that this server has not."""
    for i, ref in enumerate(refs):
        if ref.mapper is not None and ref.mapper not in known:
            raise Refusal(
                "invalid_request",
                f"there is no mapper {ref.mapper!r}",
                hint=f"this server has {', '.join(sorted(known)) or 'none'}",
                param=f"{param}.{i}.mapper",
            )


# ---------------------------------------------------------------- derived segments


@dataclass(slots=True)
class Derivation:
    """The derived segments of one compile. What is kept already is taken; what is missing is made, out of memory, for
    `StateStore.open` to adopt. If that never happens, nothing is left of it."""

    holdings: Holdings
    _made: dict[tuple[Segment, str], Segment] = field(default_factory=dict)

    def __call__(self, interval: Interval, mapper: str) -> Segment:
        """The segment in which `interval` is found as `mapper` makes it, token by token under the same numbers."""
        source = interval.segment
        name = f"{source.id}{JOINT}{mapper}"
        for known in self.holdings.named(source.owner, name):
            if known.stamp == source.stamp and self.holdings.keeps(replace(interval, segment=known)):
                return known
        made = self._made.get((source, mapper))
        if made is None:
            known = None if source.context is None else seen(source.context)
            made = Segment(
                name,
                source.start,
                source.tokens,
                None,
                stamp=source.stamp,
                owner=source.owner,
                mapper=mapper,
                origin=known if source.mapper is None else source.origin,
            )
            self._made[source, mapper] = made
        made.context = (*(made.context or ()), *_beyond(made.context or (), interval))
        return made


def mapped(intervals: Sequence[Interval], mapper: str, derive: Callable[[Interval, str], Segment]) -> list[Interval]:
    """What one reference selects, as `mapper` makes it. Positions and order stay."""
    return [replace(one, segment=derive(one, mapper)) for one in intervals if len(one)]


def origin(segment: Segment) -> tuple[str, str | None]:
    """The state whose tokens these are, and the mappers through which they are seen, the first applied first."""
    state, _, mappers = segment.id.partition(JOINT)
    return state, mappers or None


def _beyond(context: Iterable[Interval], interval: Interval) -> list[Interval]:
    """The parts of `interval` that are not in `context`; where the source's keys were computed, not where one sees
    them."""
    known = Cover()
    for one in context:
        known.add(one)
    plain = Interval(interval.segment, interval.start, interval.stop)
    return [part for part, inside in known.split(plain) if not inside]
