"""A server that answers from the definition, all routes of the soak program included, with one fault put in on demand.

It proves that the program and its checks pass on right answers and fail on wrong ones; nothing about anabranch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import httpx

from anabranch.wire import GenerateRequest, TextPiece, TokensPiece
from tests.oracle import tiny
from tests.oracle.brute import Node, View, logprobs, look_all

from .calls import API

POOL = 4096


class Refused(Exception):
    """An error of the contract, by its code."""


@dataclass(slots=True)
class Kept:
    node: Node
    body: dict[str, Any]
    reply: dict[str, Any]
    key: str | None
    lease: float | None
    until: float = inf

    def renew(self, lease: float | None = None) -> None:
        self.lease = lease or self.lease
        self.until = inf if self.lease is None else time.monotonic() + self.lease


@dataclass(slots=True)
class Running:
    body: dict[str, Any]
    key: str | None
    result: asyncio.Future[dict[str, Any] | None]
    cancelled: bool = False
    keep: bool = True


@dataclass(slots=True)
class Fake:
    """`wrong` names the one thing that it does wrong, from the second chance on; nothing if it is empty."""

    wrong: str = ""
    nodes: dict[str, Node] = field(default_factory=dict)
    states: dict[str, Kept] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    chances: int = 0

    def errs(self, how: str) -> bool:
        self.chances += self.wrong == how
        return self.wrong == how and self.chances > 1

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """For httpx.MockTransport."""
        body = json.loads(request.content) if request.content else {}
        key = request.headers.get("Authorization")
        where = (request.method, *request.url.path.removeprefix(API).strip("/").split("/"))
        try:
            if where == ("POST", "generate") and request.url.path.startswith(API):
                self.asked.append(request.content.decode())
                events = self._generate(body, key)
                if body.get("stream"):
                    return httpx.Response(200, content=_stream(await anext(events), events))
                return httpx.Response(200, json=[event async for event in events][-1]["response"])
            return self._other(where, body, key)
        except Refused as refused:
            status = {"invalid_request": 400, "state_not_found": 404, "state_released": 410}[str(refused)]
            return httpx.Response(status, json={"error": {"code": str(refused), "message": "refused"}})

    def _other(self, where: tuple[str, ...], body: dict[str, Any], key: str | None) -> httpx.Response:
        match where:
            case "GET", "states":
                found = [{"id": one} for one, kept in [*self.states.items()] if self._is_there(one, kept.key, key)]
                return httpx.Response(200, json={"states": found})
            case "GET", "states", state_id if state_id in self.running:
                return httpx.Response(200, json={})
            case "GET", "states", state_id:
                return httpx.Response(200, json={"id": self._state(state_id, key).node.id})
            case "DELETE", "states", state_id:
                self._release(state_id, key)
                return httpx.Response(204)
            case "POST", "states", "release":
                known = [one for one in body["ids"] if self._is_there(one, None, key, own=True)]
                for one in known:
                    self._release(one, key)
                unknown = [one for one in body["ids"] if one not in known]
                return httpx.Response(200, json={"released": known, "unknown": unknown})
            case "POST", "states", "renew":
                known = [one for one in body["ids"] if self._is_there(one, None, key, own=True)]
                for one in known:
                    self.states[one].renew(body.get("lease"))
                lost = [one for one in body["ids"] if one not in known]
                return httpx.Response(200, json={"renewed": known, "lost": lost})
            case "POST", "states", state_id, "renew":
                self._state(state_id, key).renew(body.get("lease"))
                return httpx.Response(200, json={})
            case "POST", "states", state_id, "cancel":
                if (run := self.running.get(state_id)) is not None and run.key == key:
                    run.cancelled = True
                else:
                    self._state(state_id, key)
                return httpx.Response(200, json={})
            case "POST", "explain":
                return httpx.Response(200, json=self._explained(self._state(body["id"], key).node))
            case "GET", "stats":
                held = sum(len(kept.node.own) for kept in self.states.values())
                free = POOL - held - self.errs("sum")
                fixed = {"total_tokens": POOL, "evictable_tokens": 0, "in_use_tokens": 0, "waiting": 0}
                counts = {"states": len(self.states), "running": len(self.running)}
                return httpx.Response(200, json={**fixed, **counts, "free_tokens": free, "held_tokens": held})
            case "POST", "abort_request":
                for state_id, run in self.running.items():
                    run.cancelled |= bool(body.get("abort_all")) or state_id == body["rid"]
            case "POST", "flush_cache":
                if self.running:
                    return httpx.Response(400)
                self.released |= self.states.keys()
                self.states.clear()
            case "POST", "generate":
                node = Node("plain", input=tuple(body["input_ids"]))
                for _ in range(body["sampling_params"]["max_new_tokens"]):
                    node = replace(node, generated=(*node.generated, self._next(node)[0][0]))
                meta = {"finish_reason": {"type": "length"}}
                return httpx.Response(200, json={"output_ids": node.generated, "meta_info": meta})
        return httpx.Response(200)

    async def _generate(self, body: dict[str, Any], key: str | None) -> AsyncIterator[dict[str, Any]]:
        """Events. A client that goes away ends this by closing it, and no state is left."""
        asked, told = GenerateRequest.model_validate(body), {k: v for k, v in body.items() if k != "stream"}
        before = self.running.get(asked.id) or self.states.get(asked.id)
        if before is not None:
            if before.body != told or before.key != key:
                raise Refused("invalid_request")
            reply = before.reply if isinstance(before, Kept) else await asyncio.shield(before.result)
            if reply is None:
                raise Refused("state_not_found")
            text = "another" if self.errs("twice") else reply["text"]
            yield {"type": "final", "response": {**reply, "text": text}}
            return
        if asked.id in self.released:
            raise Refused("state_released")
        run = self.running[asked.id] = Running(told, key, asyncio.get_running_loop().create_future())
        try:
            for ref in asked.refs:
                if ref.id in self.running:
                    await asyncio.shield(self.running[ref.id].result)
                self._state(ref.id, key).renew()
            node, scores = Node(asked.id, asked.refs, asked.place, _tokens(asked)), []
            while len(node.generated) < asked.sampling.max_tokens and not run.cancelled:
                await asyncio.sleep(0.001)
                ranked = self._next(node)
                node = replace(node, generated=(*node.generated, ranked[0][0]))
                scores.append({"token": ranked[0][0], "logprob": ranked[0][1], "top": ranked})
                yield {"type": "delta", "text": "x", "tokens": [ranked[0][0]]}
            reply = self._end(asked, run, node, scores)
            run.result.set_result(reply)
            yield {"type": "final", "response": reply}
        finally:
            del self.running[asked.id]
            if not run.result.done():
                run.result.set_result(None)

    def _end(self, asked: GenerateRequest, run: Running, node: Node, scores: list[dict[str, Any]]) -> dict[str, Any]:
        cut = run.cancelled and len(node.generated) < asked.sampling.max_tokens
        kept = run.keep and asked.keep and (not cut or asked.keep_partial)
        if self.errs("answer") and node.generated:
            node = replace(node, generated=(*node.generated[:-1], (node.generated[-1] + 1) % 256))
            scores[-1]["token"] = node.generated[-1]
        self.nodes[node.id] = node
        visible = len(self._views(node)[node.id].visible) + self.errs("usage")
        reply = {
            "id": node.id,
            "text": "x" * len(node.generated),
            "tokens": list(node.generated),
            "logprobs": scores if asked.sampling.logprobs else None,
            "finish_reason": "cancelled" if cut else "length",
            "usage": {
                "context_tokens": visible,
                "reused_tokens": visible,
                "computed_tokens": len(node.input) - self.errs("computed"),
                "generated_tokens": len(node.generated),
            },
            "timings": {},
            "kept": kept,
        }
        if kept and not self.errs("loss"):
            self.states[node.id] = Kept(node, run.body, reply, run.key, asked.lease)
            self.states[node.id].renew()
        elif not kept:
            self.released.add(node.id)
        return reply

    # ------------------------------------------------------------ who is there

    def _is_there(self, state_id: str, of: str | None, key: str | None, *, own: bool = False) -> bool:
        kept = self.states.get(state_id)
        if kept is not None and kept.until < time.monotonic() and self.wrong != "lease":
            del self.states[state_id]
            return False
        return kept is not None and (kept.key if own else of) == key

    def _state(self, state_id: str, key: str | None) -> Kept:
        kept = self.states.get(state_id)
        if kept is not None and (self._is_there(state_id, kept.key, key) or self.errs("tenant")):
            return kept
        raise Refused("state_released" if state_id in self.released else "state_not_found")

    def _release(self, state_id: str, key: str | None) -> None:
        if (run := self.running.get(state_id)) is not None and run.key == key:
            run.keep = False
            return
        self._state(state_id, key)
        if not self.errs("leak"):
            del self.states[state_id]
        self.released.add(state_id)

    # ------------------------------------------------------------ what the model says

    def _lineage(self, node: Node) -> list[Node]:
        order: dict[str, Node] = {}
        for ref in node.refs:
            order |= {one.id: one for one in self._lineage(self.nodes[ref.id]) if one.id not in order}
        return [*order.values(), node]

    def _views(self, node: Node) -> dict[str, View]:
        return look_all(self._lineage(node))

    def _next(self, node: Node) -> list[tuple[int, float]]:
        follows = logprobs(self._lineage(node), tiny.llama())[node.id][-1]
        values, tokens = follows.topk(4)
        return list(zip(tokens.tolist(), values.tolist(), strict=True))

    def _explained(self, node: Node) -> dict[str, Any]:
        views = self._views(node)
        view = views[node.id]
        intervals = [
            {"state": u, "start": i, "stop": i + 1, "native": views[u].start + i, "effective": at}
            | {"propagate": (u, i) in view.full}
            for (u, i), at in view.visible.items()
        ]
        start = view.start + self.errs("explain")
        return {"intervals": intervals, "start": start, "context_tokens": len(intervals)}


def _tokens(asked: GenerateRequest) -> tuple[int, ...]:
    given: list[int] = []
    for piece in asked.input:
        assert isinstance(piece, TextPiece | TokensPiece)
        given += tiny.tokenize(piece.text) if isinstance(piece, TextPiece) else piece.tokens
    return tuple(given)


async def _stream(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    yield _line(first)
    try:
        async for event in rest:
            yield _line(event)
    except Refused as refused:
        yield _line({"type": "error", "error": {"code": str(refused), "message": "refused"}})


def _line(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()
