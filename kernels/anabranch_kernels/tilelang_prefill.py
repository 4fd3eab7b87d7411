"""Prefill attention over a prefill plan, in TileLang: many new tokens of a request over any number of shifted runs.

No partial results and no merge: a block holds one tile of query rows and walks all runs that its request sees.
The plan is made in `prefill_plan.py`.

A tile is 128 query rows: the heads of a group for consecutive new tokens, which are all of one request, so that they
turn alike. When the next run has another delta, the tile is turned anew from the queries in memory. 128 producer
threads gather KV by slot; two warpgroups attend, and while the softmax of one block of KV is taken, the products of
the block before it with the values are under way.
"""

# No postponed annotations here: TileLang reads them, and they name local sizes. A type checker cannot.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportAttributeAccessIssue=false
import functools
import math
from typing import Any

import tilelang.language as T

from anabranch_kernels.prefill_plan import TILE_WORDS
from anabranch_kernels.tilelang_jit import compiled
from anabranch_kernels.tilelang_parts import LOWEST, ROWS, Shape, angle_of, load_turned

WARPGROUP = 128
CONSUMERS = 2 * WARPGROUP
PRODUCERS = 128
STAGES = 2
OWN = 6  # named barriers: one of each warpgroup alone
TURN = 8  # and one for each warpgroup's turn at the tensor cores


def kv_block(shape: Shape) -> int:
    """Tokens of KV that are attended to at once."""
    return 64 if shape.head_dim == 256 else 128


