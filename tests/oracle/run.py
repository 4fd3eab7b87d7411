"""Sends a plan to a server over HTTP and holds every answer against the definition.

It does not start a server, and it takes nothing from the SDK but the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

import httpx
from torch import Tensor

from anabranch.wire import ExplainRequest, Explanation, GenerateResponse

from .brute import Node, View, look_all
from .dags import Plan, Planned

API = "/anabranch/v1"
TOLERANCE = 2e-4
"""Largest allowed difference of a log probability, where the model is well-conditioned; see `compare`."""
ROUNDINGS = 4


async def run_plan(base_url: str, plan: Plan, client: httpx.AsyncClient) -> list[Node]:
    """Run all waves; check lengths, usage and explanations on the way. The nodes come in the order of the plan."""
    nodes: list[Node] = []
    for wave in plan.waves:
        running: dict[str, asyncio.Task[GenerateResponse]] = {}
        for planned in wave.states:
            for ref in planned.request.refs:
                if ref.id in running:
                    await _accepted(base_url, ref.id, running[ref.id], client)
            running[planned.node.id] = asyncio.create_task(_generate(base_url, planned, client))
        responses = await asyncio.gather(*running.values())
        fresh = [_node(planned, response) for planned, response in zip(wave.states, responses, strict=True)]
        nodes += fresh
        views = look_all(nodes)
        for node, response in zip(fresh, responses, strict=True):
            check_usage(node, views[node.id], response)
            check_explanation(node, views, await _explain(base_url, node, client))
        await release(base_url, wave.release, client)
    return nodes


async def release(base_url: str, ids: Iterable[str], client: httpx.AsyncClient) -> None:
    """Let go of states, one after the other, in the given order."""
    for name in ids:
        answer = await client.delete(f"{base_url}{API}/states/{name}")
        assert answer.is_success, f"release of {name}: {answer.status_code} {answer.text}"


async def release_rest(base_url: str, plan: Plan, client: httpx.AsyncClient) -> None:
    """Let go of what the plan itself did not release, parents first."""
    gone = {name for wave in plan.waves for name in wave.release}
    await release(base_url, [state.node.id for state in plan.states if state.node.id not in gone], client)


async def _accepted(base_url: str, name: str, task: asyncio.Task, client: httpx.AsyncClient) -> None:
    """Wait until the server knows a state whose request is under way."""
    while True:
        over = task.done()
        answer = await client.get(f"{base_url}{API}/states/{name}")
        if answer.is_success:
            return
        if over:
            await task  # its own failure says more
            raise AssertionError(f"{name} was generated, but GET states/{name}: {answer.status_code} {answer.text}")
        await asyncio.sleep(0.005)


async def _generate(base_url: str, planned: Planned, client: httpx.AsyncClient) -> GenerateResponse:
    body = planned.request.model_dump(mode="json", exclude_none=True)
    answer = await client.post(f"{base_url}{API}/generate", json=body)
    assert answer.is_success, f"{planned.node.name}: {answer.status_code} {answer.text}"
    return GenerateResponse.model_validate_json(answer.content)


async def _explain(base_url: str, node: Node, client: httpx.AsyncClient) -> Explanation:
    body = ExplainRequest(id=node.id).model_dump(mode="json", exclude_none=True)
    answer = await client.post(f"{base_url}{API}/explain", json=body)
    assert answer.is_success, f"{node.name}: explain: {answer.status_code} {answer.text}"
    return Explanation.model_validate_json(answer.content)


def _node(planned: Planned, response: GenerateResponse) -> Node:
    """The planned node with what the model really wrote; its lengths must be the planned ones."""
    node, name = planned.node, planned.node.name
    scores = response.logprobs or ()
    assert response.id == node.id, f"{name}: asked for {node.id}, got {response.id}"
    assert len(response.tokens) == len(node.generated), f"{name}: {response.tokens}, expected {len(node.generated)}"
    assert tuple(score.token for score in scores) == response.tokens, f"{name}: logprobs are of other tokens: {scores}"
    assert all(len(dict(score.top)) >= 5 for score in scores), f"{name}: fewer than 5 top logprobs: {scores}"
    for index, score in enumerate(scores):
        listed = dict(score.top).get(score.token, score.logprob)
        assert abs(listed - score.logprob) < 1e-6, f"{name} token {index}: two logprobs, {score.logprob} and {listed}"
    top = tuple(dict(score.top) | {score.token: score.logprob} for score in scores)
    return replace(node, generated=response.tokens, top=top)


def check_usage(node: Node, view: View, response: GenerateResponse) -> None:
    """Token counts: visible before, computed now (nothing twice), generated."""
    usage = response.usage
    got = (usage.context_tokens, usage.computed_tokens, usage.generated_tokens)
    expected = (len(view.visible), len(node.input), len(node.generated))
    assert got == expected, f"{node.name}: usage (context, computed, generated) is {got}, expected {expected}"


def check_explanation(node: Node, views: dict[str, View], told: Explanation) -> None:
    """The compiled context, token by token: order, native and effective positions, what is handed on; and the start."""
    view = views[node.id]
    expected = [
        ((u, i), views[u].start + i, position, (u, i) in view.full) for (u, i), position in view.visible.items()
    ]
    got = [
        ((part.state, i), part.native + i - part.start, part.effective + i - part.start, part.propagate)
        for part in told.intervals
        for i in range(part.start, part.stop)
    ]
    for at, (mine, theirs) in enumerate(zip(expected, got, strict=False)):
        assert theirs == mine, f"{node.name}: explain: visible token {at} is {theirs}, expected {mine}"
    assert len(got) == len(expected), f"{node.name}: explain: {len(got)} visible tokens, expected {len(expected)}"
    assert told.context_tokens == len(expected), f"{node.name}: explain: context_tokens {told.context_tokens}"
    assert told.start == view.start, f"{node.name}: explain: start {told.start}, expected {view.start}"


def compare(
    nodes: list[Node], logprobs: dict[str, Tensor], in_fp32: Callable[[], dict[str, Tensor]] | None = None
) -> float:
    """Every generated token is the greedy one, and every returned logprob is right within TOLERANCE.

    Returns the largest difference of a logprob. For nodes that `run_plan` returned; `logprobs` best in fp64.
    `in_fp32` gives the same computed in fp32, and is called only if something is off by more: where the model is
    ill-conditioned, ROUNDINGS times what plain torch in fp32 is itself off is allowed to an fp32 server, which adds
    in another order.
    """
    worst = 0.0
    rough: dict[str, Tensor] | None = None
    for node in nodes:
        for index, (token, top) in enumerate(zip(node.generated, node.top, strict=True)):
            at = f"{node.name} generated token {index}"
            row = len(node.input) + index - 1
            follows = logprobs[node.id][row]
            best = int(follows.argmax())
            found = max(abs(got - float(follows[other])) for other, got in top.items())
            allowed = TOLERANCE
            if in_fp32 is not None and (found > allowed or token != best):
                rough = rough or in_fp32()
                rounding = float((rough[node.id][row] - follows)[[*top, best]].abs().max())
                allowed = max(TOLERANCE, ROUNDINGS * rounding)
            short = float(follows[best] - follows[token])
            assert token == best or (short <= allowed and allowed > TOLERANCE), (
                f"{at}: got {token}, expected {best}, which is likelier by {short:.2e}"
            )
            for other, got in top.items():
                expected = float(follows[other])
                off = abs(got - expected)
                assert off <= allowed, f"{at}: logprob of {other}: got {got:.6f}, expected {expected:.6f}"
                worst = max(worst, off)
            last = float(follows.topk(len(top)).values[-1])
            least = min(top.values())
            assert least >= last - allowed, f"{at}: top ends at {least:.6f}, expected {last:.6f}: likelier ones missing"
    return worst
