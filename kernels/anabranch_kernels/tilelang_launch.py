"""The TileLang kernels as an engine calls them: decode of a task plan, prefill of a prefill plan.

It makes no plan and does not choose between the languages. Compiles when made: half a minute, or a second from disk.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from anabranch_kernels import cuda_decode
from anabranch_kernels.cuda_decode import Workspace
from anabranch_kernels.rotary import Rotary
from anabranch_kernels.tasks import Layout
from anabranch_kernels.tilelang_decode import decode_kernel
from anabranch_kernels.tilelang_merge import merge_kernel
from anabranch_kernels.tilelang_parts import Shape, in_pieces
from anabranch_kernels.tilelang_prefill import prefill_kernel

LOG2_E = math.log2(math.e)


def shape_of(model: cuda_decode.Shape, wide: bool = False) -> Shape:
    """Raises ValueError for what the TileLang kernels cannot do."""
    if model.kv_dtype != model.q_dtype:
        raise ValueError(f"no TileLang kernel for KV in {model.kv_dtype} under queries in {model.q_dtype}")
    dtype = str(model.q_dtype).removeprefix("torch.")
    return Shape(model.q_heads, model.kv_heads, model.head_dim, model.rotary_dim, model.interleaved, dtype, wide)


class TileLangDecode:
    """Decode on one card, with the interface of `cuda_decode.CudaDecode`."""

    def __init__(self, shape: Shape, *, scale: float, rotary: Rotary | None, device: torch.device) -> None:
        """scale: factor on q . k, above 0."""
        self.shape = shape
        self._scale, self._turns = _scale(scale), _turns(shape, rotary, device)
        self._attend, self._merge = decode_kernel(shape), merge_kernel(replace(shape, wide=False))
        self._views: dict[tuple[int, Layout], tuple[Tensor, Tensor, Tensor]] = {}

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Tensor,
        slots: Tensor,
        layout: Layout,
        workspace: Workspace,
        out: Tensor,
        lse: Tensor,
        *,
        overlap: bool = True,
    ) -> None:
        """As `CudaDecode.run`. k_cache and v_cache are contiguous; `q` is copied first if no row pitch describes it."""
        rows = q.shape[0]
        assert layout.readers_per_task == self.shape.readers_per_task and rows <= layout.max_rows
        if rows == 0:
            return
        bins, words, pointers = self._parts(plan, layout)
        if not overlap:
            # A launch that overlaps nothing: when it has run, all before it is complete.
            workspace.sums[:1].zero_()
        self._attend(
            in_pieces(q),
            k_cache,
            v_cache,
            slots,
            bins,
            words,
            self._turns,
            workspace.partials,
            workspace.sums,
            self._scale,
        )
        self._merge(workspace.partials, workspace.sums, pointers, out, lse)

    def _parts(self, plan: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """bins, words and pointers; kept, because a step asks once a layer."""
        key = plan.data_ptr(), layout
        if key not in self._views:
            if len(self._views) > 64:
                self._views.clear()
            bins = plan[: layout.pointers].view(-1, 2, 4)
            words = plan[layout.words : layout.size].view(-1, 4)
            self._views[key] = bins, words, plan[layout.pointers :][: layout.max_rows + 1]
        return self._views[key]


class TileLangPrefill:
    """Prefill on one card. Plans for it take `tokens_per_tile(shape)` and `kv_block(shape)`."""

    def __init__(self, shape: Shape, *, scale: float, rotary: Rotary | None, device: torch.device) -> None:
        self.shape = shape
        self._scale, self._turns = _scale(scale), _turns(shape, rotary, device)
        self._kernel = prefill_kernel(shape)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tiles: Tensor,
        words: Tensor,
        slots: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attend with the rows of `q` as the plan's tiles say; other rows of `out` and `lse` are left alone.

        q: [rows, q_heads, head_dim]. k_cache, v_cache: [slots, kv_heads, head_dim], contiguous. tiles: [n_tiles, 8],
        words: [n_words, 4], slots: [n_slots], all int32. out: as q, contiguous. lse: [rows, q_heads] fp32, natural log.
        """
        if len(tiles):
            self._kernel(in_pieces(q), k_cache, v_cache, slots, tiles, words, self._turns, out, lse, self._scale)


def _scale(scale: float) -> float:
    if not scale > 0:
        raise ValueError(f"the factor on scores is {scale}, not above 0")
    return scale * LOG2_E


def _turns(shape: Shape, rotary: Rotary | None, device: torch.device) -> Tensor:
    turns = rotary.turns if rotary else torch.zeros(0, dtype=torch.int64)
    assert 2 * turns.numel() == shape.rotary_dim and (rotary is None or rotary.interleaved == shape.interleaved)
    return (turns if len(turns) else torch.zeros(1, dtype=torch.int64)).to(device)
