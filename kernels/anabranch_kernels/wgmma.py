"""Writes the C++ wrappers of the two tensor core instructions that the decode kernel is made of, for one shape.

It writes text only; `jit.py` compiles it. The instructions name up to 133 registers each: nothing to write by hand.
"""

from __future__ import annotations

_WRAPPERS = """\
// Written by wgmma.py.
#pragma once

__device__ __forceinline__ void wgmma_begin() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
__device__ __forceinline__ void wgmma_commit() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}}
// The compiler may neither move nor copy these registers across this point.
template <int SIZE>
__device__ __forceinline__ void keep(float (&registers)[SIZE]) {{
#pragma unroll
    for (int i = 0; i < SIZE; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}}

// sum [64, {tile}] (+)= a [64, 16] x b [{tile}, 16] transposed, both in shared memory
__device__ __forceinline__ void multiply_scores(float (&sum)[{n_scores}], uint64 a, uint64 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{n_scores_2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.{kind}.{kind} {{{scores}}}, %{n_scores}, %{n_scores_1}, "
        "add, 1, 1, 0, 0;\\n}}"
        : {scores_out}
        : "l"(a), "l"(b), "r"(add));
}}

// sum [64, {width}] += a [64, 16] in registers x b [16, {width}] in shared memory
__device__ __forceinline__ void multiply_values(float (&sum)[{n_values}], const uint32* a, uint64 b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{{values}}}, "
        "{{{a}}}, %{n_values_4}, 1, 1, 1, 1;"
        : {values_out}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


def wrappers(tile: int, width: int, kind: str) -> str:
    """C++ text. tile: tokens; width: columns of the values; kind: "bf16" or "f16"."""
    n_scores, n_values = tile // 2, width // 2

    def named(start: int, count: int) -> str:
        return ", ".join(f"%{i}" for i in range(start, start + count))

    def outputs(count: int) -> str:
        return ", ".join(f'"+f"(sum[{i}])' for i in range(count))

    return _WRAPPERS.format(
        tile=tile,
        width=width,
        kind=kind,
        n_scores=n_scores,
        n_scores_1=n_scores + 1,
        n_scores_2=n_scores + 2,
        n_values=n_values,
        n_values_4=n_values + 4,
        scores=named(0, n_scores),
        scores_out=outputs(n_scores),
        values=named(0, n_values),
        values_out=outputs(n_values),
        a=named(n_values, 4),
    )
