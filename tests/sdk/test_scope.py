"""Scopes: what is made inside is released at the end, however it ends. Not what release means (test_state.py)."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

import anabranch
from anabranch import AsyncClient
from anabranch.testing import FakeServer


def held_ids(server: FakeServer) -> set[str]:
    return {state.request.id for state in server._held}


async def test_states_made_inside_are_released(client: AsyncClient, server: FakeServer):
    before = (await client.root("before").generate()).state
    async with client.scope():
        children = await client.root("a").fork(2)
        await asyncio.gather(*(child.generate("q") for child in children))
        async with client.root("streamed").stream() as s:
            await s.final()
        await before.generate("continues what was there")
        assert len(held_ids(server)) == 1 + 1 + 2 + 1 + 1
    assert held_ids(server) == {before.id}
    after = (await client.root("after").generate()).state
    assert held_ids(server) == {before.id, after.id}


async def test_keep(client: AsyncClient, server: FakeServer):
    async with client.scope() as scope:
        g = await client.root("a").generate()
        unsent = client.root("b")
        scope.keep(g.state, unsent)
        await unsent.fork()
        await client.root("c").generate()
    assert held_ids(server) == {g.state.id, unsent.id}


async def test_an_exception_releases_and_passes(client: AsyncClient, server: FakeServer):
    with pytest.raises(ZeroDivisionError):
        async with client.scope():
            await client.root("a").generate()
            raise ZeroDivisionError
    assert held_ids(server) == set()


@pytest.mark.parametrize("how", ["task", "anyio"])
async def test_cancellation_releases(client: AsyncClient, server: FakeServer, how: str):
    inside = asyncio.Event()

    async def work() -> None:
        async with client.scope():
            await client.root("a").generate()
            inside.set()
            await asyncio.sleep(60)

    if how == "task":
        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await inside.wait()
            group.cancel_scope.cancel()
    assert server._store.counts["created"] == 1 and held_ids(server) == set()


async def test_nested_scopes(client: AsyncClient, server: FakeServer):
    async with client.scope() as outer:
        a = (await client.root("a").generate()).state
        async with client.scope() as inner:
            b, c, _ = [(await client.root(text).generate()).state for text in "bcd"]
            inner.keep(b, c)
        assert held_ids(server) == {a.id, b.id, c.id}, "the inner scope releases what it alone owns"
        outer.keep(c)
        async with client.scope() as another:
            late = client.root("late")
            another.keep(late)
            await late.fork()
        assert held_ids(server) == {a.id, b.id, c.id, late.id}
    assert held_ids(server) == {c.id}


async def test_tasks_started_inside_belong_to_the_scope(client: AsyncClient, server: FakeServer):
    async def work() -> None:
        await client.root("a").generate()

    async with client.scope(), asyncio.TaskGroup() as group:
        group.create_task(work())
    assert held_ids(server) == set() and server._store.counts["created"] == 1


async def test_a_task_that_outlives_its_scope_falls_to_the_enclosing_one(client: AsyncClient, server: FakeServer):
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()
        await client.root("late").generate()

    async with client.scope():
        async with client.scope():
            task = asyncio.create_task(work())
        go.set()
        await task
        assert len(held_ids(server)) == 1
    assert held_ids(server) == set()


async def test_tasks_beside_the_scope_are_not_in_it(client: AsyncClient, server: FakeServer):
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()
        await client.root("beside").generate()

    task = asyncio.create_task(work())
    async with client.scope():
        go.set()
        await task
    assert len(held_ids(server)) == 1


async def test_the_scope_of_another_client_does_not_count(client: AsyncClient, server: FakeServer):
    other = FakeServer()
    async with other.client() as theirs, client.scope(), theirs.scope():
        await client.root("a").generate()
        await theirs.root("b").generate()
        assert len(held_ids(server)) == len(held_ids(other)) == 1
    assert held_ids(server) == held_ids(other) == set()


async def test_a_state_whose_answer_was_lost_is_released_too(held: Any):
    """The server may have finished it just before the cancellation reached it."""
    async with held.client() as client:
        async with client.scope():
            run = asyncio.create_task(client.root("a").generate())
            await held.until(1)
            body = held.generated[0]
            run.cancel()
            await asyncio.wait([run])
            held.requests.clear()
            held.gate.set()
            await FakeServer.request(held, "POST", "/anabranch/v1/generate", body)
            assert len(held_ids(held)) == 1
        assert held_ids(held) == set()


async def test_a_stream_that_was_left_early_is_released_too(client: AsyncClient, server: FakeServer):
    """The server may have finished before it noticed."""
    async with client.scope(), client.root("a").stream() as s:
        await anext(s)
    name = server.generated[0]["id"]
    assert server.requests[1:] == [("POST", "/anabranch/v1/states/release", {"ids": [name]})]


async def test_a_refused_state_is_not_released(client: AsyncClient, server: FakeServer):
    async with client.scope():
        server.fail_next("invalid_request")
        with pytest.raises(anabranch.InvalidRequestError):
            await client.root("a").generate()
    assert [request[0] for request in server.requests] == ["POST"]
    root = client.root("b")
    async with client.scope():
        server.fail_next("pool_exhausted")
        with pytest.raises(anabranch.PoolExhaustedError):
            await root.fork()
    await root.fork()  # it was not made inside, so it was not given up either


async def test_a_failing_release_is_told(client: AsyncClient, server: FakeServer):
    with pytest.raises(anabranch.InternalError):
        async with client.scope():
            await client.root("a").generate()
            server.fail_next("internal")
    with pytest.raises(ZeroDivisionError) as caught:
        async with client.scope():
            await client.root("a").generate()
            server.fail_next("internal")
            raise ZeroDivisionError
    assert "not all released" in caught.value.__notes__[0]


async def test_a_scope_is_entered_once(client: AsyncClient):
    scope = client.scope()
    async with scope:
        pass
    with pytest.raises(anabranch.InvalidRequestError, match="entered once"):
        async with scope:
            pass
