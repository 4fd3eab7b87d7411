"""Our CUDA C++ kernels as the suite and the benchmark call them: plan, slot lists and launch of one step.

It measures nothing.
"""

from __future__ import annotations

import functools

import torch

from anabranch_kernels import cuda_decode
from anabranch_kernels.cuda_decode import CudaDecode, FillSlots, Variant, Workspace
from benchmarks.kernels.planning import layout_for, plan
from benchmarks.kernels.steps import CannotDo, Launch, Shape, Step


def shape_of(shape: Shape, kv_dtype: torch.dtype) -> cuda_decode.Shape:
    rotary_dim = shape.rotary_dim or shape.head_dim
    return cuda_decode.Shape(
        shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype, kv_dtype, rotary_dim, shape.interleaved
    )


@functools.cache
def kernels(shape: Shape, kv_dtype: torch.dtype, wide: bool, device: torch.device) -> tuple[CudaDecode, FillSlots]:
    variant = Variant(shape_of(shape, kv_dtype), wide)
    return CudaDecode(variant, scale=shape.scale, rotary=shape.rotary, device=device), FillSlots(device)


def prepare(step: Step, *, wide: bool = False) -> Launch:
    """wide: which variant."""
    shape, device, kv_dtype = shape_of(step.shape, step.k_cache.dtype), step.device, step.k_cache.dtype
    if fault := shape.fault():
        raise CannotDo(fault)
    variant = Variant(shape, wide)
    decode, fill = kernels(step.shape, kv_dtype, variant.wide, device)
    bins = variant.bins(torch.cuda.get_device_properties(device).multi_processor_count)
    layout = layout_for(step.placed, bins, variant.readers_per_task)
    made = plan(step.placed, layout)
    words = torch.from_numpy(made.buffer).to(device)
    table = torch.from_numpy(step.placed.table).to(device)
    slots = torch.full((layout.max_slots,), -1, dtype=torch.int32, device=device)
    longest = int(made.copies[:, 2].max(initial=0))
    fill.run(table, words, layout.words + 4 * (made.n_tasks + made.n_readers), made.n_copies, longest, slots)
    workspace = Workspace.of(shape, layout.max_partials, device)
    out = torch.empty_like(step.q)
    lse = torch.empty(step.q.shape[:-1], device=device)
    torch.cuda.synchronize(device)

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        decode.run(
            step.q,
            step.k_cache,
            step.v_cache,
            words,
            slots,
            layout,
            workspace,
            out,
            lse,
            k_scale=step.k_scale,
            v_scale=step.v_scale,
        )
        return out, lse

    return launch
