// Joins the partial results of each query row: out in the query's dtype, lse in fp32, natural log.
// It attends to nothing itself, and a row without partials gets out 0 and lse -inf.
//
// Compiled with -D of HEAD_DIM and OUT (a Format). Grid: query rows x slices of 512 numbers of a row. A block is 8 teams of
// 64 threads; each team takes every 8th partial of the row, each thread 8 numbers. Everything a team needs is asked for
// before the first use, since all of this is latency.
#include "device.cuh"

namespace {
constexpr int TEAMS = 8;
constexpr int AT_ONCE = 5;  // partials of a team on their way at once
constexpr int TEAM = 64;
constexpr int PER_THREAD = 8;
constexpr int SLICE = TEAM * PER_THREAD;
constexpr float LOWEST = -1e30f;
}  // namespace

struct MergeParams {
    const uint4* partials;  // [max_partials, q_heads, HEAD_DIM] fp16
    const float* sums;      // [max_partials, q_heads], log2
    const int* pointers;    // [rows + 1]
    char* out;              // [rows, q_heads, HEAD_DIM]
    float* lse;             // [rows, q_heads]
    int q_heads;
};

extern "C" __global__ void __launch_bounds__(TEAMS* TEAM) merge(const __grid_constant__ MergeParams params) {
    __shared__ float gathered[TEAMS][TEAM][PER_THREAD + 1];
    __shared__ float tops[TEAMS][TEAM], masses[TEAMS][TEAM];
    const int row = blockIdx.x, team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    const int width = params.q_heads * HEAD_DIM;
    const int column = blockIdx.y * SLICE + member * PER_THREAD;
    const bool inside = column < width;
    const int head = column / HEAD_DIM;
    const int first = params.pointers[row], stop = params.pointers[row + 1];
    let_next_kernel_start();
    wait_for_previous_kernel();

    float top = LOWEST, mass = 0.f, total[PER_THREAD] = {};
    for (int begin = first + team; inside && begin < stop; begin += TEAMS * AT_ONCE) {
        float exponents[AT_ONCE];
        uint4 values[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const long long partial = min(begin + TEAMS * k, stop - 1);
            exponents[k] = begin + TEAMS * k < stop ? params.sums[partial * params.q_heads + head] : LOWEST;
            values[k] = params.partials[(partial * width + column) / PER_THREAD];
        }
        float top_now = top;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) top_now = fmaxf(top_now, exponents[k]);
        const float fade = power_of_2(top - top_now);
        top = top_now;
        mass *= fade;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) total[i] *= fade;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const float weight = begin + TEAMS * k < stop ? power_of_2(exponents[k] - top) : 0.f;
            mass += weight;
            const uint32 pairs[4] = {values[k].x, values[k].y, values[k].z, values[k].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpacked<Format::FP16>(pairs[i]);
                total[2 * i] += weight * pair.x;
                total[2 * i + 1] += weight * pair.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) gathered[team][member][i] = total[i];
    tops[team][member] = top;
    masses[team][member] = mass;
    __syncthreads();

    // Each of the first 256 threads finishes two numbers.
    const int at = threadIdx.x * 2, owner = at / PER_THREAD, place = at % PER_THREAD;
    const int final_column = blockIdx.y * SLICE + at;
    if (at >= SLICE || final_column >= width) return;
    top = LOWEST;
    mass = 0.f;
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int k = 0; k < TEAMS; ++k) top = fmaxf(top, tops[k][owner]);
#pragma unroll
    for (int k = 0; k < TEAMS; ++k) {
        const float weight = power_of_2(tops[k][owner] - top);
        mass += weight * masses[k][owner];
        low += weight * gathered[k][owner][place];
        high += weight * gathered[k][owner][place + 1];
    }
    const float inverse = mass > 0.f ? 1.f / mass : 0.f;
    const long long result = static_cast<long long>(row) * width + final_column;
    reinterpret_cast<uint32*>(params.out)[result / 2] = packed<Format::OUT>(low * inverse, high * inverse);
    if (final_column % HEAD_DIM == 0) {
        const float natural = 0.6931471805599453f;
        params.lse[result / HEAD_DIM] = mass > 0.f ? (top + log_2(mass)) * natural : -INFINITE;
    }
}
