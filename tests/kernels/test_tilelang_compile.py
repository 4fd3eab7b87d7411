"""The TileLang kernels are compiled for the card, without one: what they become, that nothing spills, what is refused.

What they compute is tested in `tests/gpu`.
"""

# tvm is inside of tilelang.
# pyright: reportMissingImports=false
from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tilelang
import torch
import tvm
from tilelang.engine.lower import lower
from tvm.target import Target

from anabranch_kernels import cuda_decode, tilelang_jit
from anabranch_kernels.tilelang_decode import partials
from anabranch_kernels.tilelang_launch import shape_of
from anabranch_kernels.tilelang_merge import lanes_of, merged
from anabranch_kernels.tilelang_parts import Shape, in_pieces
from anabranch_kernels.tilelang_prefill import prefilled, tokens_per_tile

LLAMA = Shape(32, 8, 128, 128)
PARTLY = Shape(6, 2, 64, 32)
SHAPES = {
    f"{head_dim} x {group}": Shape(group, 1, head_dim, head_dim, interleaved=group % 2 == 1)
    for head_dim in (64, 128, 256)
    for group in (1, 2, 3, 4, 5, 7, 8)
}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


def source(function: Any) -> str:
    """The CUDA that a kernel becomes."""
    target = Target(tilelang_jit.HOPPER)
    with tvm.transform.PassContext(opt_level=3, config=tilelang_jit.PASSES), target:
        return lower(function, target=target, enable_device_compile=False).kernel_source


def check_resources(text: str, folder: Path) -> None:
    """No register is spilled, and the products of a loop are not waited for one by one."""
    (folder / "kernel.cu").write_text(text)
    root = Path(tilelang.__file__).parent
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty/cutlass/include'}"]
    options = ["-cubin", "-arch=sm_90a", "-std=c++17", "--use_fast_math", "-DENABLE_BF16", "-Xptxas", "-v"]
    command = ["nvcc", *options, *includes, "-o", str(folder / "kernel.cubin"), str(folder / "kernel.cu")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.findall(r"(\d+) bytes (?:stack frame|spill)", said)
    assert spilled and set(spilled) == {"0"}, said
    assert "Potential Performance Loss" not in said, said


def check(make: Callable[[Shape], Any], shape: Shape, folder: Path) -> None:
    text = source(make(shape))
    products = 8 if make is prefilled else 2 * shape.warpgroups
    assert len(re.findall(r"tl::wgmma_[sr]s<", text)) == products
    assert len(re.findall(r"cp_async_gs<16>", text)) == 2
    assert "__syncthreads();" not in text.split("threadIdx.x) < 128", 1)[1], "a barrier for threads that never come"
    assert re.search(r"\*\(uint4\*\)\(pair", text), "queries are not loaded 16 bytes at once"
    check_resources(text, folder)


@needs_nvcc
@pytest.mark.parametrize(
    ("make", "shape"), [(partials, LLAMA), (partials, PARTLY), (prefilled, LLAMA)], ids=["decode", "partly", "prefill"]
)
def test_a_kernel_compiles_to_what_it_should_be(make: Callable[[Shape], Any], shape: Shape, tmp_path: Path):
    check(make, shape, tmp_path)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_all_shapes_do(name: str, tmp_path: Path):
    check(partials, SHAPES[name], tmp_path)
    check(partials, replace(SHAPES[name], wide=True), tmp_path)
    check(prefilled, SHAPES[name], tmp_path)


@needs_nvcc
def test_merge_compiles(tmp_path: Path):
    check_resources(source(merged(LLAMA)), tmp_path)


def test_kernels_are_kept_below_our_own_cache_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    monkeypatch.setenv("ANABRANCH_KERNEL_CACHE", str(tmp_path))
    assert tilelang_jit.cache_directory() == tmp_path / "tilelang"
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "another"))
    assert tilelang_jit.cache_directory() == tmp_path / "another"


@pytest.mark.slow
@needs_nvcc
def test_a_compiled_kernel_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    monkeypatch.setenv("ANABRANCH_KERNEL_CACHE", str(tmp_path))
    tilelang_jit.compiled(merged(PARTLY))
    kept = [path for path in (tmp_path / "tilelang").rglob("*.so") if path.stat().st_size]
    assert len(kept) == 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", range(1, 17))
def test_blocks_of_whole_warps_merge(head_dim: int, group: int):
    shape = Shape(group, 1, head_dim, head_dim)
    threads = lanes_of(shape) * group * head_dim // 8
    assert threads % 32 == 0 and 32 <= threads <= 1024
    assert shape.readers_per_task * group <= 64 and tokens_per_tile(shape) == 2 * shape.readers_per_task
    assert replace(shape, wide=True).readers_per_task == 2 * shape.readers_per_task


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((32, 8, 80, 80), "head_dim 80"),
        ((33, 8, 128, 128), "33 query heads on 8"),
        ((17, 1, 128, 128), "17 query heads on 1"),
        ((32, 8, 128, 24), "rotary_dim 24"),
        ((32, 8, 128, 144), "rotary_dim 144"),
        ((32, 8, 128, 128, False, "float32"), "dtype float32"),
    ],
)
def test_what_there_is_no_kernel_for_is_said(fields: tuple[Any, ...], reason: str):
    with pytest.raises(ValueError, match=reason):
        Shape(*fields)


def test_a_shape_of_the_engine_is_taken_over_but_not_8_bit_kv():
    model = cuda_decode.Shape(32, 8, 128, torch.bfloat16, torch.bfloat16, 128)
    assert shape_of(model) == LLAMA and shape_of(model, wide=True) == replace(LLAMA, wide=True)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        shape_of(replace(model, kv_dtype=torch.float8_e4m3fn))


def test_queries_may_be_a_slice_of_wider_rows():
    rows = torch.arange(3 * 320.0).bfloat16().view(3, 320)
    queries = rows[:, :128].unflatten(1, (2, 64))
    pieces = in_pieces(queries)
    assert pieces.shape == (3, 40, 8) and pieces.data_ptr() == rows.data_ptr()
    assert torch.equal(pieces[:, :16].flatten(1), queries.flatten(1))
    later = rows[:, 64:192].unflatten(1, (2, 64))  # the last row ends before its pitch does
    assert torch.equal(in_pieces(later)[:, :16].flatten(1), later.flatten(1))
    assert in_pieces(queries[:, :, ::2]).shape == (3, 8, 8)
