// Decode attention over a task plan (tasks.py): leaves a partial result for each reader of each task; merge.cu joins them.
//
// A thread block works through one bin of tasks for one KV head. Producer warps gather KV slot by slot into a ring of tiles;
// consumer warpgroups hold 64 query rows each (readers x heads of the group) and attend. Keys stay as they are stored: a
// reader that sees them shifted has its query turned the other way, so readers with any shifts share one read.
//
// Old KV is asked for before the previous kernel of the stream is complete. Tiles with fresh slots, queries and all writes
// wait for it. Plan, slots and old KV must be complete before the previous kernel starts.
#include "attend.cuh"
#include "gather.cuh"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

// Grid: bins x KV heads, the heads of a bin side by side.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode(const __grid_constant__ DecodeParams params) {
    extern __shared__ __align__(1024) char memory[];
    const Shared shared{shared_address(memory)};
    const int head = blockIdx.x % params.kv_heads, bin = blockIdx.x / params.kv_heads;
    const int group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    const int4 range = params.bins[2 * bin], first = params.bins[2 * bin + 1];
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            for (int which = 0; which < 2; ++which) {
                barrier_init(shared.full(stage, which), PRODUCERS);
                barrier_init(shared.free(stage, which), 4 * CONSUMERS);
            }
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (range.x < range.y) {
        if (group == CONSUMERS) {
#if PRODUCER_REGISTERS
            asm volatile("setmaxnreg.dec.sync.aligned.u32 " TEXT(PRODUCER_REGISTERS) ";");
#endif
            gather(params, shared, head, range, first);
        } else {
#if CONSUMER_REGISTERS
            asm volatile("setmaxnreg.inc.sync.aligned.u32 " TEXT(CONSUMER_REGISTERS) ";");
#endif
            attend(params, shared, group, head, range, first);
        }
    }
    let_next_kernel_start();
}
