"""The heartbeat of a client: what it holds on the server is renewed before its lease runs out.

It makes nothing again that is lost already (`rebuild.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context
from typing import TYPE_CHECKING

from anabranch.errors import AnabranchError
from anabranch.graph import Node
from anabranch.standing import Standing
from anabranch.wire import MAX_IDS, Renewal, RenewRequest

if TYPE_CHECKING:
    from anabranch.session import Session

BEATS = 3
"""Renewals per lease, so that one or two may fail."""
RENEW_TIMEOUT = 10.0
"""Seconds; a renewal that hangs must not use up the time for the next one."""

log = logging.getLogger("anabranch")


class Heartbeat:
    """Calls `renew(timeout)` every third of `lease` (seconds), from `start` until it says that nothing is held.

    A renewal that fails is logged, once until one succeeds, and tried again at the next beat. `sleep` is the clock.
    """

    def __init__(
        self,
        renew: Callable[[float], Awaitable[bool]],
        lease: float,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._renew = renew
        self._pause = lease / BEATS
        self._sleep = sleep
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Beat from now on, if it does not already."""
        if self._task is None or self._task.done():
            # An empty context: that of the caller would keep its scope, and so its states, alive.
            self._task = asyncio.create_task(self._beat(), name="anabranch heartbeat", context=Context())

    async def stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _beat(self) -> None:
        failing = False
        while True:
            await self._sleep(self._pause)
            try:
                if not await self._renew(min(self._pause, RENEW_TIMEOUT)):
                    return
                failing = False
            except AnabranchError as error:
                if not failing:
                    log.warning("the leases of this client's states could not be renewed: %s", error)
                failing = True


async def renew_held(session: Session, timeout: float) -> bool:
    """Renew all states that the client holds: those on the server that somebody can still name. False: there are none.

    One that turns out to be lost makes no noise here: its next use does.
    """
    held = [node for node in session.nodes if session.record(node).standing is Standing.ON_SERVER]
    if held:
        await renew(session, held, timeout=timeout)
    return bool(held)


async def renew(session: Session, nodes: Iterable[Node], *, timeout: float | None = None) -> None:
    """Begin the leases of states that are on the server anew, and learn which of them are lost."""
    asked = [(node, session.record(node).made) for node in nodes]
    for first in range(0, len(asked), MAX_IDS):
        some = asked[first : first + MAX_IDS]
        request = RenewRequest(ids=tuple(node.id for node, _ in some))
        lost = set((await session.post("states/renew", request, Renewal, timeout=timeout)).lost)
        for node, made in some:
            record = session.record(node)
            if record.made == made and record.standing in (Standing.ON_SERVER, Standing.LOST):
                record.standing = Standing.LOST if node.id in lost else Standing.ON_SERVER
