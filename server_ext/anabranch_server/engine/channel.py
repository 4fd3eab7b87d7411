"""The control channel: questions from the HTTP process to the scheduler, answered between two steps.

One message and one reply, both carrying JSON, so that either of SGLang's IPC formats takes them. What is asked is
`control.py`'s business.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, TypeAlias

from sglang.srt.managers.io_struct import BaseReq

from anabranch import wire
from anabranch_server.errors import Refusal

logger = logging.getLogger(__name__)
NAME = "anabranch_control"
TOGETHER = 256
"""Most questions in one message."""


class ControlRequest(BaseReq, kw_only=True):
    body: str
    """JSON: a list of [operation, arguments]."""


class ControlReply(BaseReq, kw_only=True):
    body: str
    """JSON: for each, [whether it was answered, the answer or an ErrorBody]."""


Asked: TypeAlias = tuple[str, dict[str, Any], "asyncio.Future[Any]"]


class Channel:
    """Asks one scheduler. What is asked while an answer is awaited goes out together: a step answers all of it.

    SGLang gives replies to whoever waits, in order; so only one task of our own ever waits, and nobody can cancel it.
    """

    def __init__(self, manager: Any):
        self._manager = manager
        self._asked: list[Asked] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, op: str, arguments: dict[str, Any]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append((op, arguments, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        while self._asked:
            asked, self._asked = self._asked[:TOGETHER], self._asked[TOGETHER:]
            try:
                body = json.dumps([(op, arguments) for op, arguments, _ in asked])
                self._manager.auto_create_handle_loop()
                reply = (await getattr(self._manager, f"{NAME}_communicator")(ControlRequest(body=body)))[0]
                answers = json.loads(reply.body)
            except Exception as error:
                logger.exception("the scheduler could not be asked")
                failure = wire.ErrorBody(code="internal", message=f"the scheduler could not be asked: {error}")
                answers = [(False, failure)] * len(asked)
            for (_, _, future), (ok, answer) in zip(asked, answers, strict=True):
                if future.cancelled():
                    continue
                if ok:
                    future.set_result(answer)
                else:
                    future.set_exception(Refusal.of(wire.ErrorBody.model_validate(answer)))


_channels: dict[int, Channel] = {}


async def ask(manager: Any, op: str, **arguments: Any) -> Any:
    """Ask the scheduler behind a tokenizer manager; returns the decoded answer, or raises Refusal."""
    channel = _channels.setdefault(id(manager), Channel(manager))
    return await channel.ask(op, arguments)
