"""Two ranks on two cores, over gloo: under everything that changes a store, they stay the same, step by step."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from anabranch_server.openapi import PREFIX
from tests.engine.api import PATH, artifact, body, inherit
from tests.hostile import digests
from tests.hostile.aftermath import Answer, settled
from tests.hostile.remains import mortal
from tests.serving import stop

pytestmark = pytest.mark.engine

RANKS = 2
FLAGS = (
    *("--tp", str(RANKS), "--max-total-tokens", "1200", "--max-running-requests", "16", "--log-level", "warning"),
    *("--chunked-prefill-size", "48", "--enable-mixed-chunk"),
)
ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(RANKS)),
    "SGLANG_TEST_RETRACT": "1",
}
WORKERS = 10
ROUNDS = 40
NOTES = 6
"""Each is of 50 steps."""


def test_ranks_agree_step_by_step(tiny_model: Path, tmp_path: Path):
    notes = tmp_path / "digests"
    environment = ENV | digests.variables(notes)
    with mortal(tiny_model, tmp_path / "log", FLAGS, environment) as (served, remains):
        before = Answer.of(served)
        outcomes = asyncio.run(_crowd(served.url))
        print(f"\n{dict(outcomes)}\n{served.stats()}")
        stats = served.stats()
        assert stats["evictions"] and stats["rebuilds"] and stats["cancelled"] and stats["expired"], stats
        settled(served, before, served.log)
        stop(served.process)
        left = remains.left()
        assert not left, left
    print(f"{digests.compare(notes, RANKS, least=NOTES)} notes of {RANKS} ranks agree")


def test_a_rank_that_differs_is_named(tmp_path: Path):
    (tmp_path / "rank-0").write_text("50 a\n100 b\n150 c\n200")
    (tmp_path / "rank-1").write_text("50 a\n100 b\n")
    assert digests.compare(tmp_path, 2) == 2
    with pytest.raises(digests.Differs, match="at least 3"):
        digests.compare(tmp_path, 2, least=3)
    (tmp_path / "rank-1").write_text("50 a\n100 x\n")
    with pytest.raises(digests.Differs, match="rank 1 differs from rank 0 in note 1: '100 x'"):
        digests.compare(tmp_path, 2)
    with pytest.raises(digests.Differs, match="never noted"):
        digests.compare(tmp_path, 3)


async def _crowd(url: str) -> Counter[str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        root = (await client.post(PATH, json=body(text="The river " * 4))).json()["id"]
        found: list[str] = [root]
        outcomes: Counter[str] = Counter()
        await asyncio.gather(*(_worker(client, random.Random(n), found, outcomes) for n in range(WORKERS)))
    return outcomes


async def _worker(client: httpx.AsyncClient, dice: random.Random, found: list[str], outcomes: Counter[str]) -> None:
    """Forks, joins, streams that are dropped, cancellations, short leases, releases, inputs that push others out."""
    for _ in range(ROUNDS):
        act = dice.choice(["fork", "fork", "join", "join", "drop", "cancel", "lease", "release", "large", "plain"])
        parents = dice.sample(found, min(len(found), 3))
        refs = [inherit(parents[0])]
        text, n = "x" * dice.randint(1, 12), dice.randint(0, 12)
        if act == "join":
            refs = [inherit(parents[0]), *(artifact(one) for one in parents[1:])]
            asked = body(refs, text, n, place=dice.choice(["keep", "concat"]))
        elif act == "large":
            asked = body([], "y" * 300, 0)
        elif act in ("drop", "cancel"):
            asked = body(refs, text, 150, stream=True, keep_partial=act == "cancel" and dice.random() < 0.5)
        else:
            asked = body(refs, text, n, **({"lease": 0.4} if act == "lease" else {}))
        if act == "release" and len(found) > 6:
            given_up = found.pop(dice.randint(1, len(found) - 1))
            outcomes[f"release {(await client.delete(f'{PREFIX}/states/{given_up}')).status_code}"] += 1
            continue
        status = await _act(client, act, asked, dice)
        outcomes[f"{act} {status}"] += 1
        if status == 200 and act in ("fork", "join"):
            found.append(asked["id"])
            del found[1:-12]


async def _act(client: httpx.AsyncClient, act: str, asked: dict[str, Any], dice: random.Random) -> int:
    if act == "plain":
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        return (await client.post("/generate", json={"text": "z" * 20, "sampling_params": sampling})).status_code
    if act not in ("drop", "cancel"):
        return (await client.post(PATH, json=asked)).status_code
    stop = dice.randint(1, 20)
    async with client.stream("POST", PATH, json=asked) as stream:
        at = 0
        async for _ in stream.aiter_lines():
            at += 1
            if at == stop and act == "drop":
                break
            if at == stop:
                await client.post(f"{PREFIX}/states/{asked['id']}/cancel")
        return stream.status_code
