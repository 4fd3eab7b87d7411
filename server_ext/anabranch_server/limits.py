"""What the operator allows: the settings of the server, read from the environment once.

`anabranch serve --anabranch-NAME VALUE` sets them too. It enforces nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from anabranch_server.mappers import configured

PREFIX = "ANABRANCH_"
BASE = "base"
"""What the model without an adapter is called where adapters are named."""


@dataclass(frozen=True, slots=True)
class Limits:
    """0 means no limit. Times in seconds, sizes in tokens.

    default_lease: how long a state is kept after its last use if its maker does not say. max_lease: the longest lease
    that is given; who asks for more gets this. max_states, max_held_tokens: of one API key, in memory or not.
    max_unfinished: requests of one API key that are waiting or running. pinned_share: the share of the pool that
    states may occupy without being reclaimable; the rest is left to requests. evict: whether states may leave
    memory, to be computed again. api_keys_file: one `name key` a line; no other key is then let in.
    mappers: `name=kind:argument,...`, see `mappers.py`. adapter_reads: `reader:read,read;...`, see `declared_reads`.
    """

    default_lease: float = 3600.0
    max_lease: float = 86_400.0
    max_states: int = 65_536
    max_held_tokens: int = 0
    max_unfinished: int = 4096
    pinned_share: float = 0.9
    evict: bool = True
    api_keys_file: str = ""
    mappers: str = ""
    adapter_reads: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Limits:
        """Raises ValueError, naming the variable."""
        environ = os.environ if environ is None else environ
        given = {}
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            if name in environ:
                given[field.name] = _parsed(name, environ[name], type(getattr(cls(), field.name)))
        limits = cls(**given)
        if not 0 < limits.default_lease <= limits.max_lease:
            raise ValueError(f"{PREFIX}DEFAULT_LEASE must be over 0 and at most {PREFIX}MAX_LEASE")
        if not 0 < limits.pinned_share <= 1:
            raise ValueError(f"{PREFIX}PINNED_SHARE must be over 0 and at most 1")
        for name, parse in {"MAPPERS": configured, "ADAPTER_READS": declared_reads}.items():
            try:
                parse(getattr(limits, name.lower()))
            except ValueError as error:
                raise ValueError(f"{PREFIX}{name}: {error}") from None
        return limits


def declared_reads(text: str) -> frozenset[tuple[str | None, str | None]]:
    """Pairs (reader, read) of adapters' names; None is the model without one. `calm:base,bold;base:bold` lets requests
    under `calm` read states of the model itself and of `bold`, and those under no adapter states of `bold`.

    Raises ValueError. A name and itself are no pair: an adapter that was loaded again does not read what its
    predecessor of the same name computed.
    """
    found: set[tuple[str | None, str | None]] = set()
    for part in filter(None, map(str.strip, text.split(";"))):
        reader, _, read = part.partition(":")
        names = [name.strip() for name in (reader, *read.split(","))]
        if not all(names):
            raise ValueError(f"{part!r} is not reader:read or reader:read,read")
        if names[0] in names[1:]:
            raise ValueError(f"{part!r} names {names[0]!r} as its own reader, which reads its own states anyway")
        first, *rest = (None if name == BASE else name for name in names)
        found |= {(first, other) for other in rest}
    return frozenset(found)


def _parsed(name: str, text: str, kind: type) -> object:
    try:
        if kind is bool:
            return {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}[text.lower()]
        value = kind(text)
        if kind is not str and not value >= 0:
            raise ValueError
        return value
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {text!r}, which is not a {kind.__name__} of the right kind") from None
