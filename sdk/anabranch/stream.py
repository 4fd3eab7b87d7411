"""A generation as it is made: events or text, the final result at any time, and a connection that is surely closed.

It knows no HTTP: events come parsed from the transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

from pydantic import ValidationError

from anabranch.errors import NOT_ANABRANCH, AnabranchError, APIConnectionError, InternalError, from_body, invalid
from anabranch.results import Generation
from anabranch.transport import Body, EventStream
from anabranch.wire import DeltaEvent, FinalEvent, GenerateResponse

S = TypeVar("S")
StreamEvent: TypeAlias = DeltaEvent | FinalEvent


class Stream(Generic[S]):
    """From `state.stream(...)`; use it with `async with`, which sends the request and, at the end, closes it.

    Iterate over it for events, or over `text()` for text; `final()` reads what is left. Leaving early cancels the
    generation on the server; with `keep_partial`, `final()` then gives what was generated so far, unless it was left
    by an exception. `cancel()` does both at once, also from another task. Errors are typed: on entering, or while
    reading; APIConnectionError if the stream ends without its final event.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[EventStream]],
        finished: Callable[[GenerateResponse], Generation[S]],
        cancel: Callable[[], Awaitable[None]],
        *,
        finish: bool = False,
    ) -> None:
        self._start = start
        self._finished = finished
        self._cancel = cancel
        self._finish = finish
        self._events: EventStream | None = None
        self._reading = asyncio.Lock()
        self._result: Generation[S] | None = None
        self._over = False

    async def __aenter__(self) -> Self:
        if self._events is not None or self._over:
            raise AnabranchError("a stream can be entered once", hint="state.stream(...) makes another")
        self._events = await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._finish and kind is None and not self._over:
                await self.cancel()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the connection. If the generation has not finished, the server cancels it."""
        self._over = True
        if self._events is not None:
            await self._events.aclose()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._events is None and not self._over:
            raise AnabranchError("the stream is not open", hint="use it with `async with`")
        async with self._reading:  # several tasks may read: each event goes to one of them
            if self._over or self._events is None:
                raise StopAsyncIteration
            try:
                event = await self._next(self._events)
            except AnabranchError:
                self._over = True
                raise
            if isinstance(event, FinalEvent):
                self._over = True
                self._result = self._finished(event.response)
            return event

    async def text(self) -> AsyncIterator[str]:
        """The text as it comes, in pieces that are not empty."""
        async for event in self:
            if isinstance(event, DeltaEvent) and event.text:
                yield event.text

    async def final(self) -> Generation[S]:
        """The whole result; reads the rest of the stream if it was not read yet."""
        async for _ in self:
            pass
        if self._result is None:
            raise AnabranchError("the stream was closed, or failed, before its result came")
        return self._result

    async def cancel(self) -> Generation[S]:
        """Stop the generation, and return what it came to: its `finish_reason` is "cancelled" unless it had ended.

        The result's state can be used if the stream was asked for with `keep_partial=True`, or had ended.
        """
        if self._events is not None and not self._over:
            await self._cancel()
        return await self.final()

    async def _next(self, events: EventStream) -> StreamEvent:
        async for event in events:
            known = _event(event)
            if known is not None:
                return known
        raise APIConnectionError("the stream ended before its final event", hint="the server may have stopped")


def _event(event: Body) -> StreamEvent | None:
    """None: a kind of event that a newer server sends. Raises the typed error of an error event."""
    try:
        match event.get("type"):
            case "delta":
                return DeltaEvent.model_validate(event)
            case "final":
                return FinalEvent.model_validate(event)
            case "error":
                raise from_body(event.get("error"))
            case _:
                return None
    except ValidationError as error:
        raise InternalError(f"an event is not as agreed: {invalid(error).message}", hint=NOT_ANABRANCH) from error
