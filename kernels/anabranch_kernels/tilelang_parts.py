"""What the TileLang kernels share: the shapes they are compiled for, and turning 16 columns of a query.

No kernel of its own.
"""

# The macros are TileLang, which a type checker cannot read.
# pyright: reportCallIssue=false
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

ROWS = 64  # query rows that one warpgroup multiplies at once
LOWEST = -1e30  # a score that is not seen; finite, so that differences of two stay numbers


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for. dtype: of queries and KV, "bfloat16" or "float16". rotary_dim: 0 turns nothing.
    wide: two warpgroups attend in decode instead of one, for runs that more readers share than one of them holds.
    Not served by default: it has not yet passed `tests/gpu`.

    Raises ValueError for what there is no kernel for.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    dtype: str = "bfloat16"
    wide: bool = False

    def __post_init__(self) -> None:
        faults = {
            f"head_dim {self.head_dim}": self.head_dim not in (64, 128, 256),
            f"{self.q_heads} query heads on {self.kv_heads} KV heads": self.q_heads != self.group * self.kv_heads
            or not 1 <= self.group <= 16,
            f"rotary_dim {self.rotary_dim}": self.rotary_dim % 16 != 0 or not 0 <= self.rotary_dim <= self.head_dim,
            f"dtype {self.dtype}": self.dtype not in ("bfloat16", "float16"),
        }
        for fault, present in faults.items():
            if present:
                raise ValueError(f"no TileLang kernel for {fault}")

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def warpgroups(self) -> int:
        """Warpgroups that attend, each with 64 query rows of its own."""
        return 2 if self.wide else 1

    @property
    def readers_of_warpgroup(self) -> int:
        return ROWS // self.group

    @property
    def readers_per_task(self) -> int:
        return self.warpgroups * self.readers_of_warpgroup

    @property
    def blocks_per_sm(self) -> int:
        return 1 if self.wide or self.head_dim == 256 else 2

    @property
    def stages(self) -> int:
        """Tiles of 64 tokens in the ring: as many as the memory of a block has room for."""
        narrow = {64: 6, 128: 3, 256: 3}
        return {64: 12, 128: 6, 256: 2}[self.head_dim] if self.wide else narrow[self.head_dim]

    def n_bins(self, multiprocessors: int) -> int:
        """Bins that fill a card once."""
        return max(1, self.blocks_per_sm * multiprocessors // self.kv_heads)


def in_pieces(q: torch.Tensor) -> torch.Tensor:
    """`q` [rows, q_heads, head_dim] as kernels take it: [rows, pitch / 8, 8], so that slices of wider rows will do."""
    rows, heads, head_dim = q.shape
    pitch = q.stride(0)
    inside = q.storage_offset() + rows * pitch <= q.untyped_storage().nbytes() // q.itemsize
    if q.stride()[1:] != (head_dim, 1) or pitch % 8 or pitch < heads * head_dim or q.data_ptr() % 16 or not inside:
        return q.contiguous().view(rows, -1, 8)
    return q.as_strided((rows, pitch // 8, 8), (pitch, 8, 1))


def pieces_of(shape: Shape, chunk: Any) -> tuple[Any, Any]:
    """The two pieces of 8 columns that are chunk number `chunk`: partners when they turn, neighbours when not."""
    n_turning = shape.rotary_dim // 16
    if shape.interleaved or n_turning == 0:
        return chunk * 2, chunk * 2 + 1
    if shape.rotary_dim == shape.head_dim:
        return chunk, n_turning + chunk
    turns = chunk < n_turning
    return T.if_then_else(turns, chunk, chunk * 2), T.if_then_else(turns, n_turning + chunk, chunk * 2 + 1)


@T.macro
def angle_of(shape, turns, delta, chunk, cos, sin):
    """cos, sin [8] of turning by -delta, for the 8 pairs of a chunk; exactly 1 and 0 where nothing turns."""
    if (delta != 0) & (chunk < shape.rotary_dim // 16):
        for v in T.unroll(8):
            turn_64 = T.cast(delta, "uint64") * T.reinterpret(turns[chunk * 8 + v], "uint64")
            fraction = T.cast(T.reinterpret(T.cast(turn_64 >> T.uint64(32), "uint32"), "int32"), "float32")
            cos[v] = T.__cos(fraction * T.float32(2 * math.pi / 2**32))
            sin[v] = -T.__sin(fraction * T.float32(2 * math.pi / 2**32))
    else:
        for v in T.unroll(8):
            cos[v] = 1.0
            sin[v] = 0.0


@T.macro
def turn(shape, pair, cos, sin):
    """Turn the 8 pairs of `pair` [16] in fp32."""
    for v in T.unroll(8):
        first = v * 2 if shape.interleaved else v
        second = v * 2 + 1 if shape.interleaved else v + 8
        a = T.cast(pair[first], "float32")
        b = T.cast(pair[second], "float32")
        pair[first] = T.cast(a * cos[v] - b * sin[v], shape.dtype)
        pair[second] = T.cast(b * cos[v] + a * sin[v], shape.dtype)


@T.macro
def load_turned(shape, tile, tile_row, q, row, head, chunk, cos, sin, pair):
    """Put one chunk of a query row, for all heads of a group, into rows `tile_row` and following of `tile`, turned.

    q is as `in_pieces` gives it.
    """
    first, second = pieces_of(shape, chunk)
    for h in T.unroll(shape.group):
        in_row = (head * shape.group + h) * (shape.head_dim // 8)
        for v in T.vectorized(8):
            pair[v] = q[row, in_row + first, v]
        for v in T.vectorized(8):
            pair[8 + v] = q[row, in_row + second, v]
        turn(shape, pair, cos, sin)
        for v in T.vectorized(8):
            tile[tile_row + h, first * 8 + v] = pair[v]
        for v in T.vectorized(8):
            tile[tile_row + h, second * 8 + v] = pair[8 + v]
