"""What states send: the requests that each way of building and running makes. Not how requests travel."""

from __future__ import annotations

import re

import pytest

from anabranch import AsyncClient, InvalidRequestError, State
from anabranch.sampling import SamplingArgs
from anabranch.testing import FakeServer
from anabranch.wire import Sampling


async def test_the_example_of_the_contract(client: AsyncClient, server: FakeServer):
    root = client.root("You are a careful analyst.\n")
    pro, con = await root.fork(2)
    p = await pro.generate("Argue for.", max_tokens=64)
    c = await con.generate("Argue against.", max_tokens=64)
    joined = client.state().inherit(p.state, c.state).artifact(c.state, span=(0, 2)).place("concat")
    verdict = await joined.append("Weigh both.").generate(max_tokens=64, temperature=0)

    assert server.generated == [
        {"lease": 300.0, **body}
        for body in (
            {"id": root.id, "input": [{"text": "You are a careful analyst.\n"}], "sampling": {"max_tokens": 0}},
            {
                "id": p.state.id,
                "refs": [{"kind": "inherit", "id": root.id}],
                "input": [{"text": "Argue for."}],
                "sampling": {"max_tokens": 64},
            },
            {
                "id": c.state.id,
                "refs": [{"kind": "inherit", "id": root.id}],
                "input": [{"text": "Argue against."}],
                "sampling": {"max_tokens": 64},
            },
            {
                "id": verdict.state.id,
                "refs": [
                    {"kind": "inherit", "id": p.state.id},
                    {"kind": "inherit", "id": c.state.id},
                    {"kind": "artifact", "id": c.state.id, "span": [0, 2]},
                ],
                "place": "concat",
                "input": [{"text": "Weigh both."}],
                "sampling": {"max_tokens": 64, "temperature": 0.0},
            },
        )
    ]
    # 6 root words, then (2 in, 4 out) twice; the artifact's instances are inherited already.
    used = verdict.usage
    assert (used.context_tokens, used.reused_tokens, used.computed_tokens) == (5 + 1 + 2 * 6, 18, 2)
    assert (verdict.text, verdict.finish_reason, used.generated_tokens) == ("one two three four", "stop", 4)
    assert str(verdict) == verdict.text
    assert "one two three four" in repr(verdict) and verdict.state.id[:8] in repr(verdict)


def test_building_is_local_and_free(server: FakeServer):
    client = server.client()
    s = client.root("a").append("b").append("c", role="user").append(tokens=[1, 2]).place("keep").rules("strict")
    assert re.fullmatch("[0-9a-f]{32}", s.id)
    assert server.requests == []


def test_a_state_never_changes(server: FakeServer):
    client = server.client()
    a, b = client.root("a"), client.root("b")
    empty = client.state()
    built = [empty, empty.inherit(a), empty.artifact(b, span=(0, 1)), empty.append("x"), empty.place("concat")]
    assert empty.refs == () and empty.node.input == () and empty.node.place is None
    assert len({state.id for state in built}) == len(built)
    with pytest.raises(AttributeError):
        empty.node = a.node  # type: ignore[misc]


async def test_an_unsent_state_runs_in_one_request(client: AsyncClient, server: FakeServer):
    s = client.root("a b").append("c")
    g = await s.generate("d")
    assert [body["input"] for body in server.generated] == [[{"text": "a b"}, {"text": "c"}, {"text": "d"}]]
    assert g.state.id != s.id and s.standing == "local" and g.state.standing == "on server"


async def test_a_state_on_the_server_is_inherited(client: AsyncClient, server: FakeServer):
    s = client.root("a b")
    await s.fork()
    for run in (lambda: s.generate("c"), lambda: s.append("c").generate()):
        g = await run()
        refs = [{"kind": "inherit", "id": s.id}]
        assert server.generated[-1] == {"id": g.state.id, "refs": refs, "input": [{"text": "c"}], "lease": 300.0}


async def test_a_generation_is_continued_by_inheriting_it(client: AsyncClient, server: FakeServer):
    g = await client.root("a").generate()
    h = await g.state.generate("b")
    assert server.generated[-1]["refs"] == [{"kind": "inherit", "id": g.state.id}]
    assert h.usage.context_tokens == 1 + 4
    again = await g.state.generate("b")
    assert again.state.id != h.state.id


async def test_what_is_not_handed_on_is_seen_by_the_same_state_only(client: AsyncClient, server: FakeServer):
    """Whether a state happens to be on the server must not change what its continuation sees."""
    secret = client.root("secret words")
    s = client.state().inherit(secret, propagate=False).append("look")
    before = await s.generate("now")
    await s.fork()
    after = await s.generate("now")
    assert before.usage.context_tokens == after.usage.context_tokens == 2
    child = await (await s.fork()).generate("now")
    assert child.usage.context_tokens == 1


