"""What a client knows about one of its states. Not what is so: the server may have lost it meanwhile.

It sends nothing, and changes nothing by itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum

from anabranch import wire


class Standing(Enum):
    """Where a state stands, as far as this client knows."""

    LOCAL = "local"
    UNCERTAIN = "uncertain"
    """A request for it was sent and not answered, or not yet."""
    ON_SERVER = "on server"
    LOST = "lost"
    """It was on the server and is not any more: its lease ran out, or the server was restarted."""
    RELEASED = "released"


@dataclass(slots=True)
class Record:
    """What the client knows about one node. `making` is the task that computes it on the server, if one runs.

    `response` has what it generated. `made` counts how often it was made: older news about it is no news. `lease` is
    the one that it was given by itself, in seconds.
    """

    standing: Standing = Standing.LOCAL
    making: asyncio.Task[None] | None = None
    response: wire.GenerateResponse | None = None
    made: int = 0
    lease: float | None = None
