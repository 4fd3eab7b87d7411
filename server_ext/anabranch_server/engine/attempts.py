"""Generations under way and just finished, by tenant and state id: a repeated request joins the first.

A generation belongs to nobody's connection: it ends early when nobody is attached any more. What it is and does is
`generation.py`'s business.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

from anabranch import wire
from anabranch_server.errors import Refusal

Event: TypeAlias = wire.DeltaEvent | wire.FinalEvent
Key: TypeAlias = tuple[str, str]
"""(tenant, state id)."""
REMEMBERED_BYTES = 64 * 2**20


@dataclass(slots=True, eq=False)
class Attempt:
    """One generation: `source` yields its events, `cancel` asks SGLang for its end. Where SGLang does not have it yet,
    `source` has to look whether it is `ending`."""

    body: bytes
    source: Callable[[Attempt], AsyncIterator[Event]]
    cancel: Callable[[], None]
    events: list[Event] = field(default_factory=list)
    error: BaseException | None = None
    attached: int = 0
    ending: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            async for event in self.source(self):
                self.events.append(event)
                self._wake()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.over.set()
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        """Nobody wants the rest."""
        self.ending = True
        self.cancel()

    async def follow(self) -> AsyncGenerator[Event, None]:
        """All events from the first on. When the last follower leaves early, the generation is asked to end."""
        self.attached += 1
        at = 0
        try:
            while True:
                news, over = self._news, self.over.is_set()
                while at < len(self.events):
                    yield self.events[at]
                    at += 1
                if over:
                    break
                await news.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.attached -= 1
            if not self.attached and not self.over.is_set():
                self.end()


@dataclass(slots=True)
class Attempts:
    """Of one HTTP process. Finished ones are remembered as long as their answers fit, and their states `exist` (which
    raises Refusal for one that was released; who gets a state again has it for as long as who got it first)."""

    exist: Callable[[Key], Awaitable[bool]]
    _running: dict[Key, Attempt] = field(default_factory=dict)
    _finished: OrderedDict[Key, tuple[bytes, bytes]] = field(default_factory=OrderedDict)
    _bytes: int = 0

    async def join(
        self, key: Key, asked: wire.GenerateRequest, start: Callable[[], Attempt]
    ) -> AsyncGenerator[Event, None]:
        """Follow the generation that `asked` began, or begin it. Raises Refusal if the id was used for another."""
        body = fingerprint(asked)
        while (attempt := self._running.get(key)) is not None:
            self._check_same(key, attempt.body, body)
            if not attempt.ending:
                break
            await attempt.over.wait()
        if attempt is None and key in self._finished:
            known, answer = self._finished[key]
            response = wire.GenerateResponse.model_validate_json(answer)
            if not response.kept or await self.exist(key):
                self._check_same(key, known, body)
                yield wire.FinalEvent(response=response)
                return
            self.forget(key)
            attempt = self._running.get(key)
        if attempt is None:
            attempt = self._running[key] = start()
            attempt.task = asyncio.create_task(self._run(key, attempt))
        async with aclosing(attempt.follow()) as events:
            async for event in events:
                yield event

    async def _run(self, key: Key, attempt: Attempt) -> None:
        try:
            await attempt.run()
        finally:
            del self._running[key]
            last = attempt.events[-1] if attempt.events else None
            # What was cancelled and left nothing may be asked again.
            if isinstance(last, wire.FinalEvent) and (last.response.kept or last.response.finish_reason != "cancelled"):
                self._remember(key, attempt.body, last.response.model_dump_json().encode())

    def end(self, key: Key) -> bool:
        """Ask for the end of a generation; whether it is one of ours."""
        attempt = self._running.get(key)
        if attempt is not None:
            attempt.end()
        return attempt is not None

    def forget(self, key: Key) -> None:
        """The state is gone: to ask for it again is to make it again, or to be told so."""
        _, answer = self._finished.pop(key, (b"", b""))
        self._bytes -= len(answer)

    def _remember(self, key: Key, body: bytes, answer: bytes) -> None:
        self.forget(key)
        self._finished[key] = (body, answer)
        self._bytes += len(answer)
        while self._bytes > REMEMBERED_BYTES:
            self.forget(next(iter(self._finished)))

    def _check_same(self, key: Key, first: bytes, second: bytes) -> None:
        if first != second:
            raise Refusal(
                "invalid_request",
                f"the id {key[1]} is already in use, for another request",
                hint="every generate makes a new state and needs a fresh random id",
                param="id",
            )


def fingerprint(asked: wire.GenerateRequest) -> bytes:
    """What makes two requests the same: everything but whether they are streamed."""
    return blake2b(asked.model_dump_json(exclude={"stream"}).encode(), digest_size=16).digest()
