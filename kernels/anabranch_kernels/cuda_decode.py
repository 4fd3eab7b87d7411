"""Decode attention over a task plan by the CUDA C++ kernels in `csrc`: variants, workspaces, launches.

It neither makes the plan (`planner.py`) nor chooses between the languages.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch_kernels import wgmma
from anabranch_kernels.jit import Kernel, compile_cuda
from anabranch_kernels.rotary import Rotary
from anabranch_kernels.tasks import Layout

HEAD_DIMS = (64, 128, 256)
MOST_HEADS_PER_KV_HEAD = 16
_FORMATS = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float8_e4m3fn: "E4M3"}
_ROWS = 64  # query rows of one consumer
_WARPGROUP = 128  # threads
_SHARED_OF_MULTIPROCESSOR, _SHARED_OF_SYSTEM = 228 * 1024, 1024  # the second is taken from every block
_MERGE_SLICE, _MERGE_THREADS = 512, 512  # numbers of a row that a block merges
_COPY_THREADS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """What one layer's attention looks like. rotary_dim: entries of a head that turn, from the first on; 0 for none."""

    q_heads: int
    kv_heads: int
    head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    rotary_dim: int
    interleaved: bool = False

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def fault(self) -> str | None:
        """Why the kernels cannot do it, in one line; None if they can."""
        if self.head_dim not in HEAD_DIMS:
            return f"heads of {self.head_dim} numbers; known are {', '.join(map(str, HEAD_DIMS))}"
        if self.q_heads % self.kv_heads or not 1 <= self.group <= MOST_HEADS_PER_KV_HEAD:
            return f"{self.q_heads} query heads over {self.kv_heads} KV heads; at most {MOST_HEADS_PER_KV_HEAD} for one"
        if self.q_dtype not in (torch.bfloat16, torch.float16):
            return f"queries in {self.q_dtype}; known are bfloat16 and float16"
        if self.kv_dtype not in (self.q_dtype, torch.float8_e4m3fn):
            return f"KV in {self.kv_dtype}; known are the queries' {self.q_dtype} and float8_e4m3fn"
        if self.rotary_dim % 16 or not 0 <= self.rotary_dim <= self.head_dim:
            return f"{self.rotary_dim} rotating numbers in a head of {self.head_dim}; must be a multiple of 16"
        return None


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of the decode kernel. wide: two consumers of 64 query rows a block instead of one, and one block
    a multiprocessor instead of two.

    The narrow one serves. Measured on an H200, wide pays only where far more readers than a task holds share almost
    everything (64 readers of 32,768 tokens: 101 us instead of 105), and it costs much where they do not (64 x 4,096
    with 512 tokens each of their own: 56 us instead of 46). A CUDA graph keeps its variant, so steps cannot choose.
    """

    shape: Shape
    wide: bool = False

    @property
    def readers_per_task(self) -> int:
        return self.consumers * (_ROWS // self.shape.group)

    @property
    def consumers(self) -> int:
        return 2 if self.wide else 1

    @property
    def blocks_per_multiprocessor(self) -> int:
        return 1 if self.wide or self.shape.head_dim > 128 else 2

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * _WARPGROUP

    @property
    def tile(self) -> int:
        """Tokens of a tile. Smaller where rows are long, so that enough tiles are on their way."""
        narrow_kv = self.shape.kv_dtype.itemsize == 1
        if self.shape.head_dim == 256 and (self.wide or narrow_kv):
            return 32
        return 32 if narrow_kv and self.shape.head_dim == 128 and not self.wide else 64

    @property
    def raw_tiles(self) -> int:
        """8-bit KV only: tiles on their way. They are few once widened, so these take what memory is left."""
        if self.shape.kv_dtype.itemsize > 1:
            return 1
        return min(8, (self._shared_limit - self._query_bytes - 2 * self._stage_bytes) // self._raw_bytes)

    @property
    def stages(self) -> int:
        if self.shape.kv_dtype.itemsize == 1:
            return 2
        return min(12, (self._shared_limit - self._query_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self._query_bytes + self.stages * self._stage_bytes + self.raw_tiles * self._raw_bytes

    @property
    def _stage_bytes(self) -> int:
        barriers = 4 * 8
        return 2 * self.tile * self.shape.head_dim * 2 + barriers

    @property
    def _raw_bytes(self) -> int:
        return 2 * self.tile * self.shape.head_dim if self.shape.kv_dtype.itemsize == 1 else 0

    @property
    def _query_bytes(self) -> int:
        return self.consumers * _ROWS * self.shape.head_dim * 2

    @property
    def _shared_limit(self) -> int:
        return _SHARED_OF_MULTIPROCESSOR // self.blocks_per_multiprocessor - _SHARED_OF_SYSTEM

    @property
    def registers(self) -> tuple[int, int]:
        """Of producers and consumers; 0 where the compiler's even share is enough. Together no more than the even
        shares, or a block waits for registers for ever."""
        if self.wide:
            return (88, 208) if self.shape.head_dim > 128 else (0, 0)
        return (80, 176) if self.blocks_per_multiprocessor == 2 else (0, 0)

    def source(self) -> tuple[str, dict[str, str | int], dict[str, str]]:
        """What `jit.compile_cuda` takes."""
        shape = self.shape
        producer_registers, consumer_registers = self.registers
        defines: dict[str, str | int] = {
            "HEAD_DIM": shape.head_dim,
            "GROUP": shape.group,
            "QUERY": _FORMATS[shape.q_dtype],
            "KV": _FORMATS[shape.kv_dtype],
            "ROTARY_DIM": shape.rotary_dim,
            "INTERLEAVED": int(shape.interleaved),
            "CONSUMERS": self.consumers,
            "TILE": self.tile,
            "STAGES": self.stages,
            "RAW_TILES": self.raw_tiles,
            "BLOCKS_PER_SM": self.blocks_per_multiprocessor,
            "PRODUCER_REGISTERS": producer_registers,
            "CONSUMER_REGISTERS": consumer_registers,
        }
        kind = "bf16" if shape.kv_dtype == torch.bfloat16 else "f16"
        return "decode.cu", defines, {"wgmma.cuh": wgmma.wrappers(self.tile, shape.head_dim, kind)}

    def compile(self) -> bytes:
        """The cubin. Raises CompileError."""
        return compile_cuda(*self.source())

    def bins(self, multiprocessors: int) -> int:
        """Thread blocks per KV head that fill the card once."""
        return max(1, multiprocessors * self.blocks_per_multiprocessor // self.shape.kv_heads)


def compile_merge(shape: Shape) -> bytes:
    return compile_cuda("merge.cu", {"HEAD_DIM": shape.head_dim, "OUT": _FORMATS[shape.q_dtype]})


def compile_fill_slots() -> bytes:
    return compile_cuda("slots.cu", {})


class _DecodeParams(ctypes.Structure):
    """`DecodeParams` of csrc/shape.cuh."""

    _pointers = ("query", "keys", "values", "slots", "bins", "words", "turns", "partials", "sums")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_uint32) for name in ("query_stride", "key_stride", "value_stride")),
        ("kv_heads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("value_scale", ctypes.c_float),
    ]


class _MergeParams(ctypes.Structure):
    """`MergeParams` of csrc/merge.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partials", "sums", "pointers", "out", "lse")),
        ("q_heads", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Partial results of one layer's attention; all layers and variants of a server may use one after the other.

    partials: [max_partials, q_heads, head_dim] fp16. sums: [max_partials, q_heads] fp32, base 2.
    """

    partials: Tensor
    sums: Tensor

    @staticmethod
    def of(shape: Shape, max_partials: int, device: torch.device) -> Workspace:
        partials = torch.empty(max_partials, shape.q_heads, shape.head_dim, dtype=torch.float16, device=device)
        return Workspace(partials, torch.empty(max_partials, shape.q_heads, device=device))


class CudaDecode:
    """Decode of one variant on one card. Compiles when made: seconds, or milliseconds from the disk."""

    def __init__(self, variant: Variant, *, scale: float, rotary: Rotary | None, device: torch.device) -> None:
        """scale: factor on q . k, above 0. Raises ValueError for a shape that it cannot do, and CompileError."""
        shape = variant.shape
        if fault := shape.fault():
            raise ValueError(fault)
        if not scale > 0:
            raise ValueError(f"the factor on scores is {scale}, not above 0")
        turns = rotary.turns if rotary else torch.zeros(0, dtype=torch.int64)
        assert 2 * turns.numel() == shape.rotary_dim and (rotary is None or rotary.interleaved == shape.interleaved)
        self.variant, self.shape, self.scale = variant, shape, scale
        self._turns = turns.to(device)
        self._decode = Kernel(
            variant.compile(), "decode", threads=variant.threads, shared=variant.shared_bytes, device=device
        )
        self._merge = Kernel(compile_merge(shape), "merge", threads=_MERGE_THREADS, device=device)

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
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        overlap: bool = True,
    ) -> None:
        """Attend with all rows of `q` as `plan` says, into `out` and `lse`.

        q: [rows, q_heads, head_dim]; the heads of a row are contiguous. k_cache, v_cache: [slots, kv_heads, head_dim],
        likewise. plan: [layout.size] int32. slots: [layout.max_slots] int32. out: as q, contiguous.
        lse: [rows, q_heads] fp32, natural log. k_scale, v_scale: what stored KV is to be multiplied by.
        overlap: the kernel before this one in the stream may still run when this one starts to read plan, slots and KV
        of tasks without the FRESH flag; false where that kernel writes one of them.
        """
        shape = self.shape
        rows = q.shape[0]
        assert layout.readers_per_task == self.variant.readers_per_task and rows <= layout.max_rows
        assert out.is_contiguous() and lse.is_contiguous() and lse.shape == (rows, shape.q_heads)
        assert plan.dtype == slots.dtype == torch.int32 and plan.numel() >= layout.size
        assert len(workspace.partials) >= layout.max_partials
        bins = plan.data_ptr()
        decode = _DecodeParams(
            query=q.data_ptr(),
            keys=k_cache.data_ptr(),
            values=v_cache.data_ptr(),
            slots=slots.data_ptr(),
            bins=bins,
            words=bins + 4 * layout.words,
            turns=self._turns.data_ptr(),
            partials=workspace.partials.data_ptr(),
            sums=workspace.sums.data_ptr(),
            query_stride=_stride(q, shape.q_heads, shape),
            key_stride=_stride(k_cache, shape.kv_heads, shape),
            value_stride=_stride(v_cache, shape.kv_heads, shape),
            kv_heads=shape.kv_heads,
            scale=self.scale * k_scale * math.log2(math.e),
            value_scale=v_scale,
        )
        merge = _MergeParams(
            partials=workspace.partials.data_ptr(),
            sums=workspace.sums.data_ptr(),
            pointers=bins + 4 * layout.pointers,
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            q_heads=shape.q_heads,
        )
        if rows == 0:
            return
        self._decode.launch((layout.n_bins * shape.kv_heads, 1), decode, overlap=overlap)
        self._merge.launch((rows, -(-shape.q_heads * shape.head_dim // _MERGE_SLICE)), merge, overlap=True)


def _stride(tensor: Tensor, heads: int, shape: Shape) -> int:
    """Bytes from one row to the next."""
    assert tensor.shape[1:] == (heads, shape.head_dim) and tensor.stride()[1:] == (shape.head_dim, 1)
    assert tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.itemsize % 16 == 0
    return tensor.stride(0) * tensor.itemsize


class FillSlots:
    """The copies of a plan: slot lists from `req_to_token`. Outside of CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._kernel = Kernel(compile_fill_slots(), "fill_slots", threads=_COPY_THREADS, device=device)

    def run(self, table: Tensor, plan: Tensor, first_copy: int, n_copies: int, longest: int, slots: Tensor) -> None:
        """table: `req_to_token`, int32, contiguous. first_copy: offset of the first copy in `plan`, in int32s.
        longest: slots of the longest copy; any guess gives the right result."""
        assert table.dtype == plan.dtype == slots.dtype == torch.int32 and table.is_contiguous()
        if n_copies == 0:
            return
        parts = max(1, min(-(-longest // (4 * _COPY_THREADS)), 4096 // n_copies))
        pointers = (table.data_ptr(), plan.data_ptr() + 4 * first_copy, slots.data_ptr())
        self._kernel.launch((n_copies, parts), *map(ctypes.c_void_p, pointers), overlap=False)
