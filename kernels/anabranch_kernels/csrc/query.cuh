// A task's query tile: each reader's query turned by -delta, for all heads of the group. No attention.
#pragma once
#include "shape.cuh"

// 16 columns that turn together: two pieces of 8.
constexpr int PAIRS = HEAD_DIM / 16;
constexpr int TURNING = ROTARY_DIM / 16;

__device__ __forceinline__ int first_piece(int pair) { return pair < TURNING && !INTERLEAVED ? pair : 2 * pair; }
__device__ __forceinline__ int second_piece(int pair) {
    return pair < TURNING && !INTERLEAVED ? pair + TURNING : 2 * pair + 1;
}

// Cosine and sine of turning by -delta. The product wraps around, which drops whole turns exactly.
__device__ __forceinline__ void angles(const uint64* turns, int delta, float (&cosine)[8], float (&sine)[8]) {
    const uint64 back = static_cast<uint64>(-static_cast<long long>(delta));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int part_of_turn = static_cast<int>(back * turns[i] >> 32);
        const float angle = static_cast<float>(part_of_turn) * 1.4629180792671596e-9f;  // 2 pi / 2**32
        asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cosine[i]) : "f"(angle));
        asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sine[i]) : "f"(angle));
    }
}

__device__ __forceinline__ void turn(float2& a, float2& b, const float (&cosine)[8], const float (&sine)[8], int i) {
    // `i` counts pairs of numbers of a piece.
    if constexpr (INTERLEAVED) {
        const float2 x = a, y = b;
        a = make_float2(x.x * cosine[i] - x.y * sine[i], x.y * cosine[i] + x.x * sine[i]);
        b = make_float2(y.x * cosine[i + 4] - y.y * sine[i + 4], y.y * cosine[i + 4] + y.x * sine[i + 4]);
    } else {
        const float2 x = a, y = b;
        a = make_float2(x.x * cosine[2 * i] - y.x * sine[2 * i], x.y * cosine[2 * i + 1] - y.y * sine[2 * i + 1]);
        b = make_float2(y.x * cosine[2 * i] + x.x * sine[2 * i], y.y * cosine[2 * i + 1] + x.y * sine[2 * i + 1]);
    }
}

__device__ __forceinline__ void turn(uint4& first, uint4& second, bool by_any, const float (&cosine)[8],
                                     const float (&sine)[8]) {
    if (Format::QUERY == MATH && !by_any) return;  // bit for bit
    uint32 a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 x = unpacked<Format::QUERY>(a[i]), y = unpacked<Format::QUERY>(b[i]);
        if (by_any) turn(x, y, cosine, sine, i);
        a[i] = packed<MATH>(x.x, x.y);
        b[i] = packed<MATH>(y.x, y.y);
    }
    first = make_uint4(a[0], a[1], a[2], a[3]);
    second = make_uint4(b[0], b[1], b[2], b[3]);
}

// Heads whose queries are on their way at once: more of them cost registers.
constexpr int HEADS_AT_ONCE = GROUP < 4 ? GROUP : 4;

// Fills the tile with `count` readers' queries from word `reader` on, and the rows of readers that are not there with 0.
__device__ __forceinline__ void load_queries(const DecodeParams& params, uint32 tile, int head, int reader, int count) {
    for (int item = threadIdx.x % WARPGROUP; item < READERS * PAIRS; item += WARPGROUP) {
        const int which = item / PAIRS, pair = item % PAIRS;
        const int pieces[2] = {first_piece(pair), second_piece(pair)};
        const bool present = which < count;
        const uint4* from = nullptr;
        bool by_any = false;
        float cosine[8], sine[8];
        if (present) {
            const int4 word = params.words[reader + which];
            from = reinterpret_cast<const uint4*>(params.query + static_cast<uint64>(word.x) * params.query_stride) +
                   head * GROUP * PIECES;
            by_any = pair < TURNING && word.y != 0;
            if (by_any) angles(params.turns + pair * 8, word.y, cosine, sine);
        }
#pragma unroll
        for (int begin = 0; begin < GROUP; begin += HEADS_AT_ONCE) {
            uint4 first[HEADS_AT_ONCE], second[HEADS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < HEADS_AT_ONCE; ++i) {
                const bool there = present && begin + i < GROUP;
                first[i] = there ? from[(begin + i) * PIECES + pieces[0]] : make_uint4(0, 0, 0, 0);
                second[i] = there ? from[(begin + i) * PIECES + pieces[1]] : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < HEADS_AT_ONCE && begin + i < GROUP; ++i) {
                if (present) turn(first[i], second[i], by_any, cosine, sine);
                const int row = which * GROUP + begin + i;
                store_shared(tile + pieces[0] / 8 * QUERY_PANEL + swizzled(row, pieces[0] & 7), first[i]);
                store_shared(tile + pieces[1] / 8 * QUERY_PANEL + swizzled(row, pieces[1] & 7), second[i]);
            }
        }
    }
}
