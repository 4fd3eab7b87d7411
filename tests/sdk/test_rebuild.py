"""Lost states are made again: all that are needed, each once, as they were. How a loss shows: test_lease.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from anabranch import APIConnectionError, AsyncClient, InternalError, State, StateNotFoundError, StateReleasedError
from anabranch.lease import renew_held
from anabranch.testing import FakeServer


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with server.client(on_lost="rebuild") as client:
        yield client


async def diamond(client: AsyncClient) -> tuple[State, State, State, State]:
    """root, two generations from it, and a generation that sees both."""
    root = client.root("r r")
    x, y = [(await one.generate(f"q{i}")).state for i, one in enumerate(await root.fork(2))]
    return root, x, y, (await client.state().inherit(x).artifact(y).place("concat").generate("join")).state


def made(server: FakeServer) -> list[str]:
    return [body["id"] for body in server.generated]


async def test_without_it_a_lost_state_is_an_error(server: FakeServer):
    async with server.client() as client:
        state = (await client.root("a").generate()).state
        server.restart()
        sent = len(server.requests)
        with pytest.raises(StateNotFoundError):
            await state.generate("b")
        assert len(server.requests) == sent + 1 and state.standing == "on server"


async def test_everything_is_made_again_as_it_was(client: AsyncClient, server: FakeServer):
    server.reply = ["one two", "three", "four five six", "end"]
    states = await diamond(client)
    bodies = {body["id"]: body for body in server.generated}
    before = await states[3].explain()
    server.restart()
    server.requests.clear()
    g = await states[3].generate("more")
    assert g.text == "end", "nothing was said anew"
    asked = [body for _, path, body in server.requests if path.endswith("/states/renew")]
    assert len(asked) == 1 and asked[0] and set(asked[0]["ids"]) == {state.id for state in states}
    *again, last = server.generated[1:]  # the first one failed
    assert (again[0]["id"], again[-1]["id"]) == (states[0].id, states[3].id)
    assert Counter(made(server)) == {**dict.fromkeys((state.id for state in states), 1), g.state.id: 2}
    assert last == server.generated[0], "the same request"
    for body in again:
        original = bodies[body["id"]]
        assert bool(body.pop("generated", None)) == (body["id"] != states[0].id)
        assert body == original | {"sampling": {"max_tokens": 0}, "again": True}
    assert await states[3].explain() == before
    assert {state.standing for state in states} == {"on server"}


async def test_what_was_generated_stays_what_an_artifact_means(client: AsyncClient, server: FakeServer):
    g = await client.root("a a a").generate()
    assert g.text == "one two three four"
    server.restart()
    server.reply = "something else entirely, were it asked again"
    used = (await client.state().artifact(g.state).generate("q")).usage
    assert used.context_tokens == 4
    (info,) = [info for info in await client.states() if info.id == g.state.id]
    assert (info.input_tokens, info.generated_tokens) == (3, 4)


@pytest.mark.parametrize("use", ["generate", "stream", "fork", "explain", "renew", "append"])
@pytest.mark.parametrize("known", [False, True])
async def test_every_use_of_a_lost_state(client: AsyncClient, server: FakeServer, use: str, known: bool):
    root, *_, end = await diamond(client)
    server.restart()
    if known:
        await renew_held(client.session, 1)
        assert (root.standing, end.standing) == ("lost", "lost")
    match use:
        case "generate":
            assert (await end.generate("x")).usage.context_tokens == 2 + 5 + 4 + 5
        case "stream":
            async with end.stream("x") as s:
                assert (await s.final()).usage.context_tokens == 2 + 5 + 4 + 5
        case "fork":
            assert (await (await end.fork()).generate("x")).usage.context_tokens == 2 + 5 + 4 + 5
        case "explain":
            assert (await end.explain()).context_tokens == 2 + 5 + 4
        case "renew":
            assert (await end.renew()).generated_tokens == 4
        case _:
            assert (await end.append("x").append("y").generate()).usage.context_tokens == 2 + 5 + 4 + 5
    assert end.standing == "on server"


async def test_each_is_made_once_however_many_meet_the_loss(client: AsyncClient, server: FakeServer):
    states = await diamond(client)
    server.restart()
    server.requests.clear()
    await asyncio.gather(
        *(states[3].generate(f"q{i}") for i in range(5)),
        *(states[1].generate(f"q{i}") for i in range(3)),
        states[3].explain(),
        client.state().inherit(states[2], states[0]).generate("q"),
    )
    counts = Counter(made(server))
    assert [counts[state.id] for state in states] == [1, 1, 1, 1]


async def test_only_what_is_needed_is_made_again(client: AsyncClient, server: FakeServer):
    root, x, y, end = await diamond(client)
    server.expire(root, y)
    server.requests.clear()
    await x.generate("its parent's tokens are still there for it")
    assert len(server.requests) == 1
    await y.generate("this one is lost")
    assert made(server)[2:-1] == [root.id, y.id], "and cannot be computed without its parent"
    assert {state.standing for state in (root, x, y, end)} == {"on server"}


async def test_independent_states_are_made_at_once(held: Any):
    held.gate.set()
    async with held.client(on_lost="rebuild") as client:
        parents = [(await client.root(f"p{i}").generate()).state for i in range(3)]
        held.restart()
        held.requests.clear()
        held.gate.clear()
        run = asyncio.create_task(client.state().inherit(*parents).generate("q"))
        for _ in range(2):  # the request that fails, the question what is lost
            await held.until(1)
            held.gate.set()
            held.gate.clear()
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            while len({body["id"] for body in held.generated} & {parent.id for parent in parents}) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        held.gate.set()
        await run


async def test_released_ancestors_are_made_for_their_descendants_and_released_again(
    client: AsyncClient, server: FakeServer
):
    root, x, y, end = await diamond(client)
    await client.release(root, x)
    server.restart()
    server.requests.clear()
    await end.generate("q")
    assert sorted(made(server)[1:-1]) == sorted(state.id for state in (root, x, y, end))
    release = [i for i, (_, path, body) in enumerate(server.requests) if path.endswith("/release")]
    assert len(release) == 1 and server.requests[release[0]][2] == {"ids": [root.id, x.id]}
    assert server.requests[release[0] - 1][2]["id"] == end.id, "once their descendants are there"  # type: ignore[index]
    assert {info.id for info in await client.states()} >= {y.id, end.id} and root.standing == x.standing == "released"
    assert not {info.id for info in await client.states()} & {root.id, x.id}
    with pytest.raises(StateReleasedError):
        await x.generate("q")
    server.requests.clear()
    await end.generate("q")
    assert len(server.requests) == 1


async def test_a_released_ancestor_alone_is_not_made_again(client: AsyncClient, server: FakeServer):
    root = client.root("r")
    x, y = [(await one.generate("q")).state for one in await root.fork(2)]
    await root.release()
    server.expire(y)
    server.requests.clear()
    await client.state().inherit(x).generate("q")
    assert len(server.requests) == 1
    await y.generate("q")
    assert made(server)[2:-1] == [root.id, y.id] and x.id not in made(server)


async def test_what_is_being_made_needs_no_released_parent(server: FakeServer):
    """Its request has been accepted: it holds its parent itself."""
    accepted, answered = asyncio.Event(), asyncio.Event()
    original = server.request

    async def request(method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        answer = await original(method, path, body)
        if body and body.get("id") == child.id:
            accepted.set()
            await answered.wait()
        return answer

    async with server.client(on_lost="rebuild") as client:
        parent, lost = [(await client.root(text).generate()).state for text in ("p", "l")]
        server.expire(lost)
        await renew_held(client.session, 1)
        child = client.state().inherit(parent).append("c")
        server.request = request  # type: ignore[method-assign]
        making = asyncio.create_task(child.fork())
        await accepted.wait()
        await parent.release()
        server.requests.clear()
        using = asyncio.create_task(client.state().inherit(child, lost).generate("q"))
        async with asyncio.timeout(5):
            while lost.standing == "lost":  # noqa: ASYNC110
                await asyncio.sleep(0)
        answered.set()
        await asyncio.gather(making, using)
    assert made(server)[0] == lost.id and parent.id not in made(server)


async def test_input_that_was_lost_is_computed_again_and_inherited(client: AsyncClient, server: FakeServer):
    root = client.root("a b")
    await root.fork()
    server.expire(root)
    await renew_held(client.session, 1)
    server.requests.clear()
    g = await root.append("c").generate()
    assert made(server) == [root.id, g.state.id] and g.usage.reused_tokens == 2


async def test_a_lease_of_its_own_is_kept(client: AsyncClient, server: FakeServer):
    state = (await client.root("a").generate()).state
    await state.renew(lease=86_400)
    server.restart()
    await state.generate("q")
    assert sorted(str(info.lease) for info in await client.states()) == ["300.0", "86400.0"]


async def test_a_scope_does_not_come_to_own_what_existed_before(client: AsyncClient, server: FakeServer):
    root, *_, end = await diamond(client)
    server.restart()
    async with client.scope():
        await end.generate("q")
    assert {info.id for info in await client.states()} >= {root.id, end.id}
    assert len(await client.states()) == 4


async def test_a_rebuild_that_fails_raises_the_original_kind_with_a_note(client: AsyncClient, server: FakeServer):
    *_, x, end = await diamond(client)
    server.restart()
    original = server.request

    async def request(method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        if body and body.get("generated"):
            server.fail_next("pool_exhausted")
        return await original(method, path, body, timeout=timeout)

    server.request = request  # type: ignore[method-assign]
    results = await asyncio.gather(end.fork(), end.generate("q"), x.explain(), return_exceptions=True)
    assert [type(result) for result in results[1:]] == [StateNotFoundError] * 2
    for error in results[1:]:
        assert isinstance(error, StateNotFoundError) and "[pool_exhausted]" in error.__notes__[0]
    server.request = original  # type: ignore[method-assign]
    assert (await end.generate("q")).usage.context_tokens == 2 + 5 + 4 + 5, "later it can be tried again"


async def test_many_callers_of_one_state_that_cannot_be_made_hear_of_it_once(client: AsyncClient, server: FakeServer):
    parent = (await client.root("a").generate()).state
    child = client.state().inherit(parent).append("b")
    server.restart()
    original = server.request

    async def request(method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        if path.endswith("/renew"):
            server.fail_next(APIConnectionError("gone"))
        return await original(method, path, body, timeout=timeout)

    server.request = request  # type: ignore[method-assign]
    results = await asyncio.gather(*(child.fork() for _ in range(4)), return_exceptions=True)
    errors = {id(result): result for result in results}
    assert len(errors) == 1 and len(next(iter(errors.values())).__notes__) == 1  # type: ignore[union-attr]
    assert len([1 for _, path, _ in server.requests if path.endswith("/renew")]) == 1


async def test_a_rebuild_whose_answer_was_lost(client: AsyncClient, server: FakeServer):
    state = (await client.root("a").generate()).state
    server.restart()
    original = server.request

    async def request(method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        answer = await original(method, path, body, timeout=timeout)
        if body and body.get("generated"):
            raise APIConnectionError("lost on the way back")
        return answer

    server.request = request  # type: ignore[method-assign]
    with pytest.raises(StateNotFoundError) as caught:
        await state.generate("q")
    assert isinstance(caught.value.__cause__, APIConnectionError) and state.standing == "lost"
    server.request = original  # type: ignore[method-assign]
    server.requests.clear()
    await state.generate("q")
    assert made(server).count(state.id) == 0, "it is there, as a renewal says"


async def test_other_errors_rebuild_nothing(client: AsyncClient, server: FakeServer):
    state = (await client.root("a").generate()).state
    server.fail_next("internal")
    with pytest.raises(InternalError):
        await state.generate("q")
    await server.request("DELETE", f"/anabranch/v1/states/{state.id}")
    with pytest.raises(StateReleasedError):
        await state.generate("q")
    assert not [path for _, path, _ in server.requests if path.endswith("renew")]


async def test_a_long_chain(client: AsyncClient, server: FakeServer):
    state = client.root("a")
    for _ in range(200):
        state = await state.append("b").fork()
    server.restart()
    assert (await state.generate("c")).usage.context_tokens == 201
