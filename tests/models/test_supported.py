"""Every supported architecture and kind of RoPE, served for real, against the library's own forward.

Random DAGs with all kinds of references and placements, so that keys are read far from where they were computed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from uuid import uuid4

import httpx
import pytest
import torch

from anabranch_server.models import ARCHITECTURES
from tests.models import tiny
from tests.oracle.brute import Node, logprobs
from tests.oracle.dags import Plan, plan
from tests.oracle.library import LibraryModel
from tests.oracle.run import compare, release_rest, run_plan
from tests.serving import Served

SEEDS = range(6)


def test_every_supported_architecture_has_a_tiny_model():
    assert {f"{family}ForCausalLM" for family, _ in tiny.SUPPORTED.values()} == ARCHITECTURES


async def _run(url: str, todo: Plan) -> list[Node]:
    async with httpx.AsyncClient(timeout=httpx.Timeout(600)) as client:
        nodes = await run_plan(url, todo, client)
        await release_rest(url, todo, client)
    return nodes


@pytest.mark.engine
async def test_random_dags_give_the_tokens_and_logprobs_of_the_definition(served_model: Served):
    torch.set_num_threads(1)
    todo = [plan(seed, lambda text: list(text.encode()), uuid4().hex) for seed in SEEDS]
    results = await asyncio.gather(*(_run(served_model.url, one) for one in todo))
    exact, rough = (LibraryModel.load(served_model.model_dir, dtype) for dtype in (torch.float64, torch.float32))
    worst = max(compare(nodes, logprobs(nodes, exact), partial(logprobs, nodes, rough)) for nodes in results)
    print(f"{served_model.log_file.stem}: largest logprob difference: {worst:.2e}")
