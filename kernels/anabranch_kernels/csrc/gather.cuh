// The producers: KV gathered slot by slot into the ring, never stopping at the border of two tasks. Attends to nothing.
#pragma once
#include "shape.cuh"

// The tiles of a bin, one after the other across its tasks. The slots of the next tile are always on their way.
struct Walk {
    const DecodeParams& params;
    int index, end;  // of the task
    int start = 0;   // of the tile in its task
    int row;         // of the tile, whose slot this thread holds
    int4 task, next;
    int slot;
    bool more = true;

    __device__ __forceinline__ Walk(const DecodeParams& params, int4 range, int4 first, int row)
        : params(params), index(range.x), end(range.y), row(row), task(first), next(first) {
        if (index + 1 < end) next = params.words[index + 1];
        fetch();
    }
    __device__ __forceinline__ int tokens() const { return min(TILE, task.y - start); }
    // Whether KV of this tile may be written by the kernel before.
    __device__ __forceinline__ bool fresh() const {
        const int count = task.w >> FRESH_SHIFT;
        return (task.w & FRESH) && (count == 0 || start + TILE > task.y - count);
    }
    __device__ __forceinline__ void step() {
        start += TILE;
        if (start >= task.y) {
            start = 0;
            more = ++index < end;
            if (!more) return;
            task = next;
            if (index + 1 < end) next = params.words[index + 1];
        }
        fetch();
    }

   private:
    // Past the end of the task the last slot is named again; its KV is not copied.
    __device__ __forceinline__ void fetch() { slot = params.slots[task.x + min(start + row, task.y - 1)]; }
};

constexpr int WARP_ROWS = TILE / 4;  // rows of a tile that one producer warp fills

#define KV_BYTES (NARROW_KV ? 1 : 2)
constexpr int LANES_PER_ROW = HEAD_DIM * KV_BYTES / 16;
constexpr int ROWS_AT_ONCE = 32 / LANES_PER_ROW;
constexpr int COPIES = WARP_ROWS / ROWS_AT_ONCE;  // of a thread, for one tile of K or V
static_assert(LANES_PER_ROW <= 32 && COPIES >= 1);

#undef KV_BYTES

__device__ __forceinline__ void gather_16_bit(const DecodeParams& params, Shared shared, int head, int4 range,
                                              int4 first) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int piece = lane % LANES_PER_ROW;
    const char* keys = params.keys + head * HEAD_DIM * 2 + piece * 16;
    const char* values = params.values + head * HEAD_DIM * 2 + piece * 16;
    const uint32 panel = piece / 8 * KV_PANEL;
    const uint64 policy = passing_through();
    Walk walk(params, range, first, warp * WARP_ROWS + lane % WARP_ROWS);
    Place place;
    while (walk.more) {
        const int slot = walk.slot, tokens = walk.tokens();
        if (walk.fresh()) wait_for_previous_kernel();
        walk.step();
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const char* from = which ? values : keys;
            const uint32 stride = which ? params.value_stride : params.key_stride;
            const uint32 to = shared.tile(place.stage, which) + panel;
            barrier_wait(shared.free(place.stage, which), place.phase ^ 1);
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int local = i * ROWS_AT_ONCE + lane / LANES_PER_ROW;
                const int row = warp * WARP_ROWS + local;
                const uint32 at = __shfl_sync(~0u, slot, local);
                copy_16(to + swizzled(row, piece & 7), from + static_cast<uint64>(at) * stride, row < tokens ? 16 : 0,
                        policy);
            }
            barrier_arrive_after_copies(shared.full(place.stage, which));
        }
        place.advance();
    }
}

// e4m3 goes through a second ring. Each thread widens just what it copied itself, so nothing there needs a barrier.
__device__ __forceinline__ void gather_8_bit(const DecodeParams& params, Shared shared, int head, int4 range,
                                             int4 first) {
    const int thread = threadIdx.x % PRODUCERS, warp = thread / 32, lane = thread % 32;
    const int piece = lane % LANES_PER_ROW;
    const char* keys = params.keys + head * HEAD_DIM + piece * 16;
    const char* values = params.values + head * HEAD_DIM + piece * 16;
    const uint32 raw = shared.raw() + thread * 16;
    const uint64 policy = passing_through();
    Walk walk(params, range, first, warp * WARP_ROWS + lane % WARP_ROWS);
    Place place;
    int asked = 0;  // tiles asked for; `widening` follows RAW_TILES - 1 behind
    for (int widening = 1 - RAW_TILES; widening < asked; ++widening) {
        if (walk.more) {
            const int slot = walk.slot, tokens = walk.tokens();
            if (walk.fresh()) wait_for_previous_kernel();
            walk.step();
            const uint32 to = raw + asked % RAW_TILES * RAW_TILE;
#pragma unroll
            for (int i = 0; i < 2 * COPIES; ++i) {
                const int which = i / COPIES, local = i % COPIES * ROWS_AT_ONCE + lane / LANES_PER_ROW;
                const uint32 at = __shfl_sync(~0u, slot, local);
                const char* from = which ? values : keys;
                const uint32 stride = which ? params.value_stride : params.key_stride;
                copy_16(to + i * PRODUCERS * 16, from + static_cast<uint64>(at) * stride,
                        warp * WARP_ROWS + local < tokens ? 16 : 0, policy);
            }
            ++asked;
        }
        copies_commit();
        if (widening < 0) continue;
        copies_wait<RAW_TILES - 1>();
        const uint32 source = raw + widening % RAW_TILES * RAW_TILE;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const uint32 to = shared.tile(place.stage, which) + piece / 4 * KV_PANEL;
            barrier_wait(shared.free(place.stage, which), place.phase ^ 1);
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int row = warp * WARP_ROWS + i * ROWS_AT_ONCE + lane / LANES_PER_ROW;
                const uint4 narrow = load_shared(source + (which * COPIES + i) * PRODUCERS * 16);
                const uint2 a = widened(narrow.x), b = widened(narrow.y), c = widened(narrow.z), d = widened(narrow.w);
                store_shared(to + swizzled(row, piece * 2 & 7), make_uint4(a.x, a.y, b.x, b.y));
                store_shared(to + swizzled(row, (piece * 2 & 7) + 1), make_uint4(c.x, c.y, d.x, d.y));
            }
            publish_shared();
            barrier_arrive(shared.full(place.stage, which));
        }
        place.advance();
    }
}

__device__ __forceinline__ void gather(const DecodeParams& params, Shared shared, int head, int4 range, int4 first) {
    if constexpr (NARROW_KV) {
        gather_8_bit(params, shared, head, range, first);
    } else {
        gather_16_bit(params, shared, head, range, first);
    }
}