def tokens_per_tile(shape: Shape) -> int:
    return 2 * (ROWS // shape.group)


@functools.cache
def prefill_kernel(shape: Shape) -> Any:
    """The compiled kernel; arguments as of `prefilled`."""
    return compiled(prefilled(shape))


def prefilled(shape: Shape) -> Any:
    """The kernel as a TileLang function:

    q as `in_pieces` gives it, keys and values [slots, kv_heads, head_dim], slots [max_slots], tiles [n_tiles, 8] and
    words [n_words, 4] of the plan, turns [rotary_dim / 2] int64; out [rows, q_heads, head_dim] in q's dtype, lse
    [rows, q_heads] fp32 natural log; scale: softmax scale x log2(e). Rows that no tile holds are not written.
    """
    head_dim, group, kv_heads, dtype = shape.head_dim, shape.group, shape.kv_heads, shape.dtype
    fp32, int32 = T.float32, T.int32
    block = kv_block(shape)
    half_tile = ROWS // group  # tokens
    chunks = head_dim // 16
    pieces = head_dim // 8  # lanes that load one row, 16 bytes each
    rows_at_once = 32 // pieces  # rows that a warp loads with one instruction
    rows_of_warp = block * 32 // PRODUCERS
    rows, q_pieces = T.dynamic("rows"), T.dynamic("q_pieces")
    n_slots, n_tiles = T.dynamic("n_slots"), T.dynamic("n_tiles")
    max_slots, n_words = T.dynamic("max_slots"), T.dynamic("n_words")

    @T.macro
    def load_queries(tile, q, turns, row, count, delta, head, thread):
        """Turn the tile's queries by -delta and put them into `tile`. Rows beyond keep what they hold."""
        cos, sin = T.alloc_local((8,), fp32), T.alloc_local((8,), fp32)
        pair = T.alloc_local((16,), dtype)
        chunk = thread % chunks
        angle_of(shape, turns, delta, chunk, cos, sin)
        for step in T.serial(T.ceildiv(count, WARPGROUP // chunks)):
            token = step * (WARPGROUP // chunks) + thread // chunks
            if token < count:
                load_turned(shape, tile, token * group, q, row + token, head, chunk, cos, sin, pair)

    @T.macro
    def hide(scores, offset, seen, visible):
        """Take out the scores of tokens that a row does not see, if there may be any."""
        if offset + block > T.min(seen, visible):
            for i, j in T.Parallel(ROWS, block):
                scores[i, j] = T.if_then_else(offset + j < T.min(seen + i // group, visible), scores[i, j], LOWEST)

    @T.macro
    def attend(
        warpgroup,
        q_tile,
        k_ring,
        v_ring,
        k_full,
        v_full,
        k_empty,
        v_empty,
        q,
        tiles,
        words,
        turns,
        out,
        lse,
        scale,
        which,
        head,
        thread,
    ):
        """One warpgroup's half of the tile: 64 rows, `count` tokens from `row` on, which are number `position` on."""
        row = tiles[which, 0] + warpgroup * half_tile
        count = T.min(T.max(tiles[which, 1] - warpgroup * half_tile, 0), half_tile)
        position = tiles[which, 2] + warpgroup * half_tile
        last = tiles[which, 2] + tiles[which, 1] - 1
        n_blocks = tiles[which, 4]
        scores, weights = T.alloc_fragment((ROWS, block), fp32), T.alloc_fragment((ROWS, block), dtype)
        total = T.alloc_fragment((ROWS, head_dim), fp32)
        top, top_before = T.alloc_fragment((ROWS,), fp32), T.alloc_fragment((ROWS,), fp32)
        fade, mass = T.alloc_fragment((ROWS,), fp32), T.alloc_fragment((ROWS,), fp32)
        block_mass = T.alloc_fragment((ROWS,), fp32)
        run, offset, delta = T.alloc_var(int32), T.alloc_var(int32), T.alloc_var(int32)
        seen, visible = T.alloc_var(int32), T.alloc_var(int32)
        T.fill(total, 0)
        T.fill(top, LOWEST)
        run = tiles[which, 3]
        offset = 0
        delta = words[run, 2]
        seen = words[run, 3] + position
        visible = T.min(words[run, 1], words[run, 3] + last)
        load_queries(q_tile, q, turns, row, count, delta, head, thread)
        T.barrier_wait(k_full[0], 0)
        T.fence_proxy_async()
        T.sync_threads(OWN + warpgroup, WARPGROUP)
        T.wgmma_gemm(
            q_tile, k_ring[0, :, :], scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
        )
        T.wait_wgmma(0)
        T.barrier_arrive(k_empty[0])
        hide(scores, offset, seen, visible)
        T.reduce_max(scores, top, dim=1, clear=False)
        for i, j in T.Parallel(ROWS, block):
            scores[i, j] = T.exp2(scores[i, j] * scale - top[i] * scale)
        T.reduce_sum(scores, mass, dim=1)
        T.copy(scores, weights)
        if warpgroup == 1:
            T.named_barrier_arrive(TURN, CONSUMERS)
        for number in T.serial(n_blocks - 1):
            offset = offset + block
            if offset >= visible:
                run = run + 1
                offset = 0
                seen = words[run, 3] + position
                visible = T.min(words[run, 1], words[run, 3] + last)
                if words[run, 2] != delta:
                    delta = words[run, 2]
                    T.sync_threads(OWN + warpgroup, WARPGROUP)
                    load_queries(q_tile, q, turns, row, count, delta, head, thread)
                    T.fence_proxy_async()
                    T.sync_threads(OWN + warpgroup, WARPGROUP)
            now, before = (number + 1) % STAGES, number % STAGES
            T.barrier_wait(v_full[before], (number // STAGES) & 1)
            T.barrier_wait(k_full[now], ((number + 1) // STAGES) & 1)
            T.fence_proxy_async()
            T.sync_threads(TURN + warpgroup, CONSUMERS)
            T.wgmma_gemm(
                q_tile, k_ring[now, :, :], scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
            )
            T.wgmma_gemm(weights, v_ring[before, :, :], total, policy=T.GemmWarpPolicy.FullRow)
            if warpgroup == 0 or number + 2 < n_blocks:
                T.named_barrier_arrive(TURN + 1 - warpgroup, CONSUMERS)
            T.wait_wgmma(1)
            T.barrier_arrive(k_empty[now])
            hide(scores, offset, seen, visible)
            T.copy(top, top_before)
            T.reduce_max(scores, top, dim=1, clear=False)
            for i in T.Parallel(ROWS):
                fade[i] = T.exp2((top_before[i] - top[i]) * scale)
            for i, j in T.Parallel(ROWS, block):
                scores[i, j] = T.exp2(scores[i, j] * scale - top[i] * scale)
            T.reduce_sum(scores, block_mass, dim=1)
            for i in T.Parallel(ROWS):
                mass[i] = mass[i] * fade[i] + block_mass[i]
            # Without this the compiler waits for the values first and takes the softmax afterwards.
            T.warpgroup_fence_operand(scores, num_regs=ROWS * block // WARPGROUP)
            T.wait_wgmma(0)
            T.barrier_arrive(v_empty[before])
            for i, j in T.Parallel(ROWS, head_dim):
                total[i, j] *= fade[i]
            T.copy(scores, weights)
        T.barrier_wait(v_full[(n_blocks - 1) % STAGES], ((n_blocks - 1) // STAGES) & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(weights, v_ring[(n_blocks - 1) % STAGES, :, :], total, policy=T.GemmWarpPolicy.FullRow)
        T.wait_wgmma(0)
        for i, j in T.Parallel(ROWS, head_dim):
            total[i, j] = total[i, j] / mass[i]
        T.sync_threads(OWN + warpgroup, WARPGROUP)
        T.copy(total, q_tile)
        T.sync_threads(OWN + warpgroup, WARPGROUP)
        for i, j in T.Parallel(ROWS, head_dim):
            if i < count * group:
                out[row + i // group, head * group + i % group, j] = q_tile[i, j]
        for i in T.Parallel(ROWS):
            if i < count * group:
                lse[row + i // group, head * group + i % group] = (T.log2(mass[i]) + top[i] * scale) * math.log(2.0)

    @T.prim_func
    def prefill(
        q: T.Tensor((rows, q_pieces, 8), dtype),
        keys: T.Tensor((n_slots, kv_heads, head_dim), dtype),
        values: T.Tensor((n_slots, kv_heads, head_dim), dtype),
        slots: T.Tensor((max_slots,), int32),
        tiles: T.Tensor((n_tiles, TILE_WORDS), int32),
        words: T.Tensor((n_words, 4), int32),
        turns: T.Tensor((max(shape.rotary_dim // 2, 1),), T.int64),
        out: T.Tensor((rows, shape.q_heads, head_dim), dtype),
        lse: T.Tensor((rows, shape.q_heads), fp32),
        scale: fp32,
    ):
        with T.Kernel(n_tiles, kv_heads, threads=CONSUMERS + PRODUCERS) as (which, head):
            thread = T.get_thread_binding()
            q_low, q_high = T.alloc_shared((ROWS, head_dim), dtype), T.alloc_shared((ROWS, head_dim), dtype)
            k_ring = T.alloc_shared((STAGES, block, head_dim), dtype)
            v_ring = T.alloc_shared((STAGES, block, head_dim), dtype)
            k_full, v_full = T.alloc_barrier([PRODUCERS] * STAGES), T.alloc_barrier([PRODUCERS] * STAGES)
            k_empty, v_empty = T.alloc_barrier([CONSUMERS] * STAGES), T.alloc_barrier([CONSUMERS] * STAGES)
            if thread < WARPGROUP:
                T.set_max_nreg(216, 1)
                attend(
                    0,
                    q_low,
                    k_ring,
                    v_ring,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    q,
                    tiles,
                    words,
                    turns,
                    out,
                    lse,
                    scale,
                    which,
                    head,
                    thread,
                )
            elif thread < CONSUMERS:
                T.set_max_nreg(216, 1)
                attend(
                    1,
                    q_high,
                    k_ring,
                    v_ring,
                    k_full,
                    v_full,
                    k_empty,
                    v_empty,
                    q,
                    tiles,
                    words,
                    turns,
                    out,
                    lse,
                    scale,
                    which,
                    head,
                    thread - WARPGROUP,
                )
            else:
                T.set_max_nreg(72, 0)
                warp = (thread - CONSUMERS) // 32
                lane = thread % 32
                of_warp = warp * rows_of_warp
                row_of_lane = lane // pieces
                column = lane % pieces * 8
                slot, next_slot, start = T.alloc_var(int32), T.alloc_var(int32), T.alloc_var(int32)
                run, offset, visible = T.alloc_var(int32), T.alloc_var(int32), T.alloc_var(int32)
                last = tiles[which, 2] + tiles[which, 1] - 1
                n_blocks = tiles[which, 4]
                run = tiles[which, 3]
                offset = 0
                start = words[run, 0]
                visible = T.min(words[run, 1], words[run, 3] + last)
                next_slot = slots[start + T.min(of_warp + lane % rows_of_warp, visible - 1)]
                for number in T.serial(n_blocks):
                    slot = next_slot
                    offset = offset + block
                    if number + 1 < n_blocks:
                        if offset >= visible:
                            run = run + 1
                            offset = 0
                            start = words[run, 0]
                            visible = T.min(words[run, 1], words[run, 3] + last)
                        next_slot = slots[start + T.min(offset + of_warp + lane % rows_of_warp, visible - 1)]
                    stage = number % STAGES
                    T.barrier_wait(k_empty[stage], ((number // STAGES) & 1) ^ 1)
                    for u in T.unroll(rows_of_warp // rows_at_once):
                        place = u * rows_at_once + row_of_lane
                        T.ptx_cp_async(
                            T.access_ptr(k_ring[stage, of_warp + place, column], "w", 8),
                            T.access_ptr(keys[T.shfl_sync(slot, place), head, column], "r", 8),
                            8,
                        )
                    T.cp_async_barrier_noinc(k_full[stage])
                    T.barrier_wait(v_empty[stage], ((number // STAGES) & 1) ^ 1)
                    for u in T.unroll(rows_of_warp // rows_at_once):
                        place = u * rows_at_once + row_of_lane
                        T.ptx_cp_async(
                            T.access_ptr(v_ring[stage, of_warp + place, column], "w", 8),
                            T.access_ptr(values[T.shfl_sync(slot, place), head, column], "r", 8),
                            8,
                        )
                    T.cp_async_barrier_noinc(v_full[stage])

    return prefill
