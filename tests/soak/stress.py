"""Stress of the real server: random graphs among requests that are dropped, twice, and the answers compared.

The second server waits after every step for all that the card does (`SGLANG_FORCE_COARSE_WAR_BARRIER`): where the first
one reuses a row or a slot too early, their answers differ. What is right is not judged here; the oracle does that.
`python -m tests.soak.stress --minutes 10 --model FOLDER [-- flags of the server]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from tests.oracle.brute import Node
from tests.oracle.dags import Tokenize, plan
from tests.oracle.run import API, release_rest, run_plan
from tests.serving import serve

from . import checks
from .calls import Violation

COARSE = {"SGLANG_FORCE_COARSE_WAR_BARRIER": "1"}
FLAGS = ("--max-total-tokens", "65536", "--max-running-requests", "64", "--log-level", "warning")
TOLERANCE = 0.25
"""Of a log probability in 16 bits: who is in a batch with whom decides in which order is added, and that differs from
run to run. Reading somebody else's KV costs whole units."""
TOGETHER = 12
DROPPERS = 6
Answers = dict[int, list[Node]]
"""By seed, the nodes of its graph in order."""


async def run(
    client: Callable[[], httpx.AsyncClient], url: str, tokenize: Tokenize, seeds: Sequence[int], *, until: float
) -> tuple[Answers, Counter[str]]:
    """Run the graphs of `seeds`, TOGETHER at a time, and no more of them after `until`; drop requests all the while."""
    answers: Answers = {}
    counts: Counter[str] = Counter()
    left = iter(seeds)

    async def work() -> None:
        async with client() as http:
            for seed in left:
                if time.monotonic() > until:
                    return
                todo = plan(seed, tokenize, uuid4().hex)
                answers[seed] = await run_plan(url, todo, http)
                await release_rest(url, todo, http)
                counts["states"] += len(answers[seed])

    over = asyncio.Event()
    droppers = [asyncio.create_task(_drop(client, url, random.Random(i), over, counts)) for i in range(DROPPERS)]
    try:
        await asyncio.gather(*(work() for _ in range(TOGETHER)))
    finally:
        over.set()
        await asyncio.gather(*droppers)
    return answers, counts


async def _drop(
    client: Callable[[], httpx.AsyncClient], url: str, dice: random.Random, over: asyncio.Event, counts: Counter[str]
) -> None:
    """Ask for forks of a root that nobody needs, and go away at some moment of each: their rows are used again."""
    root = {"id": uuid4().hex, "input": [{"tokens": _tokens(dice, 300)}]} | _generating(4)
    async with client() as http:
        answer = await http.post(f"{url}{API}/generate", json=root)
        assert answer.is_success, answer.text
        while not over.is_set():
            body = {"id": uuid4().hex, "refs": [{"kind": "inherit", "id": root["id"]}], "keep": False}
            body |= {"input": [{"tokens": _tokens(dice, dice.choice((1, 20, 200)))}]}
            body |= _generating(dice.choice((3, 40, 300)))
            asking = asyncio.create_task(http.post(f"{url}{API}/generate", json=body))
            done, _ = await asyncio.wait([asking], timeout=dice.uniform(0.0, 0.4))
            counts["answered" if done else "dropped"] += 1
            asking.cancel()
            with suppress(asyncio.CancelledError):
                answer = await asking
                assert answer.is_success, answer.text
        await http.delete(f"{url}{API}/states/{root['id']}")


def _client() -> httpx.AsyncClient:
    """Its connections end before the server ends idle ones, so that none is used again in that moment."""
    return httpx.AsyncClient(timeout=300, limits=httpx.Limits(keepalive_expiry=2.0))


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(5, 200) for _ in range(count)]


def _generating(length: int) -> dict[str, Any]:
    return {"sampling": {"max_tokens": length, "temperature": 0.0, "ignore_eos": True}}


