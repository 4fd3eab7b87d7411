"""Our TileLang kernels as the suite and the benchmark call them: plan, slot lists and launch of one step.

It measures nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels import cuda
from benchmarks.kernels.placing import parts
from benchmarks.kernels.planning import layout_for, plan
from benchmarks.kernels.steps import CannotDo, Launch, Shape, Step


def decode(step: Step, wide: bool = False) -> Launch:
    from anabranch_kernels.cuda_decode import Workspace
    from anabranch_kernels.tilelang_launch import TileLangDecode

    shape = _tilelang_shape(step.shape, wide)
    kernel = TileLangDecode(shape, scale=step.shape.scale, rotary=step.shape.rotary, device=step.device)
    layout = layout_for(step.placed, shape.n_bins(_multiprocessors(step)), shape.readers_per_task)
    planned = plan(step.placed, layout)
    buffer = torch.from_numpy(planned.buffer).to(step.device)
    slots = torch.from_numpy(filled(layout.max_slots, planned.copies, step.placed.table)).to(step.device)
    workspace = Workspace.of(cuda.shape_of(step.shape, step.shape.kv_dtype), layout.max_partials, step.device)
    out, lse = _results(step)

    def launch() -> tuple[Tensor, Tensor]:
        kernel.run(step.q, step.k_cache, step.v_cache, buffer, slots, planned.layout, workspace, out, lse)
        return out, lse

    return launch


def _tilelang_shape(shape: Shape, wide: bool = False) -> Any:
    from anabranch_kernels.tilelang_launch import shape_of

    try:
        return shape_of(cuda.shape_of(shape, shape.kv_dtype), wide)
    except ValueError as error:
        raise CannotDo(str(error)) from error


def prefill(step: Step) -> Launch:
    """One pass over all that a request sees, without partial results."""
    from anabranch_kernels.prefill_plan import Suffix, prefill_plan
    from anabranch_kernels.tilelang_launch import TileLangPrefill
    from anabranch_kernels.tilelang_prefill import kv_block, tokens_per_tile

    shape = _tilelang_shape(step.shape)
    kernel = TileLangPrefill(shape, scale=step.shape.scale, rotary=step.shape.rotary, device=step.device)
    placed = step.placed
    suffixes = [
        Suffix(
            row, request.length, request.new,
            np.array([part for part in parts(request) if part.delta], np.int64).reshape(-1, 3),
        )
        for row, request in zip(placed.rows.tolist(), placed.workload.requests, strict=True)
        if request.length
    ]  # fmt: skip
    if len(suffixes) < len(placed.workload.requests):
        raise CannotDo("lanes that see nothing")
    planned = prefill_plan(
        suffixes, table_width=placed.table.shape[1], tokens_per_tile=tokens_per_tile(shape), kv_block=kv_block(shape)
    )
    slots = filled(planned.n_slots, planned.copies, placed.table)
    device = step.device
    tiles, words = (torch.from_numpy(one).to(device) for one in (planned.tiles, planned.words))
    slots = torch.from_numpy(slots).to(device)
    out, lse = _results(step)

    def launch() -> tuple[Tensor, Tensor]:
        kernel.run(step.q, step.k_cache, step.v_cache, tiles, words, slots, out, lse)
        return out, lse

    return launch


def filled(size: int, copies: np.ndarray, table: np.ndarray) -> np.ndarray:
    """What the copies of a plan make of `req_to_token`, on the host."""
    slots = np.full(max(1, size), -1, np.int32)
    flat = table.reshape(-1)
    for source, target, length, _ in copies.tolist():
        slots[target : target + length] = flat[source : source + length]
    return slots


def _multiprocessors(step: Step) -> int:
    return torch.cuda.get_device_properties(step.device).multi_processor_count


def _results(step: Step) -> tuple[Tensor, Tensor]:
    return torch.empty_like(step.q), torch.empty(step.q.shape[:-1], dtype=torch.float32, device=step.device)
