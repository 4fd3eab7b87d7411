"""Segmented attention in plain torch, on any device: THE definition that every kernel is held to.

Not fast: one request at a time, scores in memory. Faster kernels change nothing of what it computes.
"""

from __future__ import annotations

import torch

from anabranch_kernels.plan import BatchPlan, RequestPlan
from anabranch_kernels.rotary import Rotary

ROWS = 256  # query tokens whose scores are in memory at once


def segmented_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: BatchPlan,
    *,
    scale: float,
    rotary: Rotary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each request's new tokens to all that its plan makes visible.

    q: [tokens, q_heads, head_dim], rotated at its own positions. k_cache: [slots, kv_heads, head_dim], each key rotated
    at its native position. v_cache: [slots, kv_heads, v_head_dim]. scale: factor on q . k.
    rotary: the model's rotation; needed if the plan shifts anything.
    Returns out [tokens, q_heads, v_head_dim] in q's dtype, and lse [tokens, q_heads] fp32, natural log of the sum of
    exponentiated scores; a token that sees nothing has out 0 and lse -inf.
    Raises ValueError if shapes, or plan and rotary, do not fit.
    """
    _check_shapes(q, k_cache, v_cache, plan, rotary)
    tokens, q_heads, _ = q.shape
    out = q.new_zeros(tokens, q_heads, v_cache.shape[-1])
    lse = torch.full((tokens, q_heads), float("-inf"), device=q.device)
    at = 0
    for request in plan.requests:
        k, v = k_cache[request.slots].float(), v_cache[request.slots].float()
        for row in range(0, request.n_new, ROWS):
            rows = slice(row, min(row + ROWS, request.n_new))
            here = slice(at + rows.start, at + rows.stop)
            scores = _scores(q[here], k, request, scale, rotary)
            _hide_future(scores, rows, request)
            row_lse = scores.logsumexp(-1)
            weights = scores.softmax(-1).masked_fill_(row_lse.isneginf()[..., None], 0.0)
            out[here] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2).to(q.dtype)
            lse[here] = row_lse.flatten(0, 1).T
        at += request.n_new
    return out, lse


def _scores(
    q: torch.Tensor, k: torch.Tensor, request: RequestPlan, scale: float, rotary: Rotary | None
) -> torch.Tensor:
    """[kv_heads, group, rows, n_kv] fp32. Shifted keys are read with the query turned the other way."""
    kv_heads = k.shape[1]

    def dots(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        grouped = query.float().unflatten(1, (kv_heads, -1))
        return torch.einsum("qhgd,khd->hgqk", grouped * scale, keys)

    scores = dots(q, k)
    for delta, columns in request.shifts:
        if rotary is None:
            raise ValueError(f"the plan shifts tokens by {delta} positions, which needs the model's rotary")
        scores[..., columns] = dots(rotary.turned(q, -delta), k[columns])
    return scores


def _hide_future(scores: torch.Tensor, rows: slice, request: RequestPlan) -> None:
    """Causality among the new tokens: query `j` does not see new tokens after `j`."""
    n_kv, n_new = scores.shape[-1], request.n_new
    first_new = max(n_kv - n_new, 0)
    column = torch.arange(first_new, n_kv, device=scores.device)
    last_seen = torch.arange(rows.start, rows.stop, device=scores.device) + (n_kv - n_new)
    scores[..., first_new:].masked_fill_(column[None, :] > last_seen[:, None], float("-inf"))


def _check_shapes(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: BatchPlan, rotary: Rotary | None
) -> None:
    tokens, q_heads, width = q.shape
    slots, kv_heads, k_width = k_cache.shape
    faults = {
        f"{tokens} query tokens, but the plan has {plan.n_queries}": tokens != plan.n_queries,
        f"{q_heads} query heads do not divide into {kv_heads} KV heads": q_heads % kv_heads != 0,
        f"queries of width {width}, keys of width {k_width}": width != k_width,
        f"keys are [{slots}, {kv_heads}], values {list(v_cache.shape[:2])}": v_cache.shape[:2] != k_cache.shape[:2],
        f"the rotation is wider than a head of {width}": rotary is not None and 2 * rotary.inv_freq.numel() > width,
    }
    for fault, present in faults.items():
        if present:
            raise ValueError(fault)
