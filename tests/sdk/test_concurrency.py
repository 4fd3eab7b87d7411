"""Many tasks on one graph: each state is made once, whoever is cancelled or fails. Not threads (test_sync.py)."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import anabranch
from anabranch import APIConnectionError, InternalError, PoolExhaustedError, StateReleasedError
from anabranch.testing import FakeServer


async def test_eight_children_share_one_parent(server: FakeServer):
    async with server.client() as client:
        children = await client.root("a long document").fork(8)
        done = await asyncio.gather(*(child.generate(f"question {i}") for i, child in enumerate(children)))
    inputs = [body["input"][0]["text"] for body in server.generated]
    assert inputs.count("a long document") == 1 and len(inputs) == 9
    assert len({g.state.id for g in done}) == 8 and all(g.usage.reused_tokens == 3 for g in done)


async def test_concurrent_callers_make_a_state_once(held: Any):
    async with held.client() as client:
        root = client.root("a")
        users = [asyncio.create_task(client.state().inherit(root).generate(f"q{i}")) for i in range(4)]
        users += [asyncio.create_task(root.fork()) for _ in range(4)]
        await held.until(1)
        assert [body["id"] for body in held.generated] == [root.id]
        late = asyncio.create_task(root.append("late").generate())
        held.gate.set()
        await asyncio.gather(late, *users)
        assert [body["id"] for body in held.generated].count(root.id) == 1
        assert held.generated[-1]["refs"] == [{"kind": "inherit", "id": root.id}], "what is on its way is shared too"


async def test_independent_parents_are_made_at_once(held: Any):
    async with held.client() as client:
        parents = [client.root(f"p{i}") for i in range(3)]
        run = asyncio.create_task(client.state().inherit(*parents).generate("q"))
        await held.until(3)
        assert {body["id"] for body in held.generated} == {parent.id for parent in parents}
        held.gate.set()
        await run


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_cancelled_caller_leaves_the_others_alone(held: Any, victim: int):
    async with held.client() as client:
        root = client.root("a")
        callers = [asyncio.create_task(root.fork()) for _ in range(3)]
        await held.until(1)
        callers[victim].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(callers[victim], 1)
        held.gate.set()
        del callers[victim]
        await asyncio.gather(*callers)
        assert len(held.generated) == 1


async def test_if_all_callers_are_cancelled_the_state_is_still_made_once(held: Any):
    async with held.client() as client:
        root = client.root("a")
        caller = asyncio.create_task(root.fork())
        await held.until(1)
        caller.cancel()
        await asyncio.wait([caller])
        held.gate.set()
        await root.fork()
        assert len(held.generated) == 1


async def test_a_failure_reaches_all_and_can_be_tried_again(server: FakeServer):
    server.fail_next("pool_exhausted", retry_after=3)
    async with server.client() as client:
        root = client.root("a")
        results: list[Any] = await asyncio.gather(*(root.fork() for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [PoolExhaustedError] * 3
        assert results[0].retry_after == 3 and results[0].status == 503
        assert root.standing == "local"
        await root.fork()
        assert [body["id"] for body in server.generated] == [root.id] * 2


async def test_after_a_lost_answer_the_same_request_is_sent_again(server: FakeServer):
    async with server.client() as client:
        lost, gone = client.root("a"), client.root("b")
        for state in (lost, gone):
            server.fail_next(APIConnectionError("lost", sent=True))
            with pytest.raises(APIConnectionError):
                await state.fork()
            assert state.standing == "uncertain"
        # The first request did make its state, the second did not.
        await server.request("POST", "/anabranch/v1/generate", server.generated[0] | {})
        first = server.generated[:2]
        server.requests.clear()
        await lost.fork()
        await gone.fork()
        assert server.generated == first
        assert (await client.stats()).created == 2 and lost.standing == gone.standing == "on server"


async def test_nobody_is_left_to_hear_a_failure(held: Any):
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with held.client() as client:
        caller = asyncio.create_task(client.root("a").fork())
        await held.until(1)
        caller.cancel()
        await asyncio.wait([caller])
        held.fail_next("internal")
        held.gate.set()
        await asyncio.sleep(0.01)
        del caller  # its traceback keeps the task that failed
        gc.collect()
    assert complaints == []


async def test_a_client_closed_meanwhile(held: Any):
    client = held.client()
    caller = asyncio.create_task(client.root("a").fork())
    await held.until(1)
    await client.aclose()
    with pytest.raises(anabranch.ClientClosedError):
        await caller


async def test_release_waits_for_a_state_that_is_being_made(held: Any):
    async with held.client() as client:
        root = client.root("a")
        making = asyncio.create_task(root.fork())
        await held.until(1)
        releasing = asyncio.create_task(root.release())
        held.gate.set()
        child = await making
        await releasing
        assert held._held == [] and (await client.stats()).freed == 1
        with pytest.raises(StateReleasedError):
            await child.generate("x")


async def test_one_failing_parent_does_not_spoil_the_other(server: FakeServer):
    async with server.client() as client:
        a, b = client.root("a"), client.root("b")
        server.fail_next("internal")
        joined = client.state().inherit(a, b).append("q")
        with pytest.raises(InternalError):
            await joined.generate()
        await joined.generate()
        assert [body["id"] for body in server.generated].count(b.id) == 1


async def test_a_long_chain_that_was_never_sent(server: FakeServer):
    async with server.client() as client:
        s = client.root("a")
        for _ in range(300):
            s = client.state().inherit(s).append("b")
        g = await s.generate()
    assert g.usage.context_tokens == 300 and len(server.generated) == 301
