// The consumers: one warpgroup attends with its 64 query rows to the tiles as they arrive. Loads no KV.
#pragma once
#include "query.cuh"
#include "shape.cuh"
#include "wgmma.cuh"  // written for the shape by wgmma.py

// Running softmax of the two rows of a tile that a thread has a part of: lane / 4 and lane / 4 + 8 of its warp.
struct Softmax {
    float top[2] = {-INFINITE, -INFINITE};
    float mass[2] = {0.f, 0.f};
};

__device__ __forceinline__ uint64 matrix(uint32 address, uint32 panel_stride) {
    return static_cast<uint64>((address & 0x3ffff) >> 4) | static_cast<uint64>(panel_stride >> 4) << 16 |
           static_cast<uint64>(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void multiply_query_keys(float (&scores)[TILE / 2], uint32 query, uint32 keys) {
    const uint64 a = matrix(query, 16), b = matrix(keys, 16);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        const uint32 inside = k % 4 * 32;
        multiply_scores(scores, a + ((k / 4 * QUERY_PANEL + inside) >> 4), b + ((k / 4 * KV_PANEL + inside) >> 4), k != 0);
    }
    wgmma_commit();
}

__device__ __forceinline__ void multiply_weights_values(float (&total)[HEAD_DIM / 2], uint32 (&weights)[TILE / 4],
                                                        uint32 values) {
    const uint64 b = matrix(values, KV_PANEL);
#pragma unroll
    for (int k = 0; k < TILE / 16; ++k) multiply_values(total, &weights[4 * k], b + (k * 2048 >> 4));
    wgmma_commit();
}

// Hides the tokens that a row does not see: `left` counts those of this tile that it does.
__device__ __forceinline__ void hide(float (&scores)[TILE / 2], const int (&left)[2]) {
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i) {
        const int token = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (token >= left[i / 2 % 2]) scores[i] = -INFINITE;
    }
}

__device__ __forceinline__ float largest_of_4_lanes(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ __forceinline__ float sum_of_4_lanes(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// Scores become weights; `fade` is what earlier weights are worth now.
__device__ __forceinline__ void weigh(float (&scores)[TILE / 2], Softmax& softmax, float (&fade)[2], float scale) {
    float top[2] = {softmax.top[0], softmax.top[1]}, offset[2];
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        top[row] = largest_of_4_lanes(top[row]);
        fade[row] = power_of_2((softmax.top[row] - top[row]) * scale);
        softmax.top[row] = top[row];
        softmax.mass[row] *= fade[row];
        offset[row] = top[row] * scale;
    }
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i) {
        scores[i] = power_of_2(scores[i] * scale - offset[i / 2 % 2]);
        softmax.mass[i / 2 % 2] += scores[i];
    }
}

__device__ __forceinline__ void fade_out(float (&total)[HEAD_DIM / 2], const float (&fade)[2]) {
    if (!__any_sync(~0u, fade[0] != 1.f || fade[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) total[i] *= fade[i / 2 % 2];
}

__device__ __forceinline__ void pack_weights(uint32 (&weights)[TILE / 4], const float (&scores)[TILE / 2]) {
#pragma unroll
    for (int i = 0; i < TILE / 4; ++i) weights[i] = packed<MATH>(scores[2 * i], scores[2 * i + 1]);
}

// One warp's 16 rows of the result: through the query tile, which nobody reads any more, out in 16-byte pieces.
// target: on lanes 0-15 the row of `partials` that row `lane` of the warp goes to, -1 for none.
__device__ __forceinline__ void write_partials(const DecodeParams& params, float (&total)[HEAD_DIM / 2],
                                               Softmax& softmax, uint32 tile, int target) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float inverse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float mass = sum_of_4_lanes(softmax.mass[row]);
        inverse[row] = params.value_scale / mass;
        const int to = __shfl_sync(~0u, target, lane / 4 + 8 * row);
        if (lane % 4 == 0 && to >= 0) params.sums[to] = softmax.top[row] * params.scale + log_2(mass);
    }
    if (!__any_sync(~0u, lane < 16 && target >= 0)) return;
    const uint32 rows = tile + warp * 16 * 128;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float low = total[4 * piece + 2 * row] * inverse[row], high = total[4 * piece + 2 * row + 1] * inverse[row];
            store_shared(rows + piece / 8 * QUERY_PANEL + swizzled(lane / 4 + 8 * row, piece % 8) + lane % 4 * 4,
                         packed<Format::FP16>(within_half(low), within_half(high)));
        }
    }
    __syncwarp();
    constexpr int AT_ONCE = 32 / PIECES;
