"""Words for the life of a request: begin it, catch it at a stage, end it, and see that nothing is left of it.

The contract itself is spoken by `tests/engine/api.py`; here are the connections and the waiting.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from anabranch import wire
from tests.engine.api import PATH, body, inherit, ok, send
from tests.serving import Served

STATES = "/anabranch/v1/states"
LOGPROBS = {"logprobs": True, "top_logprobs": 3}
ENDS = ("created", "cancelled", "failed", "rejected")
"""Events of which each request brings about exactly one."""
TOLERANCE = 2e-4
FOREVER = 1500
"""More tokens than any request here lives to generate, about 10 s."""
_EVENT: TypeAdapter[Any] = TypeAdapter(wire.Event)  # pyright: ignore[reportArgumentType]
_threads = ThreadPoolExecutor(128)


@dataclass(frozen=True)
class Live(Served):
    """A server, asked over connections that stay open, in the name of one API key or of none."""

    http: httpx.Client
    key: str | None = None
    others: list[Live] = field(default_factory=list)
    """The same server in the name of other keys."""

    @classmethod
    def of(cls, served: Served, key: str | None = None) -> Live:
        return cls(served.url, served.model_dir, served.log_file, served.process, _client(served.url, key), key)

    def named(self, key: str | None) -> Live:
        """The same server, in the name of another key."""
        if key == self.key:
            return self
        known = next((one for one in self.others if one.key == key), None)
        if known is None:
            known = Live.of(self, key)
            self.others.append(known)
        return known

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def delete(self, path: str) -> httpx.Response:
        return self.http.delete(path)

    def info(self, state: str) -> httpx.Response:
        return self.get(f"{STATES}/{state}")

    def listed(self) -> set[str]:
        return {one["id"] for one in self.get(STATES).json()["states"]}

    def release(self, *states: str) -> dict[str, list[str]]:
        return self.post(f"{STATES}/release", ids=list(states)).json()

    def flush(self) -> httpx.Response:
        """SGLang's own control: clears the whole pool, when nothing runs. Its last step may not be over yet."""
        self.rest()
        return self.post("/flush_cache?timeout=10")

    def rest(self, seconds: float = 60) -> dict[str, Any]:
        """Wait until nothing runs; returns the stats, which must add up."""
        until(lambda: _idle(self.stats()), seconds)
        stats = self.stats()
        exact(stats)
        return stats

    def warm_up(self) -> None:
        """The first forward passes of a process take long: longer than some servers let a request run."""
        plain = {"input_ids": [65] * 40, "sampling_params": {"max_new_tokens": 4}}
        until(lambda: self.post("/generate", **plain).status_code == 200, seconds=120)

    def give_all_up(self) -> dict[str, Any]:
        """Release every state of every key; returns the stats."""
        self.rest()
        for one in (self, *self.others):
            if (listed := one.get(STATES)).status_code == 200 and (ids := [s["id"] for s in listed.json()["states"]]):
                one.release(*ids)
        return self.rest()

    def close(self) -> None:
        for one in (self, *self.others):
            one.http.close()


def _client(url: str, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=120, limits=httpx.Limits(max_connections=None))


def _idle(stats: dict[str, Any]) -> bool:
    return not (stats["running"] or stats["waiting"] or stats["in_use_tokens"])


def exact(stats: dict[str, Any]) -> None:
    """Every token of the pool is somewhere, and only once. (`in_use` is what is left over: it is never below zero.)"""
    kinds = [stats[f"{kind}_tokens"] for kind in ("free", "evictable", "held", "in_use")]
    assert sum(kinds) == stats["total_tokens"], stats
    assert min(kinds) >= 0, stats


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def begin(served: Served, request: dict[str, Any]) -> Future[httpx.Response]:
    """Send a request and do not wait for its answer."""
    return _threads.submit(send, served, **request)


def begun(live: Live, request: dict[str, Any], status: str = "running") -> Future[httpx.Response]:
    """Send a request and wait until the server has accepted it."""
    answer = begin(live, request)
    until(lambda: answer.done() or live.info(request["id"]).json().get("status") == status)
    assert not answer.done(), answer.result().text
    return answer


@contextmanager
def decoding(live: Live, request: dict[str, Any]) -> Iterator[Iterator[Any]]:
    """A stream whose first token has come: the events after it. Leaving drops the connection."""
    with live.http.stream("POST", PATH, json={**request, "stream": True}) as stream:
        events = map(_event, filter(None, stream.iter_lines()))
        first = next(events)
        assert isinstance(first, wire.DeltaEvent), first
        yield events  # held by the caller's frame: a generator that is collected closes the connection


def _event(line: str) -> Any:
    return _EVENT.validate_json(line.removeprefix("data: "))


def parsed(answer: httpx.Response) -> wire.GenerateResponse:
    assert answer.status_code == 200, answer.text
    return wire.GenerateResponse.model_validate_json(answer.content)


@contextmanager
def occupied(live: Live, requests: int = 8) -> Iterator[None]:
    """So many requests run, for 1 s at least, until this ends; then they are cancelled."""
    with ExitStack() as streams:
        bodies = [body(text=[40 + i], n=400, keep=False) for i in range(requests)]
        running = [streams.enter_context(decoding(live, one)) for one in bodies]
        yield
        assert len(running) == requests
        for one in bodies:
            assert live.post(f"{STATES}/{one['id']}/cancel").status_code == 204, "it ended by itself meanwhile"


def gone(live: Live, state: str) -> None:
    """No half of it is to be seen, and it can be used by nobody."""
    assert live.info(state).status_code in (404, 410)
    assert state not in live.listed()
    assert send(live, **body([inherit(state)], [65], 1)).status_code in (404, 410)


def same(one: wire.GenerateResponse, other: wire.GenerateResponse) -> None:
    """The same tokens for the same reasons: equal logprobs, up to the order of sums in fp32."""
    assert one.tokens == other.tokens
    assert one.logprobs is not None
    assert other.logprobs is not None
    values = [[value for token in found for _, value in token.top] for found in (one.logprobs, other.logprobs)]
    assert values[0] == pytest.approx(values[1], abs=TOLERANCE)


def asked_of(live: Live, state: str, **more: Any) -> wire.GenerateResponse:
    """What a state answers: greedily, with logprobs, leaving nothing."""
    return ok(live, [inherit(state)], [65, 66], 6, keep=False, sampling=LOGPROBS, **more)


def ends(live: Live) -> dict[str, int]:
    stats = live.stats()
    return {event: stats[event] for event in ENDS}


@contextmanager
def ending(live: Live, **expected: int) -> Iterator[None]:
    """What happens in here ends so many requests in these ways, and none in others: each exactly once."""
    before = ends(live)
    yield
    live.rest()
    after = ends(live)
    came = {event: after[event] - before[event] for event in ENDS}
    assert came == {event: expected.get(event, 0) for event in ENDS}, f"{came}, expected {expected}"


def noise(seed: int, size: int) -> list[int]:
    """Random byte tokens, the same for the same seed."""
    dice = random.Random(seed)
    return [dice.randrange(256) for _ in range(size)]


def codes(answers: Iterable[httpx.Response]) -> list[str]:
    """How each ended: its reason if it was answered, else the code of the error."""
    return [
        answer.json()["finish_reason"] if answer.status_code == 200 else answer.json()["error"]["code"]
        for answer in answers
    ]
