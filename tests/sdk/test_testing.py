"""FakeServer as its users see it: replies, records, injected failures, and rules that are the real ones."""

from __future__ import annotations

import pytest

from anabranch import (
    APIConnectionError,
    AsyncClient,
    InvalidRequestError,
    RateLimitedError,
    StateNotFoundError,
    StateReleasedError,
)
from anabranch.testing import FakeServer


async def test_replies_from_a_list_and_from_a_function():
    server = FakeServer(["first", "second"])
    async with server.client() as client:
        s = await client.root("a").fork()
        assert [(await s.generate("q")).text for _ in range(3)] == ["first", "second", "second"]
    server = FakeServer(lambda prompt: prompt.upper())
    async with server.client() as client:
        a = await client.root("one").generate(" two")
        assert a.text == "ONE TWO"
        b = await client.state().inherit(a.state).artifact(a.state).generate("!")
        assert b.text == "ONE TWOONE TWO!" or b.text == "ONE TWOONE TWO!".upper()


async def test_limits_and_stops():
    server = FakeServer("a b c d END e")
    async with server.client() as client:
        s = client.root("x")
        for args, text, finish in [
            ({}, "a b c d END e", "stop"),
            ({"max_tokens": 2}, "a b", "length"),
            ({"stop": " END"}, "a b c d", "stop"),
            ({"max_tokens": 0}, "", "length"),
        ]:
            g = await s.generate(**args)
            assert (g.text, g.finish_reason, len(g.tokens)) == (text, finish, g.usage.generated_tokens)


async def test_failures(server: FakeServer):
    server.fail_next("rate_limited", retry_after=0, times=2)
    async with server.client() as client:
        with pytest.raises(RateLimitedError) as caught:
            await client.root("a").generate()
        assert (caught.value.status, caught.value.retry_after) == (429, 0)
    async with AsyncClient(transport=server) as client:
        assert (await client.root("a").generate()).text
    assert len(server.requests) == 3


async def test_the_rules_of_references(client: AsyncClient, server: FakeServer):
    computed, g = client.root("a b c"), await client.root("x").generate()
    await computed.fork()
    bad = [
        (client.state().inherit(g.state).artifact(computed, span=(0, 4)), InvalidRequestError, "refs.1.span"),
        (client.state().inherit(computed, upto=4), InvalidRequestError, "refs.0.upto"),
    ]
    for state, error, param in bad:
        with pytest.raises(error) as caught:
            await state.generate("q")
        assert caught.value.param == param and caught.value.status == 400
    good = await client.state().artifact(g.state).generate("q")
    assert good.usage.context_tokens == 4, "by default what was generated"
    assert (await client.state().artifact(computed, span=(1, 1)).generate("q")).usage.context_tokens == 0


async def test_the_rules_of_ids(client: AsyncClient, server: FakeServer):
    g = await client.root("a").generate()
    path, body = "/anabranch/v1/generate", server.generated[-1]
    with pytest.raises(InvalidRequestError, match="already in use"):
        await server.request("POST", path, body | {"input": [{"text": "b"}]})
    assert (await server.request("POST", path, body))["tokens"] == list(g.tokens), "the same request again"
    assert (await client.stats()).created == 1
    await g.state.release()
    child = {"id": "f" * 32, "refs": [{"kind": "inherit", "id": g.state.id}], "input": [{"text": "x"}]}
    with pytest.raises(StateReleasedError):
        await server.request("POST", path, child)
    child["refs"] = [{"kind": "inherit", "id": "e" * 32}]
    with pytest.raises(StateNotFoundError):
        await server.request("POST", path, child)
    for broken in ({"id": "short"}, {**body, "extra": 1}, {"id": "d" * 32}):
        with pytest.raises(InvalidRequestError):
            await server.request("POST", path, broken)
    with pytest.raises(InvalidRequestError, match="endpoint"):
        await server.request("GET", "/elsewhere")


async def test_descendants_still_see_what_was_released(client: AsyncClient, server: FakeServer):
    root = client.root("r r r")
    child = (await (await root.fork()).generate("q")).state
    await root.release()
    g = await child.generate("more")
    assert g.usage.context_tokens == 3 + 1 + 4
    assert [one.state for one in (await g.state.explain()).intervals] == [root.id, child.id]