async def test_generate_without_new_input(client: AsyncClient, server: FakeServer):
    s = client.root("a b")
    first = await s.generate()
    await s.fork()
    second = await s.generate()
    assert first.usage == second.usage, "a value gives the same whether it was forked or not"
    for state in (client.state(), client.state().inherit(s), first.state, await s.fork()):
        sent = len(server.requests)
        with pytest.raises(InvalidRequestError, match="no input") as caught:
            await state.generate()
        assert "append" in str(caught.value.hint) and len(server.requests) == sent


async def test_fork(client: AsyncClient, server: FakeServer):
    s = client.root("a b c")
    one = await s.fork()
    assert isinstance(one, State) and [ref.target for ref in one.refs] == [s.node]
    three = await s.fork(3)
    assert len({state.id for state in (one, *three)}) == 4
    assert len(server.generated) == 1, "computed once"
    back = await s.fork(at=2)
    g = await back.generate("x")
    assert server.generated[-1]["refs"] == [{"kind": "inherit", "id": s.id, "upto": 2}] and g.usage.context_tokens == 2
    with pytest.raises(InvalidRequestError, match="past the end"):
        await (await s.fork(at=4)).generate("x")
    for bad in (0, -1):
        with pytest.raises(InvalidRequestError, match="fork into"):
            await s.fork(bad)
    with pytest.raises(InvalidRequestError):
        await s.fork(at=-1)


async def test_fork_of_a_state_without_tokens_copies(client: AsyncClient, server: FakeServer):
    s = client.state().inherit(client.root("a")).place("concat")
    x, y = await s.fork(2)
    assert server.requests == [] and x.refs == y.refs == s.refs and x.id != y.id and x.node.place == "concat"
    with pytest.raises(InvalidRequestError, match="no tokens of its own"):
        await s.fork(at=0)


async def test_parents_are_made_first_each_once(client: AsyncClient, server: FakeServer):
    a = client.root("a")
    b = client.state().inherit(a).append("b")
    c = client.state().inherit(a).append("c")
    await client.state().inherit(b, c, a).generate("d")
    order = [body["id"] for body in server.generated]
    assert len(order) == 4 and order[0] == a.id and set(order[1:3]) == {b.id, c.id}


async def test_chat_and_token_input(client: AsyncClient, server: FakeServer):
    root = client.root(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}])
    await root.generate("Hi", role="user")
    assert server.generated[-1]["input"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ""},
        {"role": "user", "content": "Hi"},
    ]
    await client.root(tokens=[5, 6]).generate("x")
    assert server.generated[-1]["input"] == [{"tokens": [5, 6]}, {"text": "x"}]


async def test_sampling_arguments(client: AsyncClient, server: FakeServer):
    await client.root("a").generate(
        temperature=0.5, top_k=3, stop="\n", stop_token_ids=[7], json_schema={"type": "object"}, max_tokens=128
    )
    assert server.generated[-1]["sampling"] == {
        "temperature": 0.5,
        "top_k": 3,
        "stop": ["\n"],
        "stop_token_ids": [7],
        "json_schema": '{"type": "object"}',
    }
    g = await client.root("a").generate(logprobs=True)
    assert g.logprobs is not None and len(g.logprobs) == len(g.tokens) == 4


def test_every_sampling_argument_of_the_wire_is_a_keyword():
    assert set(SamplingArgs.__annotations__) == set(Sampling.model_fields)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (lambda s: s.generate("x", temprature=0), "temprature"),
        (lambda s: s.generate("x", temperature=-1), "temperature"),
        (lambda s: s.generate("x", temperature=float("nan")), "temperature"),
        (lambda s: s.generate("x", max_tokens=-1), "max_tokens"),
        (lambda s: s.generate("x", timeout=0), "timeout"),
        (lambda s: s.generate("x", timeout=float("nan")), "timeout"),
        (lambda s: s.generate(""), "input"),
        (lambda s: s.generate("\ud800"), "input"),
        (lambda s: s.generate(role="user"), "input"),
    ],
)
async def test_bad_arguments_are_refused_before_anything_is_sent(client, server, bad, param):
    with pytest.raises(InvalidRequestError) as caught:
        await bad(client.root("a"))
    assert caught.value.param == param and caught.value.status is None and server.requests == []


