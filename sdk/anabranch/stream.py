"""A generation as it is made: events or text, the final result at any time, and a connection that is surely closed.

It knows no HTTP: events come parsed from the transport.
"""

from __future__ import annotations

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
    generation on the server. Errors are typed: on entering, or while reading; APIConnectionError if the stream ends
    without its final event.
    """

    def __init__(
        self, start: Callable[[], Awaitable[EventStream]], finished: Callable[[GenerateResponse], Generation[S]]
    ) -> None:
        self._start = start
        self._finished = finished
        self._events: EventStream | None = None
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
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection. If the generation has not finished, the server cancels it."""
        self._over = True
        if self._events is not None:
            await self._events.aclose()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._over:
            raise StopAsyncIteration
        if self._events is None:
            raise AnabranchError("the stream is not open", hint="use it with `async with`")
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
