"""Mappers of references, from building to the wire, and what FakeServer makes of them."""

from __future__ import annotations

import pytest

from anabranch import AsyncClient, Client, InvalidRequestError, render
from anabranch.testing import FakeServer


async def test_a_mapper_goes_with_its_reference(client: AsyncClient, server: FakeServer):
    a = await client.root("a b c").generate()
    joined = client.state().inherit(a.state, mapper="identity").artifact(a.state, span=(0, 2), mapper="identity")
    await joined.generate("x")
    assert server.generated[-1]["refs"] == [
        {"kind": "inherit", "id": a.state.id, "mapper": "identity"},
        {"kind": "artifact", "id": a.state.id, "span": [0, 2], "mapper": "identity"},
    ]
    assert "inherit through identity" in render.tree(joined)


def test_the_sync_client_says_the_same():
    server = FakeServer()
    with Client(transport=server) as client:
        a = client.root("a b c").generate().state
        client.state().inherit(a, mapper="identity").artifact(a, span=(0, 2), mapper="identity").generate("x")
    assert [ref["mapper"] for ref in server.generated[-1]["refs"]] == ["identity"] * 2


@pytest.mark.parametrize("name", ["", "x" * 65])
async def test_a_name_that_no_server_could_have_is_refused_at_once(client: AsyncClient, server: FakeServer, name: str):
    a = client.root("a")
    with pytest.raises(InvalidRequestError) as caught:
        client.state().inherit(a, mapper=name)
    assert caught.value.param == "mapper"
    assert not server.requests


async def test_what_is_seen_through_a_mapper_are_other_token_instances(client: AsyncClient):
    a = (await client.root("a b").generate(" c", max_tokens=0)).state
    through = (await client.state().inherit(a, mapper="identity").generate("x", max_tokens=0)).state
    (one,) = (await through.explain()).intervals
    assert (one.state, one.mapper, one.start, one.stop, one.effective) == (a.id, "identity", 0, 3, 0)
    both = await client.state().inherit(a).inherit(a, mapper="identity").inherit(a).explain()
    assert [(one.mapper, one.stop) for one in both.intervals] == [(None, 3), ("identity", 3)]
    twice = await client.state().inherit(through, mapper="identity").explain()
    assert [one.mapper for one in twice.intervals] == ["identity+identity", "identity"]


async def test_a_name_that_the_server_has_not_is_refused_by_its_place(client: AsyncClient):
    a = (await client.root("a b").generate()).state
    bad = client.state().inherit(a).inherit(a, mapper="short")
    for ask in (bad.generate("x"), bad.explain()):
        with pytest.raises(InvalidRequestError) as caught:
            await ask
        assert (caught.value.param, caught.value.hint) == ("refs.1.mapper", "this server has identity")


async def test_states_without_own_tokens_pass_mappers_on(client: AsyncClient, server: FakeServer):
    a, b = (await client.root("a").generate()).state, (await client.root("b").generate()).state
    empty = client.state().inherit(a).inherit(b)
    await client.state().inherit(empty, mapper="identity").generate("x")
    assert [ref["mapper"] for ref in server.generated[-1]["refs"]] == ["identity"] * 2
    await client.state().inherit(client.state().inherit(a, mapper="identity")).generate("x")
    assert [ref.get("mapper") for ref in server.generated[-1]["refs"]] == ["identity"]


async def test_two_mappers_in_a_row_need_a_state_between_them(client: AsyncClient, server: FakeServer):
    a = (await client.root("a").generate()).state
    inner = client.state().inherit(a, mapper="identity")
    sent = len(server.requests)
    with pytest.raises(InvalidRequestError, match="no tokens of its own") as caught:
        await client.state().inherit(inner, mapper="identity").generate("x")
    assert caught.value.param == "mapper"
    assert len(server.requests) == sent
    await client.state().inherit(inner.append("y"), mapper="identity").generate("x")
