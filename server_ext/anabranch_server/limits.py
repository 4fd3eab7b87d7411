"""What the operator allows: the settings of the server, read from the environment once.

`anabranch serve --anabranch-NAME VALUE` sets them too. It enforces nothing itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

PREFIX = "ANABRANCH_"


@dataclass(frozen=True, slots=True)
class Limits:
    """0 means no limit. Times in seconds, sizes in tokens.

    default_lease: how long a state is kept after its last use if its maker does not say. max_lease: the longest lease
    that is given; who asks for more gets this. max_states, max_held_tokens: of one API key, in memory or not.
    max_unfinished: requests of one API key that are waiting or running. pinned_share: the share of the pool that
    states may occupy without being reclaimable; the rest is left to requests. evict: whether states may leave
    memory, to be computed again. api_keys_file: one `name key` a line; no other key is then let in.
    """

    default_lease: float = 3600.0
    max_lease: float = 86_400.0
    max_states: int = 65_536
    max_held_tokens: int = 0
    max_unfinished: int = 4096
    pinned_share: float = 0.9
    evict: bool = True
    api_keys_file: str = ""

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
        return limits


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
