"""Whose turn it is in the queue: start-time fair queueing over flows, so that one large fork delays nobody else much.

A flow is what is asked of one parent at once; a request without a parent is a flow of its own. Pure bookkeeping by
request id: it neither starts nor stops anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

FIRST = -1
"""The turn of what must not wait behind others."""


@dataclass(slots=True)
class FairQueue:
    """Each request gets a turn when it comes: one after the last of its flow, but never before the turn that is on.
    The turn that is on is the latest that was served, so nobody waits for ever."""

    now: int = 0
    _turns: dict[str, int] = field(default_factory=dict)
    _last: dict[Hashable, int] = field(default_factory=dict)

    def leave(self, request_id: str) -> None:
        """It goes without being served, so its turn is not the one that is on."""
        self._turns.pop(request_id, None)

    def order(self, queue: Sequence[tuple[str, Hashable, bool]]) -> list[int]:
        """The order in which to serve a queue of (request id, flow, whether it goes first), as indices into it."""
        # Who goes first was served since it was given a turn, and is back.
        waiting = {request_id for request_id, _, first in queue if not first}
        for request_id in [one for one in self._turns if one not in waiting]:
            self.now = max(self.now, self._turns.pop(request_id))
        self._last = {flow: turn for flow, turn in self._last.items() if turn > self.now}
        for request_id, flow, first in queue:
            if not first and request_id not in self._turns:
                self._turns[request_id] = self._last[flow] = max(self.now, self._last.get(flow, 0)) + 1
        return sorted(range(len(queue)), key=lambda i: self._turns.get(queue[i][0], FIRST))