@pytest.mark.parametrize(
    "bad",
    [
        lambda c, s: c.root(),
        lambda c, s: c.root(""),
        lambda c, s: c.root("a", tokens=[1]),
        lambda c, s: c.root("a", messages=[{"role": "user", "content": "b"}]),
        lambda c, s: c.root(messages=[]),
        lambda c, s: c.root(messages=[{"role": "user"}]),
        lambda c, s: c.root(messages=[{"role": "user", "content": [{"type": "image"}]}]),
        lambda c, s: c.root(tokens=[]),
        lambda c, s: c.root(tokens=[-1]),
        lambda c, s: c.root("a", rules="loose"),
        lambda c, s: s.append(),
        lambda c, s: s.append(""),
        lambda c, s: s.append("x", role=""),
        lambda c, s: s.place("sideways"),
        lambda c, s: s.place("concat", start=3),
        lambda c, s: s.place(start=-1),
        lambda c, s: c.state().inherit(),
        lambda c, s: c.state().inherit([s]),
        lambda c, s: c.state().inherit(s, upto=-1),
        lambda c, s: c.state().inherit(s, upto=True),
        lambda c, s: c.state().inherit(s, base=-1),
        lambda c, s: c.state().artifact(s, span=(3, 1)),
        lambda c, s: c.state().artifact(s, span=(-2, 1)),
        lambda c, s: c.state().artifact(s, span=(1, 2, 3)),
        lambda c, s: c.state().artifact(s, span=(0.5, 2)),
        lambda c, s: c.state().artifact(c.state()),
        lambda c, s: c.state().inherit(c.state(), upto=1),
        lambda c, s: c.state(rules="strict").inherit(s).artifact(s, span=(0, 1)),
        lambda c, s: c.state().inherit(s).artifact(s, span=(0, 1)).rules("strict"),
        lambda c, s: s.inherit(c.root("b")),
        lambda c, s: (e := c.state()).inherit(e),
    ],
)
def test_bad_building_is_refused_at_once(server: FakeServer, bad):
    client = server.client()
    with pytest.raises(InvalidRequestError):
        bad(client, client.root("a b"))


async def test_a_generation_in_place_of_its_state_is_explained(client: AsyncClient):
    g = await client.root("a").generate()
    with pytest.raises(InvalidRequestError, match=r"not Generation") as caught:
        client.state().inherit(g)  # type: ignore[arg-type]
    assert ".state" in str(caught.value.hint)
    with pytest.raises(InvalidRequestError, match="itself"):
        g.state.artifact(g.state)


async def test_a_state_of_another_client_is_refused(client: AsyncClient, server: FakeServer):
    async with server.client() as other:
        theirs = other.root("a")
        for use in (client.state().inherit, client.state().artifact):
            with pytest.raises(InvalidRequestError, match="another client"):
                use(theirs)
        with pytest.raises(InvalidRequestError, match="another client"):
            await client.release(theirs)


# ------------------------------------------------------------ placement


async def test_explicit_placement(client: AsyncClient, server: FakeServer):
    a, b = client.root("a a"), client.root("b b")
    joined = client.state().inherit(a, base=10).inherit(b)
    g = await joined.generate("x")
    assert server.generated[-1]["place"] == {} and server.generated[-1]["refs"][0]["base"] == 10
    e = await g.state.explain()
    assert [(one.effective, one.delta) for one in e.intervals] == [(10, 10), (0, 0)] and e.start == 12
    e = await joined.place(start=40).explain()
    assert e.start == 40
    assert (await joined.place("explicit", start=41).explain()).start == 41
    with pytest.raises(InvalidRequestError, match="base needs explicit"):
        await client.state().inherit(client.root("c"), base=1).place("concat").explain()
    assert server.requests[-1][1].endswith("/explain"), "refused before the parent is made"


async def test_policies_that_move_what_only_one_parent_selects(client: AsyncClient):
    one, other = await client.root("r r").fork(2)
    short, long = one.append("a"), other.append("b b b")

    async def seen(policy: str, *parents: State) -> tuple[list[int], int]:
        found = await client.state().inherit(*parents).place(policy).explain()
        return [one.effective for one in found.intervals], found.start

    assert await seen("same_start", short, long) == ([0, 2, 2], 5)
    assert await seen("right_aligned", short, long) == ([0, 4, 2], 5)
    other = client.root("c c c c")
    assert await seen("same_start", other, short, long) == ([2, 0, 2, 2], 6), "what two select stays"
    assert await seen("right_aligned", other, client.root("d")) == ([0, 3], 4)
    bare = client.state().inherit(short, other)
    with pytest.raises(InvalidRequestError, match="fits no other place"):
        await client.state().inherit(bare, long).place("same_start").explain()


