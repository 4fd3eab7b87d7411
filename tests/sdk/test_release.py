"""Release: what is sent, what can be used afterwards, what happens if it fails. Not scopes (test_scope.py)."""

from __future__ import annotations

import pytest

import anabranch
from anabranch import AsyncClient, StateReleasedError
from anabranch.testing import FakeServer


async def test_release(client: AsyncClient, server: FakeServer):
    g = await client.root("a").generate()
    child = client.state().inherit(g.state).append("b")
    await g.state.release()
    await g.state.release()
    assert server.requests[1:] == [("POST", "/anabranch/v1/states/release", {"ids": [g.state.id]})]
    sent = len(server.requests)
    uses = [
        g.state.fork(),
        g.state.generate("x"),
        g.state.explain(),
        child.generate("x"),
        client.state().inherit(child).generate("y"),
    ]
    for use in uses:
        with pytest.raises(StateReleasedError):
            await use
    for build in (client.state().inherit, client.state().artifact, lambda s: s.append("x"), lambda s: s.stream("x")):
        with pytest.raises(StateReleasedError):
            build(g.state)
    innocent = client.root("innocent")
    with pytest.raises(StateReleasedError):
        await client.state().inherit(innocent, child).generate("y")
    assert len(server.requests) == sent, "nothing is sent, no innocent parent is computed"


async def test_release_of_an_unsent_state_is_local(client: AsyncClient, server: FakeServer):
    s = client.root("a")
    await s.release()
    assert server.requests == [] and s.standing == "released"
    with pytest.raises(StateReleasedError):
        await s.fork()


async def test_release_of_what_is_gone_already(client: AsyncClient, server: FakeServer):
    a, b = [(await client.root("a").generate()).state for _ in range(2)]
    server.expire(a)
    await server.request("DELETE", f"/anabranch/v1/states/{b.id}")
    await client.release(a, b)
    assert a.standing == b.standing == "released"


async def test_a_release_that_fails_can_be_tried_again(client: AsyncClient, server: FakeServer):
    a, b = [(await client.root("a").generate()).state for _ in range(2)]
    server.fail_next("internal")
    with pytest.raises(anabranch.InternalError):
        await client.release(a, b)
    assert {a.standing, b.standing} == {"on server"}
    await client.release(a, b, a)
    assert await client.states() == ()
    assert server.requests[-2][2] == {"ids": [a.id, b.id]}


async def test_a_release_of_very_many_states_is_several_requests(
    client: AsyncClient, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("anabranch.wire.MAX_IDS", 2)
    states = [(await client.root("a").generate()).state for _ in range(5)]
    await client.release(*states)
    assert [len(body["ids"]) for _, path, body in server.requests if path.endswith("release") and body] == [2, 2, 1]
    assert await client.states() == ()


async def test_keep_false_leaves_no_state(client: AsyncClient, server: FakeServer):
    g = await client.root("a").generate(keep=False)
    assert server.generated[-1]["keep"] is False and g.text
    with pytest.raises(StateReleasedError):
        await g.state.generate("b")
    await g.state.release()
    assert len(server.requests) == 1
