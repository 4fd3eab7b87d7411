"""Joining the partial results of each query row, in TileLang: the second half of decode.

It reads partials as `tilelang_decode.py` or the CUDA kernel leave them, and computes no attention.
"""

# No postponed annotations here: TileLang reads them, and they name local sizes. A type checker cannot.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportAttributeAccessIssue=false
import functools
import math
from typing import Any

import tilelang.language as T

from anabranch_kernels.tilelang_jit import compiled
from anabranch_kernels.tilelang_parts import LOWEST, Shape

AT_ONCE = 5  # partials whose loads a thread has in flight; with 8 lanes one round covers the usual 33
MAX_THREADS = 512


@functools.cache
def merge_kernel(shape: Shape) -> Any:
    """The compiled kernel; arguments as of `merged`."""
    return compiled(merged(shape))


def lanes_of(shape: Shape) -> int:
    """How many partials of a row are read side by side: as many as fit into whole warps of one block."""
    width = shape.group * shape.head_dim // 8
    return next(lanes for lanes in range(MAX_THREADS // width, 0, -1) if width * lanes % 32 == 0)


def merged(shape: Shape) -> Any:
    """The kernel as a TileLang function:

    partials [max_partials, q_heads, head_dim] fp16, sums [max_partials, q_heads] fp32 base 2, pointers of the plan;
    out [rows, q_heads, head_dim] in the query's dtype, lse [rows, q_heads] fp32 natural log.
    """
    head_dim, group, dtype, fp32 = shape.head_dim, shape.group, shape.dtype, T.float32
    pieces = head_dim // 8  # of 8 columns, one a thread
    width = group * pieces
    lanes = lanes_of(shape)
    rows, max_partials, n_pointers = T.dynamic("rows"), T.dynamic("max_partials"), T.dynamic("n_pointers")

    @T.prim_func
    def merge(
        partials: T.Tensor((max_partials, shape.q_heads, head_dim), T.float16),
        sums: T.Tensor((max_partials, shape.q_heads), fp32),
        pointers: T.Tensor((n_pointers,), T.int32),
        out: T.Tensor((rows, shape.q_heads, head_dim), dtype),
        lse: T.Tensor((rows, shape.q_heads), fp32),
    ):
        with T.Kernel(rows * shape.kv_heads, threads=width * lanes) as block:
            T.annotate_min_blocks_per_sm(2)
            row = block // shape.kv_heads
            thread = T.get_thread_binding()
            lane = thread // width
            piece = thread % width
            head = block % shape.kv_heads * group + piece // pieces
            column = piece % pieces * 8
            lane_total = T.alloc_shared((lanes, width, 8), fp32)
            lane_top, lane_mass = T.alloc_shared((lanes, width), fp32), T.alloc_shared((lanes, width), fp32)
            loaded, level = T.alloc_local((AT_ONCE, 8), T.float16), T.alloc_local((AT_ONCE,), fp32)
            total, result = T.alloc_local((8,), fp32), T.alloc_local((8,), dtype)
            top, mass, before, weight = T.alloc_var(fp32), T.alloc_var(fp32), T.alloc_var(fp32), T.alloc_var(fp32)
            first = pointers[row]
            stop = pointers[row + 1]
            T.pdl_trigger()
            T.pdl_sync()
            top = LOWEST
            mass = 0.0
            for v in T.unroll(8):
                total[v] = 0.0
            for turn in T.serial(T.ceildiv(stop - first, lanes * AT_ONCE)):
                for u in T.unroll(AT_ONCE):
                    here = T.min(first + (turn * AT_ONCE + u) * lanes + lane, stop - 1)
                    level[u] = sums[here, head]
                    for v in T.vectorized(8):
                        loaded[u, v] = partials[here, head, column + v]
                before = top
                for u in T.unroll(AT_ONCE):
                    if first + (turn * AT_ONCE + u) * lanes + lane >= stop:
                        level[u] = LOWEST
                    top = T.max(top, level[u])
                weight = T.exp2(before - top)
                mass = mass * weight
                for v in T.unroll(8):
                    total[v] = total[v] * weight
                for u in T.unroll(AT_ONCE):
                    # Also right for a lane that has no partial yet: then everything it holds counts nothing below.
                    weight = T.exp2(level[u] - top)
                    mass = mass + weight
                    for v in T.unroll(8):
                        total[v] = total[v] + weight * T.cast(loaded[u, v], fp32)
            for v in T.vectorized(8):
                lane_total[lane, piece, v] = total[v]
            lane_top[lane, piece] = top
            lane_mass[lane, piece] = mass
            T.sync_threads()
            if lane == 0:
                for other in T.serial(lanes):
                    top = T.max(top, lane_top[other, piece])
                mass = 0.0
                for v in T.unroll(8):
                    total[v] = 0.0
                for other in T.serial(lanes):
                    weight = T.if_then_else(lane_top[other, piece] > LOWEST, T.exp2(lane_top[other, piece] - top), 0.0)
                    mass = mass + weight * lane_mass[other, piece]
                    for v in T.unroll(8):
                        total[v] = total[v] + weight * lane_total[other, piece, v]
                weight = T.if_then_else(mass > 0.0, 1.0 / mass, 0.0)
                for v in T.unroll(8):
                    result[v] = T.cast(total[v] * weight, dtype)
                for v in T.vectorized(8):
                    out[row, head, column + v] = result[v]
                if column == 0:
                    lse[row, head] = T.if_then_else(
                        mass > 0.0, (top + T.log2(mass)) * math.log(2.0), -T.infinity("float32")
                    )

    return merge