def differences(one: Answers, other: Answers, tolerance: float = TOLERANCE) -> tuple[list[str], Counter[str]]:
    """What the two runs say differently of the same graphs. Where two tokens are as likely, each run may take its own;
    what comes after that, and every state that sees it, is not compared."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for seed in sorted(one.keys() & other.keys()):
        apart: set[int] = set()
        place = {node.id: i for i, node in enumerate(one[seed])}
        for i, (mine, theirs) in enumerate(zip(one[seed], other[seed], strict=True)):
            if any(place[ref.id] in apart for ref in mine.refs):
                apart.add(i)
                counts["not comparable"] += 1
                continue
            fault, equal = _compared(mine, theirs, tolerance)
            counts["compared"] += 1
            if fault:
                wrong.append(f"seed {seed}, {mine.name}: {fault}")
            if not equal:
                apart.add(i)
                counts["of two minds"] += not fault
    return wrong, counts


def _compared(mine: Node, theirs: Node, tolerance: float) -> tuple[str | None, bool]:
    """What is wrong, and whether the same was generated."""
    for at, (token, other) in enumerate(zip(mine.generated, theirs.generated, strict=True)):
        tops = mine.top[at], theirs.top[at]
        for common in tops[0].keys() & tops[1].keys():
            if (off := abs(tops[0][common] - tops[1][common])) > tolerance:
                return f"token {at}: log probability of {common} is {off:.2f} apart", False
        if not tops[0].keys() & tops[1].keys():
            return f"token {at}: nothing in common among the likeliest", False
        if token != other:
            lead = max(_lead(tops[0], token, other), _lead(tops[1], other, token))
            return (f"token {at}: {token} and {other}, {lead:.2f} apart" if lead > tolerance else None), False
    return None, True


def _lead(top: dict[int, float], taken: int, left: int) -> float:
    """How much likelier a run found the token that it took than the other's; infinite if that is not in its list."""
    return top[taken] - top.get(left, -float("inf"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.stress", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder that SGLang loads")
    parser.add_argument("--minutes", type=float, default=10.0, help="of both servers together")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="after --: flags of the servers")
    given = parser.parse_args(argv)

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-stress-"))
    runs: list[Answers] = []
    summary: dict[str, Any] = {"flags": given.flags, "runs": []}
    seeds: Sequence[int] = range(given.seed, given.seed + 1_000_000)
    wrong: list[str] = []
    for name, env in (("as served", {}), ("coarse", COARSE)):
        log = folder / f"{name.replace(' ', '-')}.log"
        with serve(given.model, (*FLAGS, *given.flags), log, env=env) as served:
            began = time.monotonic()
            # The second one does what the first one did, however long that takes.
            until = began + given.minutes * 30 if not runs else float("inf")
            answers, counts = asyncio.run(
                run(
                    _client, served.url,
                    lambda text: tokenizer.encode(text, add_special_tokens=False), seeds, until=until,
                )
            )  # fmt: skip
            stats = served.release_all()
            try:
                checks.log(served.log)
            except Violation as fault:
                wrong.append(f"{name}: {fault}")
            if served.process.poll() is not None:
                wrong.append(f"the server {name} ended; its log: {log}")
        runs.append(answers)
        seeds = sorted(answers)
        summary["runs"].append(
            {"name": name, "seconds": time.monotonic() - began, "graphs": len(answers), **counts, "left": stats}
        )
        print(json.dumps(summary["runs"][-1]), flush=True)
    found, counts = differences(*runs, tolerance=given.tolerance)
    wrong += found
    summary |= {"wrong": wrong, **counts}
    if given.json:
        given.json.write_text(json.dumps(summary, indent=1) + "\n")
    print(*wrong[:20], sep="\n")
    print(f"{len(wrong)} wrong; {', '.join(f'{count} {what}' for what, count in counts.items())}; logs in {folder}")
    return int(bool(wrong) or not counts["compared"])


if __name__ == "__main__":
    sys.exit(main())