#pragma unroll
    for (int i = 0; i < 16 / AT_ONCE; ++i) {
        const int row = i * AT_ONCE + lane / PIECES, piece = lane % PIECES;
        const int to = __shfl_sync(~0u, target, row);
        const uint4 value = load_shared(rows + piece / 8 * QUERY_PANEL + swizzled(row, piece % 8));
        if (to >= 0) reinterpret_cast<uint4*>(params.partials)[static_cast<uint64>(to) * PIECES + piece] = value;
    }
}

// Lets the tiles of a task pass that the other consumer attends to.
__device__ __forceinline__ void pass_by(Shared shared, Place& place, int tiles) {
    for (int i = 0; i < tiles; ++i) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            barrier_wait(shared.full(place.stage, which), place.phase);
            if (threadIdx.x % 32 == 0) barrier_arrive(shared.free(place.stage, which));
        }
        place.advance();
    }
}

// One task. `total` and `softmax` start from nothing; limit: tokens that the thread's two rows see.
// The weights of a tile meet its values while the scores of the next tile are worked on.
__device__ __forceinline__ void attend_task(const DecodeParams& params, Shared shared, Place& place, uint32 query,
                                            int tiles, int length, bool causal, const int (&limit)[2],
                                            float (&total)[HEAD_DIM / 2], Softmax& softmax) {
    float scores[TILE / 2], fade[2];
    uint32 weights[TILE / 4];
    Place before = place;
    const bool leader = threadIdx.x % 32 == 0;
    for (int i = 0; i < tiles; ++i) {
        barrier_wait(shared.full(place.stage, 0), place.phase);
        if (i > 0) barrier_wait(shared.full(before.stage, 1), before.phase);
        publish_shared();
        keep(scores);
        keep(total);
        wgmma_begin();
        multiply_query_keys(scores, query, shared.tile(place.stage, 0));
        if (i > 0) {
            multiply_weights_values(total, weights, shared.tile(before.stage, 1));
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        keep(scores);
        if (leader) barrier_arrive(shared.free(place.stage, 0));
        if (causal || length - i * TILE < TILE) {
            const int left[2] = {limit[0] - i * TILE, limit[1] - i * TILE};
            hide(scores, left);
        }
        weigh(scores, softmax, fade, params.scale);
        if (i > 0) {
            wgmma_wait<0>();
            keep(total);
            if (leader) barrier_arrive(shared.free(before.stage, 1));
            fade_out(total, fade);
        }
        pack_weights(weights, scores);
        before = place;
        place.advance();
    }
    barrier_wait(shared.full(before.stage, 1), before.phase);
    publish_shared();
    keep(total);
    wgmma_begin();
    multiply_weights_values(total, weights, shared.tile(before.stage, 1));
    wgmma_wait<0>();
    keep(total);
    if (leader) barrier_arrive(shared.free(before.stage, 1));
}

// All tasks of a bin. With two consumers, a task with more readers than one can hold is for both, each with its half;
// the others are dealt out in turn, so that one consumer starts its next task while the other ends its last.
__device__ __forceinline__ void attend(const DecodeParams& params, Shared shared, int consumer, int head, int4 range,
                                       int4 task) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const uint32 query = shared.query(consumer);
    Place place;
    // What is old may already come closer.
    if (warp == 0 && lane < (task.w & COUNT)) prefetch(params.words + task.z + lane);
    if (warp == 1 && lane < ROTARY_DIM / 32) prefetch(params.turns + lane * 16);
    wait_for_previous_kernel();
    for (int index = range.x; index < range.y; ++index) {
        const int4 now = task;
        if (index + 1 < range.y) task = params.words[index + 1];
        const int tiles = (now.y + TILE - 1) / TILE;
        const int whole_count = now.w & COUNT;
        const bool for_both = CONSUMERS > 1 && whole_count > READERS;
        if (CONSUMERS > 1 && !for_both && (index - range.x) % CONSUMERS != consumer) {
            pass_by(shared, place, tiles);
            continue;
        }
        const int skipped = for_both ? consumer * READERS : 0;
        const int reader = now.z + skipped, count = min(whole_count - skipped, READERS);
        load_queries(params, query, head, reader, count);
        int target = -1, seen = now.y;
        const int row = warp * 16 + lane;
        if (lane < 16 && row < count * GROUP) {
            const int4 word = params.words[reader + row / GROUP];
            target = (word.z * params.kv_heads + head) * GROUP + row % GROUP;
            seen = word.w;
        }
        const int limit[2] = {__shfl_sync(~0u, seen, lane / 4), __shfl_sync(~0u, seen, lane / 4 + 8)};
        publish_shared();
        warpgroup_sync(consumer);
        float total[HEAD_DIM / 2];
        Softmax softmax;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) total[i] = 0.f;
        attend_task(params, shared, place, query, tiles, now.y, now.w & CAUSAL, limit, total, softmax);
        warpgroup_sync(consumer);  // nobody reads the query tile any more
        write_partials(params, total, softmax, query, target);
        warpgroup_sync(consumer);  // nor the results in it
    }
}
