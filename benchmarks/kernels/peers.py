"""The attention kernels of others, given the same pool, slots and queries. None of them can shift what it reads.

What they are asked is therefore the step without its shifts; everything else is equal. Slots are pages of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.placing import Placed
from benchmarks.kernels.steps import CannotDo, Step

Result = Callable[[], Any]
"""Launches the kernels and gives out, [rows, q_heads, head_dim]."""
WORKSPACE = 384 << 20  # bytes, for partial results of FlashInfer
TRITON_SPLITS = (8, 32)
"""SGLang's default, and one for few long requests."""


def flash_attention_3(step: Step) -> Result:
    """FA3 as SGLang has it and calls it: a page table, as many splits as it thinks best."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    placed = step.placed
    width = int(placed.lengths.max())
    pages = torch.from_numpy(np.ascontiguousarray(placed.table[placed.rows, :width])).to(step.device)
    arguments = {
        "k_cache": step.k_cache.unsqueeze(1),
        "v_cache": step.v_cache.unsqueeze(1),
        "page_table": pages,
        "cache_seqlens": _int32(placed.lengths, step),
        "cu_seqlens_q": _int32(_starts(placed.new), step),
        "max_seqlen_q": int(placed.new.max()),
        "softmax_scale": step.shape.scale,
        "causal": True,
    }
    return partial(flash_attn_with_kvcache, step.q, **arguments)


def flash_attention_3_contiguous(step: Step) -> Result:
    """FA3 on keys and values that lie in order, without a page table: the best case of a plain prompt."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    placed = step.placed
    slots = torch.from_numpy(np.concatenate(placed.slots)).to(step.device).long()
    arguments = {
        "k": step.k_cache[slots],
        "v": step.v_cache[slots],
        "cu_seqlens_q": _int32(_starts(placed.new), step),
        "cu_seqlens_k": _int32(_starts(placed.lengths), step),
        "max_seqlen_q": int(placed.new.max()),
        "max_seqlen_k": int(placed.lengths.max()),
        "softmax_scale": step.shape.scale,
        "causal": True,
    }
    return partial(flash_attn_varlen_func, step.q, **arguments)


def flashinfer_decode(step: Step) -> Result:
    """FlashInfer's batch decode with tensor cores."""
    import flashinfer

    _only_decode(step)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=step.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indices = torch.from_numpy(np.concatenate(step.placed.slots)).to(step.device)
    wrapper.plan(
        _int32(_starts(step.placed.lengths), step), indices, _ones(len(step.placed.slots), step),
        step.shape.q_heads, step.shape.kv_heads, step.shape.head_dim, 1,
        q_data_type=step.shape.dtype, kv_data_type=step.shape.dtype, sm_scale=step.shape.scale,
    )  # fmt: skip
    return partial(_run, wrapper, step)


def flashinfer_cascade(step: Step, backend: str = "auto") -> Result:
    """FlashInfer's cascade: what all see on one level, what each has of its own on the next. backend: "fa2" makes it
    use the kernel that its batch decode uses, instead of the one that it picks on Hopper."""
    import flashinfer

    _only_decode(step)
    shared = common_start(step.placed)
    if len(step.placed.slots) < 2 or shared == 0:
        raise CannotDo("no two requests share a beginning")
    if any(len(request.context) > 1 for request in step.placed.workload.requests):
        raise CannotDo("requests share more than a beginning")
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=step.device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = backend
    readers = len(step.placed.slots)
    own = [slots[shared:] for slots in step.placed.slots]
    wrapper.plan(
        [_int32(np.array([0, readers]), step), _int32(np.arange(readers + 1), step)],
        [_int32(np.array([0, shared]), step), _int32(_starts(np.array([len(slots) for slots in own])), step)],
        [_int32(step.placed.slots[0][:shared], step), _int32(np.concatenate(own), step)],
        [_ones(1, step), _ones(readers, step)],
        step.shape.q_heads, step.shape.kv_heads, step.shape.head_dim, 1,
        q_data_type=str(step.shape.dtype).removeprefix("torch."), sm_scale=step.shape.scale,
    )  # fmt: skip
    return partial(_run, wrapper, step)


def common_start(placed: Placed) -> int:
    """Slots with which all requests begin."""
    shortest = min(map(len, placed.slots))
    equal = np.stack([slots[:shortest] == placed.slots[0][:shortest] for slots in placed.slots]).all(0)
    return shortest if equal.all() else int(equal.argmin())


def triton(step: Step, splits: int) -> Result:
    """SGLang's decode in Triton. It is part of SGLang, but needs no server."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    _only_decode(step)
    readers, q_heads, head_dim = step.q.shape
    out = torch.empty_like(step.q)
    arguments = (
        step.q, step.k_cache, step.v_cache, out,
        _int32(_starts(step.placed.lengths), step),
        torch.from_numpy(np.concatenate(step.placed.slots)).to(step.device).long(),
        torch.empty(readers, q_heads, splits, head_dim, device=step.device),
        torch.empty(readers, q_heads, splits, device=step.device),
        torch.full((readers,), splits, dtype=torch.int32, device=step.device),
        splits, step.shape.scale, 1.0, 1.0,
    )  # fmt: skip

    def launch() -> Tensor:
        decode_attention_fwd(*arguments)
        return out

    return launch


def _run(wrapper: Any, step: Step) -> Tensor:
    return wrapper.run(step.q, (step.k_cache.unsqueeze(1), step.v_cache.unsqueeze(1)))


def _only_decode(step: Step) -> None:
    if (step.placed.new > 1).any():
        raise CannotDo("only made for one new token a request")


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def _int32(values: np.ndarray, step: Step) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(step.device)


def _ones(count: int, step: Step) -> Tensor:
    return torch.ones(count, dtype=torch.int32, device=step.device)
