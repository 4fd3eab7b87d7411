"""A server in a few lines that answers from the definition, with a fault put in on demand.

It proves that the checks in run.py pass on right answers and fail on wrong ones; it proves nothing about anabranch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from anabranch.wire import (
    ExplainRequest,
    Explanation,
    GenerateRequest,
    GenerateResponse,
    Interval,
    TextPiece,
    Timings,
    TokenLogprob,
    TokensPiece,
    Usage,
)

from . import tiny
from .brute import Node, View, logprobs, look_all
from .run import API

Reply = GenerateResponse | Explanation


@dataclass(slots=True)
class Fake:
    """Use as `Fake().client()`. `fault` may change any reply before it is sent."""

    fault: Callable[[Reply], Reply] = lambda reply: reply
    nodes: dict[str, Node] = field(default_factory=dict)
    sealed: dict[str, asyncio.Event] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    waited: int = 0

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer), base_url="http://fake")

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        match request.method, request.url.path.removeprefix(API).strip("/").split("/"):
            case "POST", ["generate"]:
                reply = await self._generate(GenerateRequest.model_validate_json(request.content))
            case "POST", ["explain"]:
                reply = self._explain(ExplainRequest.model_validate_json(request.content).id)
            case "GET", ["states", name]:
                return httpx.Response(200 if name in self.sealed else 404)
            case "DELETE", ["states", name]:
                self.released.append(name)
                return httpx.Response(204)
            case _:
                return httpx.Response(404)
        return httpx.Response(200, content=self.fault(reply).model_dump_json())

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        assert not {ref.id for ref in request.refs} & set(self.released)
        self.sealed[request.id] = asyncio.Event()
        for ref in request.refs:
            self.waited += not self.sealed[ref.id].is_set()
            await self.sealed[ref.id].wait()
        await asyncio.sleep(0.02)
        given: list[int] = []
        for piece in request.input:
            assert isinstance(piece, TextPiece | TokensPiece)
            given += tiny.tokenize(piece.text) if isinstance(piece, TextPiece) else piece.tokens
        node, scores = Node(request.id, request.refs, request.place, tuple(given)), []
        for _ in range(request.sampling.max_tokens):
            follows = logprobs([*self.nodes.values(), node], tiny.llama())[node.id][-1]
            values, tokens = follows.topk(request.sampling.top_logprobs)
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            scores.append(TokenLogprob(token=top[0][0], logprob=top[0][1], top=top))
            node = Node(node.id, node.refs, node.place, node.input, (*node.generated, top[0][0]))
        self.nodes[node.id] = node
        self.sealed[node.id].set()
        usage = Usage(
            context_tokens=len(self._view(node.id).visible),
            reused_tokens=0,
            computed_tokens=len(given),
            generated_tokens=len(scores),
        )
        return GenerateResponse(
            id=node.id,
            text="",
            tokens=node.generated,
            logprobs=tuple(scores),
            finish_reason="length",
            usage=usage,
            timings=Timings(),
        )

    def _explain(self, name: str | None) -> Explanation:
        assert name is not None
        views, view = look_all(self.nodes.values()), self._view(name)
        one_by_one = [
            Interval(
                state=u,
                start=i,
                stop=i + 1,
                native=views[u].start + i,
                effective=at,
                propagate=(u, i) in view.full,
            )
            for (u, i), at in view.visible.items()
        ]
        return Explanation(intervals=tuple(one_by_one), start=view.start, context_tokens=len(one_by_one))

    def _view(self, name: str) -> View:
        return look_all(self.nodes.values())[name]
