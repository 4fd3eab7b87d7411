"""The checks of run.py: they accept a server that follows the definition, and each rejects one that does not.

The server here is a fake, and the model is tiny; the real ones are test_server.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from anabranch.wire import Explanation, GenerateResponse, TokenLogprob

from . import tiny
from .brute import Node, logprobs
from .dags import plan
from .fake import Fake, Reply
from .run import TOLERANCE, compare, release_rest, run_plan

URL = "http://fake"


async def run(seed: int, fake: Fake) -> tuple[list[Node], float]:
    async with fake.client() as client:
        todo = plan(seed, tiny.tokenize)
        nodes = await run_plan(URL, todo, client)
        await release_rest(URL, todo, client)
    return nodes, compare(nodes, logprobs(nodes, tiny.llama()))


async def test_a_right_server_passes_and_every_state_is_released_once():
    waited = 0
    for seed in (1, 4, 13, 18, 22):
        fake = Fake()
        nodes, worst = await run(seed, fake)
        assert len(nodes) >= 3 and worst < 1e-4
        assert sorted(fake.released) == sorted(node.id for node in nodes)
        waited += fake.waited
    assert waited, "no child was sent before its parent had finished"


def tampered(change: Callable[[Reply], dict | None]) -> Callable[[Reply], Reply]:
    """Applies `change`'s fields to the first reply for which it has any."""
    done = False

    def fault(reply: Reply) -> Reply:
        nonlocal done
        fields = None if done else change(reply)
        done = done or fields is not None
        return reply if fields is None else reply.model_copy(update=fields)

    return fault


def generated(change: Callable[[GenerateResponse], dict]) -> Callable[[Reply], dict | None]:
    return lambda reply: change(reply) if isinstance(reply, GenerateResponse) and reply.tokens else None


def explained(change: Callable[[Explanation], dict]) -> Callable[[Reply], dict | None]:
    return lambda reply: change(reply) if isinstance(reply, Explanation) and len(reply.intervals) > 2 else None


def usage(field: str) -> Callable[[GenerateResponse], dict]:
    return lambda r: {"usage": r.usage.model_copy(update={field: getattr(r.usage, field) + 1})}


def first_interval(field: str, by: int) -> Callable[[Explanation], dict]:
    def change(told: Explanation) -> dict:
        first, *rest = told.intervals
        return {"intervals": (first.model_copy(update={field: getattr(first, field) + by}), *rest)}

    return change


def scores(response: GenerateResponse) -> tuple[TokenLogprob, ...]:
    assert response.logprobs
    return response.logprobs


def other_token(response: GenerateResponse) -> dict:
    """The second likeliest token in place of the likeliest, with its own, right logprob."""
    *rest, last = scores(response)
    token, score = last.top[1]
    wrong = last.model_copy(update={"token": token, "logprob": score})
    return {"tokens": (*response.tokens[:-1], token), "logprobs": (*rest, wrong)}


def other_logprob(response: GenerateResponse) -> dict:
    *rest, last = scores(response)
    *top, (token, score) = last.top
    return {"logprobs": (*rest, last.model_copy(update={"top": (*top, (token, score + 4e-4))}))}


def skipped_rank(response: GenerateResponse) -> dict:
    """The second likeliest is missing, and some unlikely token stands in with its right logprob: also wrong."""
    *rest, last = scores(response)
    unlikely = next(t for t in range(256) if t not in dict(last.top))
    return {"logprobs": (*rest, last.model_copy(update={"top": (last.top[0], *last.top[2:], (unlikely, -30.0))}))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (generated(other_token), "generated token .* which is likelier by"),
        (generated(other_logprob), "generated token .* logprob of"),
        (generated(skipped_rank), "generated token .* logprob of|likelier ones missing"),
        (generated(lambda r: {"tokens": r.tokens[1:]}), "state .* expected"),
        (generated(lambda r: {"logprobs": None}), "logprobs are of other tokens"),
        (generated(lambda r: {"id": "0" * 32}), "asked for"),
        (generated(usage("context_tokens")), "usage"),
        (generated(usage("computed_tokens")), "usage"),
        (generated(usage("generated_tokens")), "usage"),
        (explained(lambda e: {"start": e.start + 1}), "explain: start"),
        (explained(lambda e: {"context_tokens": e.context_tokens + 1}), "explain: context_tokens"),
        (explained(lambda e: {"intervals": e.intervals[:-1]}), "explain: .* visible tokens"),
        (explained(lambda e: {"intervals": e.intervals[:1] + e.intervals}), "explain: visible token 1"),
        (explained(lambda e: {"intervals": e.intervals[::-1]}), "explain: visible token 0"),
        (explained(first_interval("effective", 1)), "explain: visible token 0"),
        (explained(first_interval("native", 1)), "explain: visible token 0"),
        (explained(lambda e: {"intervals": _flipped(e)}), "explain: visible token 0"),
    ],
)
async def test_a_wrong_answer_is_rejected_by_name(change: Callable[[Reply], dict | None], message: str):
    with pytest.raises(AssertionError, match=f"seed 4 .*({message})"):
        await run(4, Fake(fault=tampered(change)))


def _flipped(told: Explanation) -> tuple:
    first, *rest = told.intervals
    return (first.model_copy(update={"propagate": not first.propagate}), *rest)


async def test_intervals_may_be_split_anywhere():
    """The fake sends one token per interval; joined ones mean the same."""

    def joined(reply: Reply) -> Reply:
        if not isinstance(reply, Explanation):
            return reply
        parts: list = []
        for part in reply.intervals:
            last = parts[-1] if parts else None
            if last and (last.state, last.stop, last.delta, last.propagate) == (
                part.state,
                part.start,
                part.delta,
                part.propagate,
            ):
                parts[-1] = last.model_copy(update={"stop": part.stop})
            else:
                parts.append(part)
        return reply.model_copy(update={"intervals": tuple(parts)})

    await run(4, Fake(fault=joined))


async def test_only_where_fp32_itself_is_rough_is_more_than_the_tolerance_allowed():
    async with Fake().client() as client:
        nodes = await run_plan(URL, plan(4, tiny.tokenize), client)
    exact = logprobs(nodes, tiny.llama())
    off = next(node for node in nodes if node.top and node.top[0])
    token = next(iter(off.top[0]))
    off.top[0][token] += 1.5 * TOLERANCE

    def rough(by: float) -> dict[str, Tensor]:
        return {name: rows + by for name, rows in exact.items()}

    with pytest.raises(AssertionError, match=f"logprob of {token}"):
        compare(nodes, exact)
    with pytest.raises(AssertionError, match=f"logprob of {token}"):
        compare(nodes, exact, lambda: rough(0.3 * TOLERANCE))
    assert compare(nodes, exact, lambda: rough(0.4 * TOLERANCE)) > TOLERANCE
