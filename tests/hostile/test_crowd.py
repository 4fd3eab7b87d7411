"""A thousand clients at once over one root: all are answered, every token is accounted for, others get through.

It measures too: `CROWD_JSON=file pytest -s tests/hostile/test_crowd.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

from anabranch import wire
from tests.engine.api import PATH, body, inherit
from tests.hostile.aftermath import STATES, idle
from tests.serving import Served

pytestmark = pytest.mark.engine

CROWD = 1000
ROOT, OWN, NEW = 40, 4, 2
"""Tokens."""
PLAIN_WORKERS = 4
SECONDS = 120.0


async def test_a_thousand_clients_over_one_root(besieged: Served):
    root = body(text=[1 + i for i in range(ROOT)])
    asked = [body([inherit(root["id"])], [97 + i % 26, *(48 + int(d) for d in f"{i:03d}")], NEW) for i in range(CROWD)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=besieged.url, timeout=SECONDS, limits=limits) as client:
        assert (await client.post(PATH, json=root)).status_code == 200
        alone = await _over(_bystander(besieged), asyncio.sleep(3))
        before = besieged.stats()
        crowd = asyncio.gather(*(_timed(client, one) for one in asked))
        plain = await _over(_bystander(besieged), crowd)
        answers, seconds = await crowd, max(took for _, took in crowd.result())
        await asyncio.to_thread(_check, besieged, before, asked, [answer for answer, _ in answers])
    async with httpx.AsyncClient(base_url=besieged.url, timeout=SECONDS) as client:  # idle connections were closed
        began = time.monotonic()
        released = await client.post(f"{STATES}/release", json={"ids": [root["id"], *(one["id"] for one in asked)]})
        releasing = time.monotonic() - began
    assert released.status_code == 200 and len(released.json()["released"]) == CROWD + 1, released.text
    after = await asyncio.to_thread(idle, besieged)
    assert after["states"] == after["held_tokens"] == 0 and after["freed"] - before["freed"] == CROWD + 1, after
    assert after["free_tokens"] + after["evictable_tokens"] == after["total_tokens"], after
    _report(
        crowd=CROWD,
        seconds=seconds,
        requests_per_second=CROWD / seconds,
        crowd_seconds=_quantiles([took for _, took in answers]),
        plain_alone_seconds=_quantiles([client for client, _ in alone]),
        plain_beside_seconds=_quantiles([client for client, _ in plain]),
        plain_beside_server_seconds=_quantiles([server for _, server in plain]),
        release_all_seconds=releasing,
    )


def _check(served: Served, before: dict[str, Any], asked: list[dict[str, Any]], answers: list[httpx.Response]) -> None:
    for one, answer in zip(asked, answers, strict=True):
        assert answer.status_code == 200, answer.text
        found = wire.GenerateResponse.model_validate_json(answer.content)
        assert found.id == one["id"] and len(found.tokens) == NEW and found.kept, answer.text
        assert found.usage == wire.Usage(
            context_tokens=ROOT, reused_tokens=ROOT, computed_tokens=OWN, generated_tokens=NEW
        ), answer.text
    after = idle(served)
    assert after["states"] - before["states"] == after["created"] - before["created"] == CROWD, after
    assert after["held_tokens"] - before["held_tokens"] == CROWD * (OWN + NEW), after
    assert after["evictions"] == before["evictions"] and after["failed"] == before["failed"], after
    pool = sum(after[f"{part}_tokens"] for part in ("free", "evictable", "held", "in_use"))
    assert pool == after["total_tokens"], after


async def _timed(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[httpx.Response, float]:
    """A thousand connections at once can be more than the machine's backlog takes: like the SDK, ask again then."""
    began = time.monotonic()
    while True:
        try:
            return await client.post(PATH, json=asked), time.monotonic() - began
        except httpx.NetworkError:
            assert time.monotonic() - began < SECONDS, "the server does not take its connection"


def _bystander(served: Served) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.hostile.bystander", served.url, str(PLAIN_WORKERS)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def _over(bystander: subprocess.Popen[str], what: Awaitable[Any]) -> list[tuple[float, float]]:
    """What a bystander measured until `what` was over."""
    try:
        await what
    except BaseException:
        bystander.kill()
        raise
    text, _ = await asyncio.to_thread(bystander.communicate, "")
    assert bystander.returncode == 0, text
    return json.loads(text)


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 4) for name, share in at.items()} | {
        "max": round(ordered[-1], 4),
        "count": len(ordered),
    }


def _report(**found: Any) -> None:
    print("\n" + json.dumps(found))
    if name := os.environ.get("CROWD_JSON"):
        Path(name).write_text(json.dumps(found, indent=1) + "\n")
