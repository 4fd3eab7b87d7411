"""The client itself: the server's own views, closing, and what it remembers. Not the states that it makes."""

from __future__ import annotations

import gc

import pytest

import anabranch
from anabranch import AsyncClient
from anabranch.testing import FakeServer


async def test_the_servers_own_views(client: AsyncClient):
    g = await client.root("a b").generate()
    (info,) = await client.states()
    assert (info.id, info.input_tokens, info.generated_tokens) == (g.state.id, 2, 4)
    assert (await client.stats()).held_tokens == 6
    assert (await client.health()).status == "ok"


async def test_a_closed_client_says_so(server: FakeServer):
    client = server.client()
    s = client.root("a")
    await client.aclose()
    await client.aclose()
    for use in (s.fork, lambda: s.generate("x"), s.explain, s.release, client.stats, client.__aenter__):
        with pytest.raises(anabranch.ClientClosedError, match="closed"):
            await use()
    assert server.requests == [] and "closed" in repr(client)


async def test_forgotten_states_are_not_remembered(client: AsyncClient):
    for _ in range(50):
        await client.root("a").generate()
    gc.collect()
    assert len(client.session._records) == 0
