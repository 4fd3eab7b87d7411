"""Decode attention over a task plan, in TileLang: the kernel that leaves partial results.

It does not join them (`tilelang_merge.py`), make the plan (`planner.py`) or choose between the languages. The contract
is `tasks.py`.

A thread block works through one bin of tasks for one KV head. 128 producer threads gather KV by slot into a ring of
swizzled tiles and never stop at the border of two tasks. One warpgroup attends, or two, each with 64 query rows
(readers x heads of the group). Keys stay as they are stored: every reader's query is turned instead.
"""

# No postponed annotations here: TileLang reads them, and they name local sizes. A type checker cannot.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportAttributeAccessIssue=false
import functools
from typing import Any

import tilelang.language as T

from anabranch_kernels.tasks import CAUSAL, COUNT, FRESH
from anabranch_kernels.tilelang_jit import compiled
from anabranch_kernels.tilelang_parts import LOWEST, ROWS, Shape, angle_of, load_turned

WARPGROUP = 128
PRODUCERS = 128
OWN = 4  # named barriers: one for each warpgroup alone
KV_TILE = 64
HALF_MAX = 65504.0
BY_ROWS = T.GemmWarpPolicy.FullRow


@functools.cache
def decode_kernel(shape: Shape) -> Any:
    """The compiled kernel; arguments as of `partials`."""
    return compiled(partials(shape))


