"""Placing: own tokens get the positions that the context plan gave them, in every kind of forward.

SGLang counts positions by index. Own tokens are contiguous, so one offset a request turns index into position.
"""

from __future__ import annotations

from typing import Any

import torch

from anabranch_kernels import Part
from anabranch_server.compile import ContextPlan
from anabranch_server.engine.cache import find
from anabranch_server.engine.versions import adapter


def after_prepare_for_extend(result: Any, batch: Any) -> None:
    """Rows are given out here: write what the requests of this batch need into the side tables."""
    cache = find(batch.tree_cache)
    if cache is None:
        return
    rows, offsets, parts = [], [], []
    for req in batch.reqs:
        run = cache.run_of(req)
        plan = run.running.context if run is not None else ContextPlan()
        if adapter().is_stub(req, len(plan)):
            plan = ContextPlan()
        rows.append(adapter().row(req))
        offsets.append(plan.start - len(plan))
        parts.append(shifted_parts(plan))
    cache.rows.set(rows, offsets, parts)


def after_init_new(forward: Any, cls: type, batch: Any, model_runner: Any, **kwargs: Any) -> None:
    cache = find(getattr(batch, "tree_cache", None))
    if cache is None or forward.positions is None or not forward.positions.numel():
        return
    offset = cache.rows.position_offset[forward.req_pool_indices]
    if not forward.forward_mode.is_decode():
        lengths = forward.extend_seq_lens.to(torch.int64)
        offset = torch.repeat_interleave(offset, lengths, output_size=forward.positions.numel())
    forward.positions = (forward.positions + offset).to(forward.positions.dtype)


def shifted_parts(plan: ContextPlan) -> tuple[Part, ...]:
    """The parts of the plan's slot list that are seen elsewhere than where they were computed."""
    parts, at = [], 0
    for interval in plan.intervals:
        if interval.delta:
            parts.append(Part(at, at + len(interval), interval.delta))
        at += len(interval)
    return tuple(parts)
