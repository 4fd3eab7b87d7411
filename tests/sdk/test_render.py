"""The text tree, compared line by line. Not what states mean."""

from __future__ import annotations

from anabranch import AsyncClient, Client, render
from anabranch.testing import FakeServer


async def test_a_join_is_drawn_once(client: AsyncClient, server: FakeServer):
    root = client.root("You are a careful analyst who weighs every word twice.")
    pro, con = await root.fork(2)
    p = await pro.generate("For?", max_tokens=2)
    c = await con.generate("Against?", role="user")
    joined = client.state().inherit(p.state).artifact(c.state, span=(0, 2), propagate=False).place("keep")
    open_end = joined.append("Weigh.").append(tokens=[1, 2])
    server.requests.clear()
    names = {state.id[:8]: name for state, name in [(root, "ROOT"), (p.state, "P"), (c.state, "C"), (open_end, "END")]}
    drawn = render.tree(open_end)
    for short, name in names.items():
        drawn = drawn.replace(short, name)
    assert drawn.splitlines() == [
        '● ROOT  "You are a careful analyst who w…"  (10 tokens)',
        '├─ inherit ● P  "For?" → "one two"  (1 + 2 tokens)',
        '│  └─ inherit ● END  "Weigh. <2 tokens>"  (local)',
        '└─ inherit ● C  "user: Against?" → "one two three four"  (2 + 4 tokens)',
        "   └─ artifact[0:2] (not propagated) ↑ END",
    ]
    assert server.requests == [], "offline"


async def test_several_states_generations_and_roots(client: AsyncClient):
    a, b = await client.root("a").generate(), await client.root("b").generate()
    assert render.tree([a, b.state]).splitlines() == [
        f'● {a.state.id[:8]}  "a" → "one two three four"  (1 + 4 tokens)',
        f'● {b.state.id[:8]}  "b" → "one two three four"  (1 + 4 tokens)',
    ]
    await a.state.release()
    assert "released" in render.tree(a)
    rewound = await b.state.fork(at=3)
    assert render.tree(rewound).splitlines()[1] == f"└─ inherit[:3] ● {rewound.id[:8]}  (no own tokens)"
    assert render.tree([]) == ""


async def test_a_long_chain_does_not_recurse(client: AsyncClient):
    s = client.root("a")
    for _ in range(1500):
        s = client.state().inherit(s).append("b")
    assert render.tree(s).count("●") == 1501


def test_states_of_the_sync_client():
    with Client(transport=FakeServer("out")) as client:
        g = client.root("in").generate()
        assert render.tree(g) == render.tree(g.state) == f'● {g.state.id[:8]}  "in" → "out"  (1 + 1 tokens)'
