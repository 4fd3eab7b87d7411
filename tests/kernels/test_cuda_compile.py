"""The CUDA C++ kernels are compiled for the card, without one: nothing spills, and the disk cache can be trusted.

What they compute is tested in `tests/gpu`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch_kernels import cache, jit
from anabranch_kernels.cuda_decode import Shape, Variant, compile_fill_slots, compile_merge

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LLAMA = Shape(32, 8, 128, BF16, BF16, 128)
SHAPES = {
    "llama": LLAMA,
    "qwen, fp16": Shape(28, 4, 128, FP16, FP16, 128),
    "partly interleaved": Shape(12, 12, 64, BF16, BF16, 32, interleaved=True),
    "large heads": Shape(16, 8, 256, BF16, BF16, 256),
    "fp8": Shape(32, 8, 128, BF16, E4M3, 128),
    "no rotation": Shape(5, 1, 64, BF16, BF16, 0),
}
RARE = {
    f"{dim} x {group}, {kv_dtype}": Shape(group, 1, dim, BF16, kv_dtype, dim, interleaved=group % 2 == 1)
    for dim in (64, 128, 256)
    for group in (1, 2, 3, 4, 5, 7, 8, 16)
    for kv_dtype in (BF16, E4M3)
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANABRANCH_KERNEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check_resources(variant: Variant) -> None:
    said = jit.report(*variant.source())
    spilled = re.findall(r"(\d+) bytes (?:stack frame|spill)", said)
    assert spilled and set(spilled) == {"0"}, said
    assert "warning" not in said and "Potential Performance Loss" not in said, said
    (registers,) = re.findall(r"Used (\d+) registers", said)
    assert int(registers) * variant.threads * variant.blocks_per_multiprocessor <= 65536
    of_producers, of_consumers = variant.registers
    assert of_producers + variant.consumers * of_consumers <= (1 + variant.consumers) * int(registers)
    assert variant.blocks_per_multiprocessor * (variant.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_variant_compiles_and_nothing_spills(name: str, wide: bool):
    check_resources(Variant(SHAPES[name], wide))


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", RARE)
def test_rarer_variants_too(name: str, wide: bool):
    check_resources(Variant(RARE[name], wide))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_merge_and_slot_lists_compile(head_dim: int):
    assert compile_merge(Shape(8, 8, head_dim, FP16, FP16, head_dim))
    assert compile_fill_slots()


def test_a_task_holds_as_many_readers_as_query_rows_fit():
    assert [Variant(LLAMA, wide).readers_per_task for wide in (False, True)] == [16, 32]
    assert [Variant(SHAPES["qwen, fp16"], wide).readers_per_task for wide in (False, True)] == [9, 18]
    assert [Variant(LLAMA, wide).bins(132) for wide in (False, True)] == [33, 16]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (replace(LLAMA, head_dim=80, rotary_dim=32), "heads of 80 numbers"),
        (replace(LLAMA, q_heads=33), "33 query heads over 8 KV heads"),
        (replace(LLAMA, q_heads=136), "at most 16"),
        (replace(LLAMA, q_dtype=torch.float32), "queries in torch.float32"),
        (replace(LLAMA, kv_dtype=FP16), "KV in torch.float16"),
        (replace(LLAMA, kv_dtype=torch.float8_e5m2), "KV in torch.float8_e5m2"),
        (replace(LLAMA, rotary_dim=24), "24 rotating numbers"),
        (replace(LLAMA, rotary_dim=144), "144 rotating numbers"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(shape: Shape, reason: str):
    assert LLAMA.fault() is None
    assert reason in (shape.fault() or "")


# ---------------------------------------------------------------- the compiler and its cache


def never(*_: object) -> None:
    raise AssertionError("compiled again")


def test_what_was_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    first = compile_fill_slots()
    monkeypatch.setattr(jit, "_nvrtc_compile", never)
    assert compile_fill_slots() == first
    with pytest.raises(AssertionError, match="compiled again"):
        compile_merge(LLAMA)
    assert [path.suffix for path in own_cache.iterdir()] == [".cubin"]


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 4096, None], ids=["empty", "a byte", "zeros", "cut off"])
def test_a_file_that_is_not_whole_is_compiled_anew(own_cache: Path, content: bytes | None):
    first = compile_fill_slots()
    (file,) = own_cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    assert compile_fill_slots() == first
    assert cache.load(file.name) == first


def test_other_sources_options_and_compilers_are_other_files(monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    compile_merge(LLAMA)
    compile_merge(SHAPES["qwen, fp16"])
    monkeypatch.setattr(jit, "_compiler", lambda: "another")
    compile_merge(LLAMA)
    assert len(list(own_cache.iterdir())) == 3
    assert cache.key("a", "bc") != cache.key("ab", "c")


def test_a_cache_that_cannot_be_written_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANABRANCH_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert compile_fill_slots() == compile_fill_slots()


def test_processes_may_compile_the_same_at_once(own_cache: Path):
    program = "from anabranch_kernels.cuda_decode import *; print(len(compile_fill_slots()))"
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(said) == 1 and int(said.pop()) == len(compile_fill_slots())
    assert len(list(own_cache.iterdir())) == 1, "nothing temporary is left"


def test_the_compilers_words_are_in_the_error():
    with pytest.raises(jit.CompileError, match=r"merge.cu does not compile(.|\n)*identifier \"HEAD_DIM\" is undefined"):
        jit.compile_cuda("merge.cu", {"OUT": "BF16"})


def test_without_the_bindings_the_reason_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(jit.CompileError, match="cuda-bindings"):
        jit._bindings()
