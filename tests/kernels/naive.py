"""Segmented attention once more, the slow and obvious way: keys are moved to where they are seen, all in fp64.

It shares no code with the reference kernel, which turns queries instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch_kernels import BatchPlan, Part, Rotary, plan_batch


def moved(keys: Tensor, delta: int, rotary: Rotary) -> Tensor:
    """Turn `keys` [..., head_dim] by `delta` positions, as complex numbers, in fp64."""
    keys = keys.double()
    half = rotary.inv_freq.numel()
    turn = torch.polar(torch.ones(half, dtype=torch.float64), rotary.inv_freq.double() * delta)
    head, rest = keys[..., : 2 * half], keys[..., 2 * half :]
    pairs = head.unflatten(-1, (half, 2)) if rotary.interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    back = turned if rotary.interleaved else turned.transpose(-1, -2)
    return torch.cat((back.flatten(-2), rest), dim=-1)


@dataclass
class Request:
    """What one request reads: `context` slots, then `new` slots of its own; parts index into both together."""

    context: list[int]
    new: list[int]
    parts: list[Part] = field(default_factory=list)

    @property
    def slots(self) -> list[int]:
        return self.context + self.new


def planned(requests: Sequence[Request], device: str = "cpu") -> BatchPlan:
    return plan_batch(
        [torch.tensor(request.slots, dtype=torch.int32, device=device) for request in requests],
        [len(request.new) for request in requests],
        [request.parts for request in requests],
    )


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, requests: Sequence[Request], scale: float, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, one query token and one head at a time."""
    group = q.shape[1] // k_cache.shape[1]
    out = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    row = 0
    for request in requests:
        keys, values = k_cache[request.slots].double(), v_cache[request.slots].double()
        for start, stop, delta in request.parts:
            if stop > start and delta:
                assert rotary is not None
                keys[start:stop] = moved(keys[start:stop], delta, rotary)
        for j in range(len(request.new)):
            seen = len(request.context) + j + 1
            for head in range(q.shape[1]):
                scores = (keys[:seen, head // group] @ q[row, head].double()) * scale
                top = scores.max()
                weights = (scores - top).exp()
                lse[row, head] = top + weights.sum().log()
                out[row, head] = (weights / weights.sum()) @ values[:seen, head // group]
            row += 1
    return out, lse
