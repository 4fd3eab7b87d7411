"""Generations that are cut short: by leaving a stream, by `cancel`, by somebody else; and what is left of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import anabranch
from anabranch import AsyncClient, Client, StateReleasedError
from anabranch.testing import FakeServer

GENERATE = "/anabranch/v1/generate"


async def test_cancel_returns_what_was_generated_so_far(client: AsyncClient, server: FakeServer):
    async with client.root("a").stream("b", keep_partial=True) as s:
        pieces = s.text()
        assert [await anext(pieces), await anext(pieces)] == ["one", " two"]
        g = await s.cancel()
        assert (g.text, g.finish_reason, len(g.tokens)) == ("one two", "cancelled", 2)
        assert await s.cancel() is g and await s.final() is g
        assert [piece async for piece in pieces] == []
    assert server.generated[-1]["keep_partial"] is True and server.cancelled == [g.state.id]
    assert [path for _, path, _ in server.requests].count(f"/anabranch/v1/states/{g.state.id}/cancel") == 1
    assert (await g.state.generate("on")).usage.context_tokens == 2 + 2


async def test_leaving_early_with_keep_partial_leaves_a_state(client: AsyncClient, server: FakeServer):
    async with client.root("a").stream(keep_partial=True) as s:
        async for _ in s.text():
            break
    g = await s.final()
    assert (g.text, g.finish_reason, g.state.standing) == ("one", "cancelled", "on server")
    assert (await client.state().artifact(g.state).generate("q")).usage.context_tokens == 1


async def test_without_keep_partial_there_is_no_state(client: AsyncClient, server: FakeServer):
    async with client.root("a").stream() as s:
        await anext(s)
        g = await s.cancel()
    assert (g.text, g.finish_reason, g.state.standing) == ("one", "cancelled", "released")
    with pytest.raises(StateReleasedError):
        await g.state.generate("b")
    assert await client.states() == ()


async def test_an_exception_inside_leaves_by_closing(client: AsyncClient, server: FakeServer):
    """No request holds the exception up, and no partial result hides it; the server keeps the state for one lease."""
    with pytest.raises(ZeroDivisionError):
        async with client.root("a").stream(keep_partial=True) as s:
            await anext(s)
            raise ZeroDivisionError
    assert len(server.requests) == 1 and len(server.cancelled) == 1
    with pytest.raises(anabranch.AnabranchError, match="before its result"):
        await s.final()
    assert [info.generated_tokens for info in await client.states()] == [1]


async def test_cancelling_what_has_ended_changes_nothing(client: AsyncClient, server: FakeServer):
    async with client.root("a").stream(keep_partial=True) as s:
        await s.final()
        g = await s.cancel()
    assert g.finish_reason == "stop" and len(server.requests) == 1
    async with client.root("a").stream(keep=False) as s:
        server.fail_next("state_not_found")  # it ended, and was not kept, just before the cancel arrived
        assert (await s.cancel()).text == "one two three four"


async def test_a_cancel_that_fails_is_told(client: AsyncClient, server: FakeServer):
    with pytest.raises(anabranch.InternalError):
        async with client.root("a").stream(keep_partial=True):
            server.fail_next("internal")
    assert len(server.cancelled) == 1, "it was closed all the same"


async def test_another_task_may_cancel(server: FakeServer):
    """A stop button: one task reads, another cancels."""
    go = asyncio.Event()
    original = server.stream

    async def stream(path: str, body: Any, *, timeout: float | None = None) -> Any:
        inner = await original(path, body)

        class Slow:
            def __aiter__(self) -> Slow:
                return self

            async def __anext__(self) -> Any:
                if server.requests[-1][1].endswith("cancel"):
                    go.set()
                event = await anext(inner)
                if event.get("text") == " two":
                    await go.wait()
                return event

            aclose = inner.aclose

        return Slow()

    server.stream = stream  # type: ignore[method-assign]
    async with server.client() as client:
        seen: list[str] = []

        async def reads() -> None:
            async for piece in s.text():
                seen.append(piece)

        async with client.root("a").stream(keep_partial=True) as s:
            reader = asyncio.create_task(reads())
            for _ in range(20):
                await asyncio.sleep(0)
            stopping = asyncio.create_task(s.cancel())
            for _ in range(20):
                await asyncio.sleep(0)
            go.set()
            g = await stopping
            await reader
    assert g.finish_reason == "cancelled" and g.text == "".join(seen) == "one two"


async def test_cancelled_by_somebody_else(server: FakeServer):
    class Cancelling(FakeServer):
        """As if an operator cancelled every generation after its first token."""

        def _spoken(self, state: Any) -> Any:
            words, finish = super()._spoken(state)
            return (words[:1], "cancelled") if words else (words, finish)

    for keep_partial in (False, True):
        async with Cancelling("one two").client() as client:
            g = await client.root("a").generate(keep_partial=keep_partial)
            assert (g.text, g.finish_reason) == ("one", "cancelled")
            assert g.state.standing == ("on server" if keep_partial else "released")


def test_the_synchronous_client(server: FakeServer):
    with Client(transport=server) as client:
        with client.root("a").stream(keep_partial=True) as s:
            next(s.text())
        assert s.final().text == "one" and s.final().state.generate("b").usage.context_tokens == 1 + 1
        with client.root("a").stream(keep_partial=True) as s:
            next(iter(s))
            assert s.cancel().finish_reason == "cancelled"
        with pytest.raises(ZeroDivisionError), client.root("a").stream(keep_partial=True) as s:
            raise ZeroDivisionError
        assert client.root("a").generate(keep_partial=True).finish_reason == "stop"
    assert len(server.cancelled) == 3
