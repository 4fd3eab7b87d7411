"""A placed workload with tensors of one model shape: all that a kernel is given, and where kernels are looked up.

It attends to nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch_kernels import Rotary
from benchmarks.kernels.placing import Placed, slots_needed

Launch = Callable[[], tuple[Tensor, Tensor]]
"""Launches the kernels of a step whose host work is done, and gives out and lse. May be captured into a CUDA graph."""
Prepare = Callable[["Step"], Launch]
"""Does the host work of a step."""


class CannotDo(Exception):
    """A kernel is not made for this: the reason in words."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model a kernel is made for. rotary_dim: None is all of `head_dim`.
    stored_as: what KV is kept in, if not in `dtype`."""

    head_dim: int = 128
    group: int = 4
    kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    rotary_dim: int | None = None
    interleaved: bool = False
    stored_as: torch.dtype | None = None

    @property
    def q_heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.stored_as or self.dtype

    @property
    def token_bytes(self) -> int:
        """Of K and V together."""
        return 2 * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def rotary(self) -> Rotary:
        dim = self.rotary_dim or self.head_dim
        return Rotary(500_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim), self.interleaved)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        parts = [f"d{self.head_dim}", f"g{self.group}", f"h{self.kv_heads}", str(self.dtype).removeprefix("torch.")]
        parts += [f"KV {self.stored_as}".replace("torch.", "")] if self.stored_as else []
        parts += [f"rotary{self.rotary_dim}"] if self.rotary_dim else []
        return " ".join([*parts, *(["interleaved"] if self.interleaved else [])])


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step on a device. q: [rows, q_heads, head_dim]; k_cache, v_cache: [slots, kv_heads, head_dim].

    k_scale, v_scale: what stored keys and values are to be multiplied by.
    """

    placed: Placed
    shape: Shape
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def device(self) -> torch.device:
        return self.q.device


def pool(shape: Shape, slots: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of a pool, at random, in the model's dtype."""
    rng = torch.Generator(device).manual_seed(seed)
    sizes = (slots, shape.kv_heads, shape.head_dim)
    return tuple(torch.randn(sizes, generator=rng, device=device, dtype=shape.dtype) for _ in range(2))  # type: ignore[return-value]


def queries(shape: Shape, rows: int, device: str, seed: int = 0) -> Tensor:
    rng = torch.Generator(device).manual_seed(seed + 1)
    return torch.randn((rows, shape.q_heads, shape.head_dim), generator=rng, device=device, dtype=shape.dtype)


def poisoned(placed: Placed, shape: Shape, device: str, seed: int = 0) -> Step:
    """A step with a pool of its own, in which everything that nobody may read is NaN."""
    page = placed.workload.page
    caches = pool(shape, slots_needed(placed.workload) + page, device, seed)
    unread = torch.ones(caches[0].shape[0], dtype=torch.bool, device=device)
    unread[torch.from_numpy(placed.used).to(device).long()] = False
    for cache in caches:
        cache[unread] = torch.nan
    k_cache, v_cache = (cache.to(shape.kv_dtype) for cache in caches)
    scales = (0.5, 3.0) if shape.stored_as else (1.0, 1.0)
    return Step(placed, shape, queries(shape, placed.workload.rows, device, seed), k_cache, v_cache, *scales)
