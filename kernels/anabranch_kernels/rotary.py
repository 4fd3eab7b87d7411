"""Rotary position embedding as far as attention needs it: turning a query by a whole number of positions.

Keys are never turned. Attending to a key shifted by `delta` equals attending with the query turned by `-delta`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """A model's rotation. inv_freq: [rotary_dim / 2], radians per position, the same at every position.

    interleaved: pairs are (0, 1), (2, 3), ... (GPT-J) instead of (0, d/2), (1, d/2 + 1), ... (NeoX, Llama).
    Only the first `rotary_dim` entries of a head turn.
    """

    inv_freq: torch.Tensor
    interleaved: bool = False

    @property
    def turns(self) -> torch.Tensor:
        """[rotary_dim / 2] int64: turns per position in units of 2**-64. `delta * turns`, which wraps around, is
        exactly the angle without its whole turns. Its upper 32 bits are what a kernel needs."""
        turns = self.inv_freq.to(device="cpu", dtype=torch.float64) / (2 * math.pi) % 1.0
        whole = [round(turn * 2**64) for turn in turns.tolist()]
        return torch.tensor([turn - 2**64 if turn >= 2**63 else turn for turn in whole], dtype=torch.int64)

    def turned(self, x: torch.Tensor, positions: int) -> torch.Tensor:
        """Turn `x` [..., head_dim] forward by `positions`. Angles in fp64, result in fp32."""
        return self.applied(x, *self.cos_sin(torch.tensor(positions, device=x.device)))

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of turning by whole numbers of `positions` [...]: [..., rotary_dim / 2] each, fp32; angles in fp64."""
        angle = positions.to(torch.float64)[..., None] * self.inv_freq.to(device=positions.device, dtype=torch.float64)
        return angle.cos().float(), angle.sin().float()

    def applied(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turn `x` [..., head_dim] as `cos_sin` says, in fp32."""
        x = x.float()
        dim = 2 * cos.shape[-1]
        head, rest = x[..., :dim], x[..., dim:]
        if self.interleaved:
            a, b = head[..., 0::2], head[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = head.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned, rest), dim=-1)
