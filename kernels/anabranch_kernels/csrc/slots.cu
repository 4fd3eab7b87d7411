// Fills the slot lists of a step from the server's table of slots, as the plan's copies say (tasks.py).
// Runs outside of the CUDA graph: the table's rows may be given to others while a graph runs.
#include "device.cuh"

// Grid: copies x parts. Each copy {from, to, length, 0} is shared by the blocks of its column.
extern "C" __global__ void __launch_bounds__(256)
    fill_slots(const int* __restrict__ table, const int4* __restrict__ copies, int* __restrict__ slots) {
    const int4 copy = copies[blockIdx.x];
    for (int i = blockIdx.y * 256 + threadIdx.x; i < copy.z; i += gridDim.y * 256) slots[copy.y + i] = table[copy.x + i];
}
