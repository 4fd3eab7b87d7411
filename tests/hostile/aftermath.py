"""What must hold of a server after anything hostile: alive, nothing left, the books balance, a right answer.

It sends nothing hostile itself.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tests.engine.api import PATH, new_id
from tests.serving import Served

STATES = "/anabranch/v1/states"
FAULTS = re.compile(r"Traceback|Exception in ASGI|AssertionError|memory leak|[Ii]nternal [Ee]rror")
AT_ONCE = 4096
PATIENCE = 60.0


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one normal question over a root, and their log probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, served: Served) -> Answer:
        root = _made(served, input=[{"text": "The river divides"}], sampling={"max_tokens": 0})
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True}
        refs = [{"kind": "inherit", "id": root["id"]}]
        found = _made(served, refs=refs, input=[{"text": " and rejoins"}], sampling=sampling)
        assert found["usage"]["context_tokens"] == 17 and found["usage"]["computed_tokens"] == 12, found["usage"]
        return cls(tuple(found["tokens"]), tuple(one["logprob"] for one in found["logprobs"]))

    def agrees(self, other: Answer) -> bool:
        close = all(abs(a - b) < 1e-3 for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and close


def settled(served: Served, before: Answer, log: str) -> None:
    """Wait until nothing runs, then check everything. `log` is what the server printed meanwhile."""
    assert served.process.poll() is None, f"the server ended:\n{served.log[-4000:]}"
    idle(served)
    again = Answer.of(served)
    assert before.agrees(again), f"a normal request is answered otherwise: {again}, not {before}"
    empty(served)
    fault = FAULTS.search(log)
    assert fault is None, f"the server's log says:\n{log[max(0, fault.start() - 2000) : fault.start() + 4000]}"


def idle(served: Served) -> dict[str, Any]:
    """The stats once nothing runs."""
    deadline = time.monotonic() + PATIENCE
    while (stats := served.stats())["running"] or stats["waiting"] or stats["in_use_tokens"]:
        assert time.monotonic() < deadline, f"requests never end: {stats}"
        time.sleep(0.1)
    return stats


def empty(served: Served) -> None:
    """Release every state, all in one request; the whole pool is then free."""
    release(served)
    stats = idle(served)
    held = ("states", "held_tokens", "shared_tokens", "pinned_tokens", "evicted_tokens", "in_use_tokens")
    assert not any(stats[name] for name in held), stats
    assert stats["free_tokens"] + stats["evictable_tokens"] == stats["total_tokens"], stats


def release(served: Served) -> list[str]:
    ids = [state["id"] for state in served.get(STATES).json()["states"]]
    for at in range(0, len(ids), AT_ONCE):
        some = ids[at : at + AT_ONCE]
        answer = served.post(f"{STATES}/release", ids=some)
        assert answer.status_code == 200 and answer.json()["released"] == some, answer.text
    return ids


def _made(served: Served, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(served.url + PATH, json={"id": new_id(), **fields}, timeout=PATIENCE)
    assert answer.status_code == 200, f"a normal request is refused: {answer.text}"
    return answer.json()
