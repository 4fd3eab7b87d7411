// What the decode kernel is compiled for, and where things lie in its shared memory. No code that runs.
//
// From -D: HEAD_DIM, GROUP (query heads per KV head), QUERY and KV (a Format), ROTARY_DIM, INTERLEAVED, CONSUMERS
// (warpgroups of 64 query rows), TILE (tokens), STAGES, RAW_TILES (e4m3: tiles on their way; else 1), BLOCKS_PER_SM,
// PRODUCER_REGISTERS and CONSUMER_REGISTERS (0: as compiled).
#pragma once
#include "device.cuh"

constexpr int WARPGROUP = 128;
constexpr int PRODUCERS = WARPGROUP;
constexpr int THREADS = CONSUMERS * WARPGROUP + PRODUCERS;
constexpr int ROWS = 64;              // query rows of a consumer: readers x heads of the group
constexpr int READERS = ROWS / GROUP;  // readers of a consumer
constexpr bool NARROW_KV = Format::KV == Format::E4M3;
// What the tensor cores multiply. e4m3 is widened to fp16, which is exact.
constexpr Format MATH = NARROW_KV ? Format::FP16 : Format::KV;
static_assert(NARROW_KV || Format::QUERY == Format::KV, "queries and 16-bit KV are of one format");
static_assert(HEAD_DIM % 64 == 0 && ROTARY_DIM % 16 == 0 && ROTARY_DIM <= HEAD_DIM && READERS >= 1);

// A tile is kept as panels of 64 columns, 128 bytes a row, 16-byte pieces swizzled: piece ^ (row % 8).
constexpr int PANEL_COLUMNS = 64;
constexpr int PIECES = HEAD_DIM / 8;  // of 16 bytes, 16-bit numbers, per row
constexpr uint32 KV_PANEL = TILE * 128;
constexpr uint32 KV_TILE = TILE * HEAD_DIM * 2;
constexpr uint32 QUERY_PANEL = ROWS * 128;
constexpr uint32 QUERY_TILE = ROWS * HEAD_DIM * 2;
constexpr uint32 RAW_TILE = NARROW_KV ? TILE * HEAD_DIM * 2 : 0;  // K and V together

// Flags of a task, as in tasks.py.
constexpr int FRESH = 1 << 16;
constexpr int CAUSAL = 1 << 17;
constexpr int COUNT = FRESH - 1;
constexpr int FRESH_SHIFT = 18;

struct DecodeParams {
    const char* query;       // [rows, q_heads, HEAD_DIM], `query_stride` bytes between rows
    const char* keys;        // [slots, kv_heads, HEAD_DIM], `key_stride` bytes between slots
    const char* values;      // likewise
    const int* slots;        // the plan: tasks.py
    const int4* bins;
    const int4* words;
    const uint64* turns;     // [ROTARY_DIM / 2], turns per position in units of 2**-64
    char* partials;          // [max_partials, q_heads, HEAD_DIM] fp16, each normalised
    float* sums;             // [max_partials, q_heads] fp32, log2 of the sum of exponentiated scores
    uint32 query_stride, key_stride, value_stride;
    int kv_heads;
    float scale;             // of scores, in log2
    float value_scale;       // of the result
};

// The ring of K and V tiles, the query tiles, e4m3 tiles not yet widened, and the barriers.
struct Shared {
    uint32 base;

    __device__ uint32 tile(int stage, int which) const { return base + (2 * stage + which) * KV_TILE; }
    __device__ uint32 query(int consumer) const { return base + 2 * STAGES * KV_TILE + consumer * QUERY_TILE; }
    __device__ uint32 raw() const { return query(CONSUMERS); }
    __device__ uint32 barriers() const { return raw() + RAW_TILES * RAW_TILE; }
    // A tile has arrived; a tile is free again. which: 0 is K, 1 is V.
    __device__ uint32 full(int stage, int which) const { return barriers() + 8 * (2 * stage + which); }
    __device__ uint32 free(int stage, int which) const { return full(STAGES + stage, which); }
};
constexpr int BARRIERS = 4 * STAGES;

// A place in the ring. `phase` flips each time round.
struct Place {
    int stage = 0;
    uint32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ uint32 swizzled(int row, int piece) {
    return row * 128 + ((piece ^ (row & 7)) << 4);
}