async def test_placement_of_states_without_tokens(client: AsyncClient, server: FakeServer):
    a, b, c = client.root("a a"), client.root("b b b"), client.root("c")
    pair = client.state().inherit(a, b).place("concat")

    async def seen(state: State) -> list[int]:
        return [one.effective for one in (await state.explain()).intervals]

    assert await seen(pair) == [0, 2]
    assert await seen(client.state().inherit(pair)) == [0, 2], "continuing it changes nothing"
    assert await seen(client.state().inherit(pair, c).place("concat")) == [0, 2, 5]
    with pytest.raises(InvalidRequestError, match="fits no other place"):
        await client.state().inherit(pair, c).explain()
    with pytest.raises(InvalidRequestError, match="fits no other place"):
        await client.state().inherit(pair).place("keep").explain()
    plain = client.state().inherit(a, b)
    assert await seen(client.state().inherit(plain, c)) == [0, 0, 0]
    with pytest.raises(InvalidRequestError):
        await client.state().inherit(plain, base=5).explain()
    assert await seen(client.state().inherit(client.state().inherit(a), base=5)) == [5]


async def test_states_without_tokens_hand_on_what_they_reference(client: AsyncClient, server: FakeServer):
    a, b = client.root("a"), client.root("b")
    inner = client.state().inherit(a).inherit(b, propagate=False)
    await client.state().inherit(inner, propagate=False).generate("x")
    assert server.generated[-1]["refs"] == [{"kind": "inherit", "id": a.id, "propagate": False}]
    deep = client.state().inherit(a)
    for _ in range(3000):
        deep = client.state().inherit(deep, deep)
    await deep.generate("x")
    assert server.generated[-1]["refs"] == [{"kind": "inherit", "id": a.id}], "neither recursion nor blow-up"


# ------------------------------------------------------------ explain


async def test_explain_by_spec_and_by_id(client: AsyncClient, server: FakeServer):
    a, b = client.root("a a a"), client.root("b b")
    joined = client.state().inherit(a, b).place("concat").append("x")
    e = await joined.explain()
    method, path, body = server.requests[-1]
    assert (method, path) == ("POST", "/anabranch/v1/explain") and body and "spec" in body
    assert {request["id"] for request in server.generated} == {a.id, b.id}, "its parents are made, itself is not"
    await joined.fork()
    assert await joined.explain() == e
    assert server.requests[-1][2] == {"id": joined.id}

    assert (e.context_tokens, e.start) == (5, 5)
    assert (e.distance(0, 4), e.distance(4, 0), e.distance(2, 5)) == (4, -4, 3)
    with pytest.raises(InvalidRequestError, match="no visible token 6"):
        e.distance(0, 6)
    with pytest.raises(InvalidRequestError, match="no visible token -1"):
        e.distance(-1, 0)
    table = str(e).splitlines()
    assert table[0].split() == ["state", "tokens", "native", "effective", "delta"]
    assert table[2].split() == [b.id[:8], "[0:2]", "0..1", "3..4", "+3"]
    assert table[-1] == "5 visible tokens; new tokens start at position 5"


async def test_explain_counts_shared_tokens_once(client: AsyncClient):
    root = client.root("r r")
    x, y = [(await state.generate("q")).state for state in await root.fork(2)]
    e = await client.state().inherit(x, y, x).artifact(y, span=(0, 3)).explain()
    assert [(one.state, one.stop - one.start) for one in e.intervals] == [(root.id, 2), (x.id, 5), (y.id, 5)]
    empty = await client.state().explain()
    assert (empty.intervals, empty.start, empty.distance(0, 0)) == ((), 0, 0)


async def test_several_answers_to_one_message_need_no_new_text(client: AsyncClient, server: FakeServer):
    root = client.root(messages=[{"role": "user", "content": "Name a fruit."}])
    one, other = await root.fork(2)
    answers = [await one.generate(max_tokens=4), await other.generate(max_tokens=4)]
    assert [sorted(body) for body in server.generated[1:]] == [["id", "lease", "refs", "sampling"]] * 2
    assert [answer.usage.computed_tokens for answer in answers] == [1, 1]
    with pytest.raises(InvalidRequestError, match="no input"):
        await answers[0].state.generate()  # it has answered


async def test_an_artifact_of_what_never_generated_needs_a_span(client: AsyncClient, server: FakeServer):
    document = client.root("A long document.")
    with pytest.raises(InvalidRequestError, match="generated nothing"):
        client.state().artifact(document)
    assert not server.requests
    client.state().artifact(document, span=(0, 2))
