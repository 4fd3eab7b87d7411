"""The HTTP contract as the soak program uses it: one short word a route, and a deadline on everything.

Not a client: no retries, and an error is an answer like any other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

API = "/anabranch/v1"
DEADLINE = 120.0
"""Seconds after which an answer counts as never."""


class Violation(AssertionError):
    """The server did something that it must not do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`code` is "ok", the code of a typed error, or the status of an error that is not one of ours."""

    status: int
    code: str
    message: str = ""
    body: Any = None

    @property
    def ok(self) -> bool:
        return self.code == "ok"


@dataclass(slots=True)
class Calls:
    """`operator` is the API key for what belongs to no tenant; none if the server has no keys."""

    url: str
    http: httpx.AsyncClient
    operator: str | None = None

    async def generate(self, body: dict[str, Any], key: str | None) -> Answer:
        return await self._send("POST", f"{API}/generate", body, key)

    async def stream(self, body: dict[str, Any], key: str | None) -> tuple[Answer, list[dict[str, Any]]]:
        """The whole stream: its end as an answer, and the events before it."""
        async with _deadline(f"stream of {body['id']}"), self.opened(body, key) as events:
            seen = [event async for event in events]
        last = seen[-1] if seen else {}
        match last.get("type"):
            case "final":
                return Answer(200, "ok", body=last["response"]), seen[:-1]
            case "error":
                return Answer(last.get("status", 200), last["error"]["code"], last["error"]["message"]), seen[:-1]
        raise Violation(f"the stream of {body['id']} ended without a final event: {last}")

    async def stream_a_little(self, body: dict[str, Any], key: str | None, count: int) -> None:
        """Read `count` events and hang up."""
        async with _deadline(f"stream of {body['id']}"), self.opened(body, key) as events:
            async for _ in events:
                count -= 1
                if count <= 0:
                    return

    @asynccontextmanager
    async def opened(self, body: dict[str, Any], key: str | None) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        path = f"{self.url}{API}/generate"
        async with self.http.stream("POST", path, json={**body, "stream": True}, headers=_headers(key)) as reply:
            yield _events(reply)

    async def release(self, state_id: str, key: str | None) -> Answer:
        return await self._send("DELETE", f"{API}/states/{state_id}", None, key)

    async def release_batch(self, ids: Sequence[str], key: str | None) -> Answer:
        return await self._send("POST", f"{API}/states/release", {"ids": list(ids)}, key)

    async def renew(self, ids: Sequence[str], key: str | None, lease: float | None = None) -> Answer:
        """One by its own route; several in a batch."""
        body: dict[str, Any] = {} if lease is None else {"lease": lease}
        if len(ids) == 1:
            return await self._send("POST", f"{API}/states/{ids[0]}/renew", body, key)
        return await self._send("POST", f"{API}/states/renew", {"ids": list(ids), **body}, key)

    async def cancel(self, state_id: str, key: str | None) -> Answer:
        return await self._send("POST", f"{API}/states/{state_id}/cancel", {}, key)

    async def explain(self, state_id: str, key: str | None) -> Answer:
        return await self._send("POST", f"{API}/explain", {"id": state_id}, key)

    async def info(self, state_id: str, key: str | None) -> Answer:
        return await self._send("GET", f"{API}/states/{state_id}", None, key)

    async def listed(self, key: str | None) -> set[str]:
        answer = await self._send("GET", f"{API}/states", None, key)
        if not answer.ok:
            raise Violation(f"GET states: {answer.status} {answer.message}")
        return {state["id"] for state in answer.body["states"]}

    async def stats(self) -> dict[str, Any]:
        answer = await self._send("GET", f"{API}/stats", None, self.operator)
        if not answer.ok:
            raise Violation(f"GET stats: {answer.status} {answer.message}")
        return answer.body

    async def plain(self, prompt: Sequence[int], tokens: int) -> Answer:
        """SGLang's own route, no state."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        return await self._send("POST", "/generate", body, self.operator)

    async def abort(self, state_id: str | None) -> Answer:
        """Through SGLang: one request, or all of them."""
        body = {"rid": state_id} if state_id is not None else {"rid": "", "abort_all": True}
        return await self._send("POST", "/abort_request", body, self.operator)

    async def flush(self) -> Answer:
        return await self._send("POST", "/flush_cache", None, self.operator)

    async def _send(self, method: str, path: str, body: Any, key: str | None) -> Answer:
        async with _deadline(f"{method} {path}"):
            reply = await self.http.request(method, f"{self.url}{path}", json=body, headers=_headers(key))
        return _answer(reply)


@asynccontextmanager
async def _deadline(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(DEADLINE):
            yield
    except TimeoutError:
        raise Violation(f"{what}: no answer in {DEADLINE:.0f} s") from None


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; what was refused before it began comes as one error event."""
    if not reply.is_success:
        await reply.aread()
        answer = _answer(reply)
        error = {"code": answer.code, "message": answer.message}
        yield {"type": "error", "status": answer.status, "error": error}
        return
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _answer(reply: httpx.Response) -> Answer:
    try:
        body = reply.json() if reply.content else None
    except ValueError:
        body = None
    if reply.is_success:
        return Answer(reply.status_code, "ok", body=body)
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and "code" in error:
        return Answer(reply.status_code, str(error["code"]), str(error.get("message")), body)
    return Answer(reply.status_code, f"http {reply.status_code}", reply.text[:300], body)
