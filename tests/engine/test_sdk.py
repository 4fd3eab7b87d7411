"""The SDK against the real server: what agent code does, and what it is told when that cannot work."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

import anabranch
from anabranch import AsyncClient, Client
from tests.engine.api import ok, send
from tests.serving import Served

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
async def client(stepped: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stepped.url) as client:
        yield client


async def test_the_program_of_the_contract(client: AsyncClient, stepped: Served):
    root = client.root("You are a careful analyst.\n")
    pro, con = await root.fork(2)
    p, c = await asyncio.gather(
        pro.generate("Argue for.", max_tokens=6, **GREEDY), con.generate("Argue against.", max_tokens=6, **GREEDY)
    )
    root_tokens = ok(stepped, text="You are a careful analyst.\n").usage.computed_tokens
    assert p.usage.reused_tokens == c.usage.reused_tokens == root_tokens
    joined = client.state().inherit(p.state, c.state).artifact(c.state, span=(0, 2)).place("concat")
    verdict = await joined.append("Weigh both.").generate(max_tokens=6, logprobs=True, **GREEDY)
    visible = p.usage.context_tokens + sum(x.usage.computed_tokens + 6 for x in (p, c))
    assert verdict.usage.context_tokens == verdict.usage.reused_tokens == visible
    assert len(verdict.tokens) == 6 and verdict.logprobs and len(verdict.logprobs) == 6
    assert 0 < verdict.timings.first_token < verdict.timings.total
    explained = await verdict.state.explain()
    assert explained.start == visible
    assert [one.effective for one in explained.intervals] == [
        0,
        p.usage.context_tokens,
        p.usage.context_tokens + p.usage.computed_tokens + 6,
    ]
    async with verdict.state.stream("Go on.", max_tokens=4, **GREEDY) as stream:
        text = "".join([piece async for piece in stream.text()])
        assert (await stream.final()).text == text


async def test_fork_and_eight_generates_compute_the_parent_once(client: AsyncClient, stepped: Served):
    root = client.root(tokens=list(range(300, 340)))
    before = stepped.stats()["created"]
    children = await root.fork(8)
    answers = await asyncio.gather(*(child.append(tokens=[400]).generate(max_tokens=1) for child in children))
    assert [answer.usage.computed_tokens for answer in answers] == [1] * 8
    assert stepped.stats()["created"] - before == 9


async def test_a_scope_leaves_nothing(client: AsyncClient, stepped: Served):
    async with client.scope() as scope:
        kept = (await client.root("One").generate(max_tokens=1)).state
        await client.root("Two").generate(max_tokens=1)
        scope.keep(kept)
    assert [state.id for state in await client.states()] == [kept.id]


async def test_several_answers_to_one_question(client: AsyncClient):
    root = client.root(messages=[{"role": "user", "content": "What is the capital of France?"}])
    answers = await asyncio.gather(*(child.generate(max_tokens=12, temperature=0) for child in await root.fork(2)))
    assert answers[0].text == answers[1].text
    assert "Paris" in answers[0].text
    more = await answers[0].state.append("And of Italy?", role="user").generate(max_tokens=12, temperature=0)
    assert "Rome" in more.text


def test_the_same_without_await(stepped: Served):
    with Client(stepped.url) as client, client.scope():
        one, other = client.root("The story begins").fork(2)
        answers = [branch.generate(" with a king", max_tokens=3, **GREEDY) for branch in (one, other)]
        assert answers[0].tokens == answers[1].tokens
        with client.state().inherit(answers[0].state).stream(" and", max_tokens=2, **GREEDY) as stream:
            assert "".join(stream.text()) == stream.final().text


async def test_unknown_state(client: AsyncClient, stepped: Served):
    state = (await client.root("Hello").generate(max_tokens=1)).state
    stepped.post(f"/anabranch/v1/states/{state.id}/renew", lease=0.1)
    while stepped.get(f"/anabranch/v1/states/{state.id}").status_code != 404:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    with pytest.raises(anabranch.StateNotFoundError) as caught:
        await state.generate("x")
    assert caught.value.hint and caught.value.param == "refs"


async def test_released_state(client: AsyncClient, stepped: Served):
    state = (await client.root("Hello").generate(max_tokens=1)).state
    child = await state.fork()
    await state.release()
    with pytest.raises(anabranch.StateReleasedError):
        await state.generate("x")
    with pytest.raises(anabranch.StateReleasedError):
        await child.generate("x")


async def test_state_released_by_somebody_else(client: AsyncClient, stepped: Served):
    state = (await client.root("Hello").generate(max_tokens=1)).state
    stepped.delete(f"/anabranch/v1/states/{state.id}")
    with pytest.raises(anabranch.StateReleasedError):
        await state.generate("x")


async def test_duplicate_id(client: AsyncClient, stepped: Served):
    root = client.root("Hello")
    send(stepped, id=root.id, input=[{"text": "something else"}], sampling={"max_tokens": 0})
    with pytest.raises(anabranch.InvalidRequestError, match="already in use"):
        await root.fork()


async def test_foreign_state(client: AsyncClient, stepped: Served):
    async with AsyncClient(stepped.url) as other:
        with pytest.raises(anabranch.InvalidRequestError, match="another client"):
            client.state().inherit(other.root("Hello"))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda c, s: c.state().artifact(s, span=(0, 99)).generate("x"), anabranch.InvalidRequestError),
        (lambda c, s: c.state().artifact(s, span=(3, 1)).generate("x"), anabranch.InvalidRequestError),
        (lambda c, s: c.state().inherit(s, upto=99).generate("x"), anabranch.InvalidRequestError),
        (lambda c, s: s.generate("x", temperature=math.nan), anabranch.InvalidRequestError),
        (lambda c, s: s.generate("x", top_p=1e300), anabranch.InvalidRequestError),
        (lambda c, s: s.generate("x", max_tokens=-1), anabranch.InvalidRequestError),
        (lambda c, s: s.generate("x", regex="["), anabranch.InvalidRequestError),
        (lambda c, s: s.generate(""), anabranch.InvalidRequestError),
        (lambda c, s: s.generate(), anabranch.InvalidRequestError),
        (lambda c, s: s.append(tokens=[10**6]).generate(max_tokens=1), anabranch.InvalidRequestError),
        (lambda c, s: c.state().inherit(s).place("middle").generate("x"), anabranch.InvalidRequestError),
        (lambda c, s: c.state(rules="strict").inherit(s).artifact(s).generate("x"), anabranch.InvalidRequestError),
        (lambda c, s: c.state().inherit(s).place(start=8191).generate("x"), anabranch.PositionOverflowError),
        (lambda c, s: s.generate("x", max_tokens=8190), anabranch.ContextTooLongError),
        (lambda c, s: s.generate("x " * 1_000_000, max_tokens=1), anabranch.ContextTooLongError),
        (lambda c, s: s.generate("x" * 10_000_000), anabranch.InvalidRequestError),
    ],
)
async def test_bad_input(client: AsyncClient, stepped: Served, make: Any, error: type[anabranch.AnabranchError]):
    state = (await client.root("Hello").generate(max_tokens=2, **GREEDY)).state
    held = stepped.stats()["held_tokens"]
    with pytest.raises(error) as caught:
        await make(client, state)
    assert caught.value.code and caught.value.message
    assert stepped.stats()["held_tokens"] == held
    assert (await state.generate("x", max_tokens=1)).usage.generated_tokens == 1


async def test_a_reference_to_itself_cannot_be_built(client: AsyncClient):
    state = client.state()
    with pytest.raises(anabranch.InvalidRequestError, match="itself"):
        state.inherit(state)
