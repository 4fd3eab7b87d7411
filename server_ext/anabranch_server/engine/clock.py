"""Time, told to the scheduler: once a second, from the one process that all ranks hear the same messages of.

No rank looks at a clock of its own to end a lease. The answers are what the metrics show.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from anabranch import wire
from anabranch_server.engine import metrics
from anabranch_server.engine.channel import ask

logger = logging.getLogger(__name__)
TICK = 1.0
_tasks: dict[int, asyncio.Task[None]] = {}


def keep_time(manager: Any) -> None:
    """Tell the time from now on, which is 0; a second call does nothing."""
    if id(manager) not in _tasks:
        _tasks[id(manager)] = asyncio.get_running_loop().create_task(_tick(manager, time.monotonic()))


async def _tick(manager: Any, began: float) -> None:
    while True:
        try:
            found = await ask(manager, "tick", now=time.monotonic() - began, counted=metrics.wanted())
            if found:
                metrics.show(wire.Stats.model_validate(found))
        except Exception:  # a missed beat must not end time
            logger.exception("the scheduler could not be told the time")
        await asyncio.sleep(TICK)
