"""Streams, from events to the final result and early exit. Not their bytes (test_transport.py, test_sse.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import anabranch
from anabranch import APIConnectionError, AsyncClient, PoolExhaustedError
from anabranch.testing import FakeServer
from anabranch.transport import Body
from anabranch.wire import DeltaEvent, FinalEvent


async def test_events(client: AsyncClient, server: FakeServer):
    async with client.root("a").stream("b") as s:
        events = [event async for event in s]
    assert server.generated[-1]["stream"] is True
    assert [type(event) for event in events] == [DeltaEvent] * 4 + [FinalEvent]
    g = await s.final()
    assert g.text == "one two three four" and g.state.standing == "on server"
    assert (await g.state.generate("c")).usage.context_tokens == 2 + 4
    assert server.cancelled == []


async def test_text_and_final_at_any_time(client: AsyncClient):
    async with client.root("a").stream() as s:
        pieces = s.text()
        assert [await anext(pieces), await anext(pieces)] == ["one", " two"]
        g = await s.final()
        assert g.text == "one two three four" and await s.final() is g
        assert [piece async for piece in pieces] == []


async def test_leaving_early_closes(client: AsyncClient, server: FakeServer):
    async with client.root("a").stream() as s:
        async for _ in s.text():
            break
    (cancelled,) = server.cancelled
    assert cancelled == server.generated[-1]["id"] and server._store.states == {}
    with pytest.raises(anabranch.AnabranchError, match="before its result"):
        await s.final()
    assert [event async for event in s] == []


async def test_an_exception_inside_closes(client: AsyncClient, server: FakeServer):
    with pytest.raises(ZeroDivisionError):
        async with client.root("a").stream():
            raise ZeroDivisionError
    assert len(server.cancelled) == 1


async def test_nothing_is_sent_before_it_is_entered(client: AsyncClient, server: FakeServer):
    s = client.root("a").stream()
    assert server.requests == []
    with pytest.raises(anabranch.AnabranchError, match="not open"):
        await s.final()
    with pytest.raises(anabranch.InvalidRequestError):
        client.state().stream()


async def test_errors_before_the_first_event(client: AsyncClient, server: FakeServer):
    server.fail_next("pool_exhausted", retry_after=2)
    with pytest.raises(PoolExhaustedError) as caught:
        async with client.root("a").stream():
            pass
    assert caught.value.retry_after == 2


async def test_a_stream_is_entered_once(client: AsyncClient, server: FakeServer):
    s = client.root("a").stream()
    async with s:
        pass
    with pytest.raises(anabranch.AnabranchError, match="entered once"):
        async with s:
            pass
    assert len(server.requests) == 1


class Scripted(FakeServer):
    """Streams these events, whatever is asked."""

    def __init__(self, *events: Body) -> None:
        super().__init__()
        self.events = events
        self.closed = 0

    async def stream(self, path: str, body: Body, *, timeout: float | None = None) -> Any:
        server = self

        class Events:
            def __init__(self) -> None:
                self._left = iter(server.events)

            def __aiter__(self) -> AsyncIterator[Body]:
                return self

            async def __anext__(self) -> Body:
                for event in self._left:
                    return event
                raise StopAsyncIteration

            async def aclose(self) -> None:
                server.closed += 1

        return Events()


FINAL = {
    "type": "final",
    "response": {
        "id": "0" * 32,
        "text": "hi",
        "tokens": [1],
        "finish_reason": "stop",
        "usage": {"context_tokens": 0, "reused_tokens": 0, "computed_tokens": 1, "generated_tokens": 1},
        "timings": {},
    },
}
DELTA = {"type": "delta", "text": "hi", "tokens": [1]}


async def collect(server: Scripted) -> list[str]:
    got: list[str] = []
    async with server.client() as client, client.root("a").stream() as s:
        try:
            async for piece in s.text():
                got.append(piece)
        finally:
            # A failed stream stays failed: no second reading makes it look complete.
            with pytest.raises(anabranch.AnabranchError):
                await s.final()
    return got


async def test_an_error_event_is_its_typed_error():
    body = {"code": "pool_exhausted", "message": "full", "hint": "release", "request_id": "r1", "new": 1}
    server = Scripted(DELTA, {"type": "error", "error": body}, FINAL)
    with pytest.raises(PoolExhaustedError, match="full") as caught:
        await collect(server)
    error = caught.value
    assert (error.status, error.hint, error.request_id, server.closed) == (503, "release", "r1", 1)


async def test_an_error_event_with_an_unknown_code():
    with pytest.raises(anabranch.InternalError, match="code moon_phase"):
        await collect(Scripted({"type": "error", "error": {"code": "moon_phase", "message": "no"}}))


async def test_an_end_without_a_final_event():
    server = Scripted(DELTA)
    with pytest.raises(APIConnectionError, match="final event"):
        await collect(server)
    assert server.closed == 1


async def test_unknown_events_are_skipped_and_bad_ones_refused():
    with pytest.raises(anabranch.InternalError, match="not as agreed"):
        await collect(Scripted({"type": "progress"}, {"type": "delta", "text": 3}))
