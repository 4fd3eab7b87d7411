"""What attention must give: keys are turned to where they are seen, and everything else is plain fp32 attention.

It shares no code with the reference kernel, which turns queries, and none with the planner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch_kernels import Rotary
from benchmarks.kernels.placing import parts
from benchmarks.kernels.steps import Step
from benchmarks.kernels.workloads import Request

ROWS = 64
"""Query tokens whose scores are in memory at once."""


def turned(keys: Tensor, delta: int, rotary: Rotary) -> Tensor:
    """Keys [..., head_dim] moved forward by `delta` positions. Angles in fp64, the rest in fp32."""
    half = rotary.inv_freq.numel()
    angle = rotary.inv_freq.to(keys.device, torch.float64) * delta
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    head, rest = keys[..., : 2 * half], keys[..., 2 * half :]
    if rotary.interleaved:
        pairs = torch.complex(head[..., 0::2].contiguous(), head[..., 1::2].contiguous()) * turn
        head = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        pairs = torch.complex(head[..., :half].contiguous(), head[..., half:].contiguous()) * turn
        head = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((head, rest), -1)


def attention(step: Step) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp32; lse in natural log, minus infinity and out 0 where nothing is seen."""
    out = torch.zeros(step.q.shape, device=step.device)
    lse = torch.full(step.q.shape[:-1], -torch.inf, device=step.device)
    at = 0
    for request, slots in zip(step.placed.workload.requests, step.placed.slots, strict=True):
        where = torch.from_numpy(slots).to(step.device).long()
        if request.length:
            keys, values = _moved(request, step, where), step.v_cache[where].float() * step.v_scale
            for first in range(0, request.new, ROWS):
                rows = range(first, min(first + ROWS, request.new))
                here = slice(at + rows.start, at + rows.stop)
                seen = torch.tensor([request.length - request.new + row + 1 for row in rows], device=step.device)
                out[here], lse[here] = _attend(step.q[here].float() * step.shape.scale, keys, values, seen)
        at += request.new
    return out, lse


def _moved(request: Request, step: Step, where: Tensor) -> Tensor:
    keys = step.k_cache[where].float() * step.k_scale
    for start, stop, delta in parts(request):
        if delta and stop > start:
            keys[start:stop] = turned(keys[start:stop], delta, step.shape.rotary)
    return keys


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """q: [rows, q_heads, head_dim]. seen: [rows], how many of the keys each row sees."""
    grouped = q.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("rhgd,khd->rhgk", grouped, keys)
    hidden = torch.arange(len(keys), device=q.device)[None, :] >= seen[:, None]
    scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
    return torch.einsum("rhgk,khd->rhgd", scores.softmax(-1), values).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)