def partials(shape: Shape) -> Any:
    """The kernel as a TileLang function:

    q as `in_pieces` gives it, keys and values [slots, kv_heads, head_dim], slots [max_slots], bins [n_bins, 2, 4] and
    words [max_words, 4] of the plan, turns [rotary_dim / 2] int64; out [max_partials, q_heads, head_dim] fp16, lse
    [max_partials, q_heads] fp32 base 2; scale: softmax scale x log2(e).
    """
    head_dim, group, kv_heads, stages = shape.head_dim, shape.group, shape.kv_heads, shape.stages
    dtype, fp16, fp32, int32 = shape.dtype, T.float16, T.float32, T.int32
    consumers = WARPGROUP * shape.warpgroups
    chunks = head_dim // 16  # pieces of 16 columns that turn together
    pieces = head_dim // 8  # 16-byte pieces of a row
    rows_at_once = PRODUCERS // pieces
    turns_of_loading = KV_TILE // rows_at_once
    rows, q_pieces = T.dynamic("rows"), T.dynamic("q_pieces")
    n_slots, n_bins = T.dynamic("n_slots"), T.dynamic("n_bins")
    max_slots, max_words, max_partials = T.dynamic("max_slots"), T.dynamic("max_words"), T.dynamic("max_partials")

    @T.macro
    def load_queries(tile, q, words, turns, reader, count, head, thread):
        """Turn each reader's query by -delta and put it into `tile`. Rows without a reader keep what they hold."""
        cos, sin = T.alloc_local((8,), fp32), T.alloc_local((8,), fp32)
        pair = T.alloc_local((16,), dtype)
        for step in T.serial(-(-shape.readers_of_warpgroup * chunks // WARPGROUP)):
            which = (step * WARPGROUP + thread) // chunks
            chunk = thread % chunks
            if which < count:
                row = words[reader + which, 0]
                delta = words[reader + which, 1]
                angle_of(shape, turns, delta, chunk, cos, sin)
                load_turned(shape, tile, which * group, q, row, head, chunk, cos, sin, pair)

    @T.macro
    def attend(
        warpgroup, q_tile, k_ring, v_ring, full, empty, q, bins, words, turns, out, lse, scale, bin, head, thread
    ):
        """All tasks of the bin for one warpgroup's readers: the task's first 64 rows, or those after them."""
        half_tile = T.view(q_tile, (ROWS, head_dim), fp16)
        scores, weights = T.alloc_fragment((ROWS, KV_TILE), fp32), T.alloc_fragment((ROWS, KV_TILE), dtype)
        total, half = T.alloc_fragment((ROWS, head_dim), fp32), T.alloc_fragment((ROWS, head_dim), fp16)
        top, top_before = T.alloc_fragment((ROWS,), fp32), T.alloc_fragment((ROWS,), fp32)
        fade, mass = T.alloc_fragment((ROWS,), fp32), T.alloc_fragment((ROWS,), fp32)
        tile_mass, seen = T.alloc_fragment((ROWS,), fp32), T.alloc_fragment((ROWS,), int32)
        n_done = T.alloc_var(int32)  # tiles of all tasks before
        n_done = 0
        first_task = bins[bin, 0, 0]
        T.pdl_sync()
        for number in T.serial(bins[bin, 0, 1] - first_task):
            length = words[first_task + number, 1]
            flagged = words[first_task + number, 3]
            reader = words[first_task + number, 2] + warpgroup * shape.readers_of_warpgroup
            count = (flagged & COUNT) - warpgroup * shape.readers_of_warpgroup
            if count <= 0:
                for tile in T.serial(T.ceildiv(length, KV_TILE)):
                    T.barrier_wait(full[(n_done + tile) % stages], ((n_done + tile) // stages) & 1)
                    T.barrier_arrive(empty[(n_done + tile) % stages])
            else:
                T.sync_threads(OWN + warpgroup, WARPGROUP)
                load_queries(q_tile, q, words, turns, reader, count, head, thread)
                T.fence_proxy_async()
                T.sync_threads(OWN + warpgroup, WARPGROUP)
                for i in T.Parallel(ROWS):
                    seen[i] = words[reader + T.min(i // group, count - 1), 3]
                T.fill(total, 0)
                T.fill(mass, 0)
                T.fill(top, LOWEST)
                for tile in T.serial(T.ceildiv(length, KV_TILE)):
                    stage = (n_done + tile) % stages
                    T.barrier_wait(full[stage], ((n_done + tile) // stages) & 1)
                    T.fence_proxy_async()
                    T.gemm(q_tile, k_ring[stage, :, :], scores, transpose_B=True, clear_accum=True, policy=BY_ROWS)
                    if ((tile + 1) * KV_TILE > length) | ((flagged & CAUSAL) != 0):
                        for i, j in T.Parallel(ROWS, KV_TILE):
                            scores[i, j] = T.if_then_else(tile * KV_TILE + j < seen[i], scores[i, j], LOWEST)
                    T.copy(top, top_before)
                    T.reduce_max(scores, top, dim=1, clear=False)
                    for i in T.Parallel(ROWS):
                        fade[i] = T.exp2((top_before[i] - top[i]) * scale)
                    for i, j in T.Parallel(ROWS, KV_TILE):
                        scores[i, j] = T.exp2(scores[i, j] * scale - top[i] * scale)
                    T.reduce_sum(scores, tile_mass, dim=1)
                    for i in T.Parallel(ROWS):
                        mass[i] = mass[i] * fade[i] + tile_mass[i]
                    for i, j in T.Parallel(ROWS, head_dim):
                        total[i, j] *= fade[i]
                    T.copy(scores, weights)
                    T.gemm(weights, v_ring[stage, :, :], total, policy=BY_ROWS)
                    T.barrier_arrive(empty[stage])
                for i, j in T.Parallel(ROWS, head_dim):
                    half[i, j] = T.cast(T.min(T.max(total[i, j] / mass[i], -HALF_MAX), HALF_MAX), fp16)
                T.sync_threads(OWN + warpgroup, WARPGROUP)
                T.copy(half, half_tile)
                T.sync_threads(OWN + warpgroup, WARPGROUP)
                for i, j in T.Parallel(ROWS, head_dim):
                    if i // group < count:
                        out[words[reader + i // group, 2], head * group + i % group, j] = half_tile[i, j]
                for i in T.Parallel(ROWS):
                    if i // group < count:
                        lse[words[reader + i // group, 2], head * group + i % group] = T.log2(mass[i]) + top[i] * scale
            n_done = n_done + T.ceildiv(length, KV_TILE)

    @T.prim_func
    def decode(
        q: T.Tensor((rows, q_pieces, 8), dtype),
        keys: T.Tensor((n_slots, kv_heads, head_dim), dtype),
        values: T.Tensor((n_slots, kv_heads, head_dim), dtype),
        slots: T.Tensor((max_slots,), int32),
        bins: T.Tensor((n_bins, 2, 4), int32),
        words: T.Tensor((max_words, 4), int32),
        turns: T.Tensor((max(shape.rotary_dim // 2, 1),), T.int64),
        out: T.Tensor((max_partials, shape.q_heads, head_dim), fp16),
        lse: T.Tensor((max_partials, shape.q_heads), fp32),
        scale: fp32,
    ):
        with T.Kernel(kv_heads * n_bins, threads=consumers + PRODUCERS) as block:
            T.annotate_min_blocks_per_sm(shape.blocks_per_sm)
            head = block % kv_heads
            bin = block // kv_heads
            thread = T.get_thread_binding()
            q_low = T.alloc_shared((ROWS, head_dim), dtype)
            q_high = T.alloc_shared((ROWS, head_dim), dtype) if shape.wide else q_low
            k_ring = T.alloc_shared((stages, KV_TILE, head_dim), dtype)
            v_ring = T.alloc_shared((stages, KV_TILE, head_dim), dtype)
            full, empty = T.alloc_barrier([PRODUCERS] * stages), T.alloc_barrier([consumers] * stages)
            T.pdl_trigger()
            if thread < WARPGROUP:
                if shape.blocks_per_sm > 1:
                    T.set_max_nreg(176, 1)
                attend(0, q_low, k_ring, v_ring, full, empty, q, bins, words, turns, out, lse, scale, bin, head, thread)
            elif thread < consumers:
                attend(
                    1,
                    q_high,
                    k_ring,
                    v_ring,
                    full,
                    empty,
                    q,
                    bins,
                    words,
                    turns,
                    out,
                    lse,
                    scale,
                    bin,
                    head,
                    thread - WARPGROUP,
                )
            else:
                if shape.blocks_per_sm > 1:
                    T.set_max_nreg(80, 0)
                now, soon = T.alloc_local((turns_of_loading,), int32), T.alloc_local((turns_of_loading,), int32)
                start, length, flagged = (
                    T.alloc_var(int32),
                    T.alloc_var(int32),
                    T.alloc_var(int32),
                )  # of the task being loaded
                offset = T.alloc_var(int32)  # of the tile whose slots are in `soon`
                fresh = T.alloc_var(int32)
                task = T.alloc_var(int32)
                n_done = T.alloc_var(int32)  # tiles
                n_done = 0
                end = bins[bin, 0, 1]
                task = bins[bin, 0, 0]
                row = (thread - consumers) // pieces
                column = (thread - consumers) % pieces * 8
                start = bins[bin, 1, 0]
                length = bins[bin, 1, 1]
                flagged = bins[bin, 1, 3]
                offset = 0
                if task < end:
                    for u in T.unroll(turns_of_loading):
                        soon[u] = slots[start + T.min(u * rows_at_once + row, length - 1)]
                while task < end:
                    fresh = flagged & FRESH
                    for u in T.unroll(turns_of_loading):
                        now[u] = soon[u]
                    offset = offset + KV_TILE
                    if offset >= length:
                        task = task + 1
                        offset = 0
                        if task < end:
                            start = words[task, 0]
                            length = words[task, 1]
                            flagged = words[task, 3]
                    if task < end:
                        for u in T.unroll(turns_of_loading):
                            soon[u] = slots[start + T.min(offset + u * rows_at_once + row, length - 1)]
                    if fresh != 0:
                        T.pdl_sync()
                    stage = n_done % stages
                    T.barrier_wait(empty[stage], ((n_done // stages) & 1) ^ 1)
                    for u in T.unroll(turns_of_loading):
                        T.ptx_cp_async(
                            T.access_ptr(k_ring[stage, u * rows_at_once + row, column], "w", 8),
                            T.access_ptr(keys[now[u], head, column], "r", 8),
                            8,
                        )
                        T.ptx_cp_async(
                            T.access_ptr(v_ring[stage, u * rows_at_once + row, column], "w", 8),
                            T.access_ptr(values[now[u], head, column], "r", 8),
                            8,
                        )
                    T.cp_async_barrier_noinc(full[stage])
                    n_done = n_done + 1

    return decode