async def test_propagation_and_shared_tokens(client: AsyncClient):
    a, b = client.root("a a"), client.root("b")
    first = await client.state().inherit(a, propagate=False).inherit(b).generate("x")
    assert first.usage.context_tokens == 3
    assert (await first.state.generate("y")).usage.context_tokens == 1 + 1 + 4
    either = await client.state().inherit(a, propagate=False).artifact(a, span=(0, 1)).generate("x")
    marks = [one.propagate for one in (await either.state.explain()).intervals]
    assert marks == [True, False], "an instance propagates if any reference says so"
    either = await client.state().artifact(a, span=(0, 1)).inherit(a, propagate=False).generate("x")
    assert [one.propagate for one in (await either.state.explain()).intervals] == marks, "in either order"


async def test_continuing_counts_positions_on(client: AsyncClient):
    g = await client.root("a a").generate("b")
    e = await client.state().inherit(g.state).explain()
    assert e.start == 2 + 1 + 4
    e = await (await g.state.fork(at=2)).explain()
    assert (e.start, e.context_tokens) == (2, 2)


async def test_token_input_reads_what_was_generated(server: FakeServer):
    server.reply = lambda prompt: f"[{prompt}]"
    async with server.client() as client:
        g = await client.root("hello").generate()
        assert (await client.root(tokens=[*g.tokens, 99]).generate()).text == "[[hello]<99>]"


async def test_states_can_be_lost(client: AsyncClient, server: FakeServer):
    parent, other = [(await client.root("a b").generate()).state for _ in range(2)]
    child = (await parent.generate("c")).state
    server.expire(parent)
    with pytest.raises(StateNotFoundError):
        await parent.generate("d")
    assert (await child.generate("d")).usage.context_tokens == 2 + 4 + 1 + 4, "its descendants see its tokens"
    stats = await client.stats()
    assert (stats.created, stats.expired, stats.freed, stats.states) == (4, 1, 0, 3)
    async with client.root("a").stream() as s:
        await anext(s)
        server.restart()
        with pytest.raises(APIConnectionError):
            await s.final()
    for state in (other, child):
        with pytest.raises(StateNotFoundError):
            await state.generate("d")
    assert await client.states() == () and (await client.stats()).created == 0


async def test_the_rules_of_renewal_and_release(client: AsyncClient, server: FakeServer):
    a, b, c = [(await client.root("a").generate()).state for _ in range(3)]
    await a.release()
    server.expire(b)
    nobody, ids = "0" * 32, [a.id, b.id, c.id, c.id, "0" * 32]
    renewal = await server.request("POST", "/anabranch/v1/states/renew", {"ids": ids, "lease": 9})
    assert renewal == {"renewed": [c.id], "lost": [a.id, b.id, nobody]}
    assert [info.lease for info in await client.states()] == [9]
    for name, error in ((a.id, StateReleasedError), (b.id, StateNotFoundError), (nobody, StateNotFoundError)):
        for verb in ("renew", "cancel"):
            with pytest.raises(error):
                await server.request("POST", f"/anabranch/v1/states/{name}/{verb}", {})
    assert await server.request("POST", f"/anabranch/v1/states/{c.id}/cancel") is None
    assert (await client.states())[0].generated_tokens == 4, "a sealed state stays as it is"
    released = await server.request("POST", "/anabranch/v1/states/release", {"ids": ids})
    assert released == {"released": [c.id], "unknown": [a.id, b.id, nobody]}


async def test_the_rules_of_making_a_state_again(client: AsyncClient, server: FakeServer):
    path, body = "/anabranch/v1/generate", {"id": "a" * 32, "input": [{"text": "x"}], "sampling": {"max_tokens": 2}}
    first = await server.request("POST", path, body)
    stream = await server.stream(path, body)
    assert [event["type"] async for event in stream] == ["delta", "final"], "the same, told as a stream"
    again = body | {"generated": first["tokens"], "sampling": {"max_tokens": 0}, "again": True}
    with pytest.raises(InvalidRequestError, match="already in use"):
        await server.request("POST", path, again)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        await server.request("POST", path, again | {"sampling": {"max_tokens": 1}})
    for lost in ("restart", "expire", "release"):
        match lost:
            case "restart":
                server.restart()
            case "expire":
                server.expire(*await client.states())
            case _:
                await server.request("POST", "/anabranch/v1/states/release", {"ids": ["a" * 32]})
        made = await server.request("POST", path, again)
        assert (made["tokens"], made["usage"]["generated_tokens"]) == (first["tokens"], 0)
        (info,) = await client.states()
        assert (info.input_tokens, info.generated_tokens) == (1, 2)
