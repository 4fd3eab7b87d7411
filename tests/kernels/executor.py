"""A task plan carried out in plain torch, word by word as `tasks.py` defines them: what a planner's work is held to.

Not the definition of attention (`reference.py` is), and slow. It reads nothing that a kernel would not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch_kernels import Rotary
from anabranch_kernels.tasks import CAUSAL, COUNT, TaskPlan

POISON = float("nan")


def filled_slots(plan: TaskPlan, req_to_token: Tensor) -> Tensor:
    """[max_slots] int64: what the copies make of `req_to_token`; -1 where nothing was written."""
    slots = torch.full((plan.layout.max_slots,), -1, dtype=torch.int64)
    table = req_to_token.flatten()
    for source, target, length, _ in plan.copies.tolist():
        assert (slots[target : target + length] == -1).all(), "copied twice"
        slots[target : target + length] = table[source : source + length]
    return slots


def execute(
    plan: TaskPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor, *, scale: float, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    """q: [rows, q_heads, head_dim]; the others as for `segmented_attention`. Returns (out, lse) in fp32."""
    slots = filled_slots(plan, req_to_token)
    kv_heads = k_cache.shape[1]
    partials = torch.full((plan.n_partials, *q.shape[1:-1], v_cache.shape[-1]), POISON)
    sums = torch.full((plan.n_partials, q.shape[1]), POISON)
    bins = plan.bins.tolist()
    done: list[int] = []
    for (first, stop, *_), copy in bins:
        if first < stop:
            assert copy == plan.words[first].tolist()
        done += range(first, stop)
    assert sorted(done) == list(range(plan.n_tasks)), "each task is in one bin"
    for begin, length, reader, flagged in plan.tasks.tolist():
        count = flagged & COUNT
        assert length >= 1 and 1 <= count <= plan.layout.readers_per_task
        where = slots[begin : begin + length]
        assert (where >= 0).all()
        keys, values = k_cache[where].float(), v_cache[where].float()
        for row, delta, partial, seen in plan.words[reader : reader + count].tolist():
            assert 1 <= seen <= length and (seen == length or flagged & CAUSAL)
            query = rotary.turned(q[row], -delta).unflatten(0, (kv_heads, -1))
            scores = torch.einsum("hgd,khd->hgk", query * scale, keys[:seen])
            assert sums[partial].isnan().all(), "written twice"
            sums[partial] = scores.logsumexp(-1).flatten()
            partials[partial] = torch.einsum("hgk,khd->hgd", scores.softmax(-1), values[:seen]).flatten(0, 1)
    assert not sums.isnan().any(), "a partial that nothing writes"
    out = torch.zeros(*q.shape[:-1], v_cache.shape[-1])
    lse = torch.full(q.shape[:-1], float("-inf"))
    for row in range(plan.n_rows):
        first, stop = plan.pointers[row : row + 2].tolist()
        if first < stop:
            lse[row] = sums[first:stop].logsumexp(0)
            weights = (sums[first:stop] - lse[row]).exp()
            out[row] = (weights[..., None] * partials[first:stop]).sum(0)
    return out, lse
