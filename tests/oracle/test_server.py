"""The served model against the definition: random DAGs, eight at a time, every token and every logprob.

It does not start the server: the fixture `oracle_server` does, and has `.url` and `.model_dir`.
`ORACLE_SEED=5 pytest tests/oracle/test_server.py` replays one seed, `ORACLE_SEED=8-15` seeds that ran together.
Pages of several slots are served from a tiny model: 8 seeds in CI, and 200 at every size where `slow` tests are run.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache, partial
from uuid import uuid4

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .brute import Node, logprobs, sight
from .dags import Plan, plan
from .llama import Llama
from .run import compare, release_rest, run_plan
from .test_llama import gap, theirs, undisturbed

pytestmark = pytest.mark.engine

TOGETHER = 8


def groups(of: str, together: int = TOGETHER) -> list[list[int]]:
    first, _, last = os.environ.get("ORACLE_SEED", of).partition("-")
    seeds = range(int(first), int(last or first) + 1)
    return [list(seeds[i : i + together]) for i in range(0, len(seeds), together)]


def replay(seeds: list[int]) -> str:
    """The command that runs these seeds, together, again."""
    which = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    return f"ORACLE_SEED={which} pytest {os.path.relpath(__file__)}"


@cache
def llama(model_dir: str, dtype: torch.dtype = torch.float64) -> Llama:
    """In fp64: in fp32 this model is off by up to 1.8e-4, and that allowance is for the server to use up.

    On one thread: two that share cores with a busy server wait for each other, which is ten times slower.
    """
    torch.set_num_threads(1)
    return Llama.load(model_dir, dtype)


@cache
def tokenizer(model_dir: str):
    return AutoTokenizer.from_pretrained(model_dir)


async def _run(url: str, todo: Plan) -> list[Node]:
    async with httpx.AsyncClient(timeout=httpx.Timeout(600)) as client:
        nodes = await run_plan(url, todo, client)
        await release_rest(url, todo, client)
    return nodes


def span(seeds: list[int]) -> str:
    return f"{seeds[0]}-{seeds[-1]}"


@pytest.mark.parametrize("seeds", groups("0-15"), ids=span)
async def test_random_dags(oracle_server, seeds: list[int]):
    await hold_against_the_definition(oracle_server, seeds)


@pytest.mark.parametrize("paged", [16, 64], indirect=True)
@pytest.mark.parametrize("seeds", groups("0-7"), ids=span)
async def test_random_dags_in_pages_of_several_slots(paged, seeds: list[int]):
    await hold_against_the_definition(paged, seeds)


@pytest.mark.slow
@pytest.mark.parametrize("paged", [1, 16, 64], indirect=True)
@pytest.mark.parametrize("seeds", groups("0-199", 4), ids=span)  # eight can fill the pool: then more is computed
async def test_many_random_dags_at_every_page_size(paged, seeds: list[int]):
    await hold_against_the_definition(paged, seeds)


async def hold_against_the_definition(oracle_server, seeds: list[int]) -> None:
    words = tokenizer(oracle_server.model_dir)
    todo = [plan(s, lambda text: words.encode(text, add_special_tokens=False), uuid4().hex) for s in seeds]
    results = await asyncio.gather(*(_run(oracle_server.url, one) for one in todo), return_exceptions=True)
    failures, worst = [], 0.0
    for seed, result in zip(seeds, results, strict=True):
        try:
            if isinstance(result, BaseException):
                raise result
            exact = logprobs(result, llama(oracle_server.model_dir))
            rough = partial(logprobs, result, llama(oracle_server.model_dir, torch.float32))
            worst = max(worst, compare(result, exact, rough))
        except (AssertionError, httpx.HTTPError) as error:
            failures.append(f"seed {seed}: {error!r}\n    alone: {replay([seed])}")
    print(f"largest logprob difference: {worst:.2e}")
    if failures:
        pytest.fail("\n".join([*failures, f"together: {replay(seeds)}"]), pytrace=False)


def test_the_oracle_runs_the_served_model_as_transformers_does(oracle_server):
    """Where no key is moved, the oracle's own forward is that of the library that the weights were made for."""
    tokens, what = sight(undisturbed())
    hf = AutoModelForCausalLM.from_pretrained(oracle_server.model_dir, dtype=torch.float64, attn_implementation="eager")
    assert gap(llama(oracle_server.model_dir).logprobs(tokens, what), theirs(hf.eval(), tokens, what)) < 2e-5
