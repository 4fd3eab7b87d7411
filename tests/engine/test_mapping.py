"""Mappers on tensors, without a server: what low_rank computes, what it refuses, and that a source is only read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anabranch_kernels import Rotary
from anabranch_server.engine import mapping
from anabranch_server.engine.mapping import KVShape, LowRank, build, build_for_server, turned, write
from anabranch_server.engine.versions import UnsupportedSGLang

ROTARY = Rotary(10000.0 ** (-torch.arange(0, 8, 2) / 8))
SHAPE = KVShape(
    layers=2, kv_heads=2, first_head=0, total_heads=2, head_dim=8, v_head_dim=6, dtype=torch.float32, device="cpu"
)
ROTATED = replace(SHAPE, rotary=ROTARY)


class _Pool(SimpleNamespace):
    """As much of a cache and its allocator as is asked for room."""

    def available_size(self) -> int:
        return self.free

    def evictable_size(self) -> int:
        return self.movable

    def evict(self, params: Any) -> None:
        self.free, self.movable = self.free + params.num_tokens, self.movable - params.num_tokens

    def alloc(self, size: int) -> range | None:
        return range(size) if size <= self.free else None

    @property
    def token_to_kv_pool_allocator(self) -> _Pool:
        return self


def test_nothing_is_evicted_for_what_does_not_fit_anyway():
    pool = _Pool(free=10, movable=20)
    assert mapping._allocate(pool, 31) is None  # pyright: ignore[reportArgumentType]
    assert (pool.free, pool.movable) == (10, 20)
    assert mapping._allocate(pool, 30) == range(30)  # pyright: ignore[reportArgumentType]
    assert (pool.free, pool.movable) == (30, 0)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def sides(*names: str, heads: int = 2, rank: int = 3) -> dict[str, torch.Tensor]:
    """Weights of `layer.side`."""
    made = {}
    for seed, name in enumerate(names):
        width = 8 if name.endswith("k") else 6
        made[f"layers.{name}.down"] = random(heads, width, rank, seed=2 * seed)
        made[f"layers.{name}.up"] = random(heads, rank, width, seed=2 * seed + 1)
    return made


def low_rank(folder: Path, tensors: dict[str, torch.Tensor], shape: KVShape = ROTATED) -> LowRank:
    save_file(tensors, folder / "weights.safetensors")
    return LowRank(shape, str(folder / "weights.safetensors"))


def test_keys_change_as_they_were_before_rotation_and_values_as_they_are(tmp_path: Path):
    tensors = sides("0.k", "1.v")
    mapper = low_rank(tmp_path, tensors)
    plain, v, positions = random(5, 2, 8), random(5, 2, 6, seed=1), torch.tensor([0, 1, 7, 500, 6000])
    k = turned(plain, positions, ROTARY)
    got, same_v = mapper(k, v, positions, 0)
    assert same_v is v, "this layer has no weights for values"
    for head in range(2):
        changed = plain[:, head] @ (torch.eye(8) + tensors["layers.0.k.down"][head] @ tensors["layers.0.k.up"][head])
        assert turned(got, -positions, ROTARY)[:, head] == pytest.approx(changed, abs=1e-4)
    same_k, got = mapper(k, v, positions, 1)
    assert same_k is k
    for head in range(2):
        changed = v[:, head] @ (torch.eye(6) + tensors["layers.1.v.down"][head] @ tensors["layers.1.v.up"][head])
        assert got[:, head] == pytest.approx(changed, abs=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_many_tokens_is_turning_each_as_the_kernels_do(interleaved: bool):
    rotary = Rotary(ROTARY.inv_freq[:3], interleaved)  # the last two of a head do not turn
    x, positions = random(4, 2, 8), torch.tensor([0, 3, -9, 4000])
    got = turned(x, positions, rotary)
    for token, position in enumerate(positions.tolist()):
        assert torch.equal(got[token], rotary.turned(x[token], position))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_change_of_zero_leaves_every_bit(tmp_path: Path, dtype: torch.dtype, rank: int):
    mapper = low_rank(tmp_path, {name: part * 0 for name, part in sides("0.k", "0.v", rank=rank).items()})
    k, v = random(9, 2, 8).to(dtype), random(9, 2, 6).to(dtype)
    got = mapper(k, v, torch.arange(9) * 700, 0)
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)
    assert got[0].dtype == dtype


def test_a_rank_takes_its_own_heads(tmp_path: Path):
    tensors = sides("0.k", "0.v", heads=4)
    k, v, positions = random(3, 4, 8), random(3, 4, 6), torch.arange(3)
    whole = low_rank(tmp_path, tensors, replace(ROTATED, kv_heads=4, total_heads=4))(k, v, positions, 0)
    part = low_rank(tmp_path, tensors, replace(ROTATED, first_head=2, total_heads=4))
    got = part(k[:, 2:], v[:, 2:], positions, 0)
    for side in (0, 1):
        assert got[side] == pytest.approx(whole[side][:, 2:], abs=1e-6)


def changed(name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    found = {**sides("0.k"), name: value}
    return {name: part for name, part in found.items() if part is not None}


@pytest.mark.parametrize(
    ("tensors", "shape", "reason"),
    [
        (changed("layers.0.k.up", None), ROTATED, r"layers\.0\.k\.up is missing"),
        (changed("layers.0.k.up", torch.zeros(2, 4, 8)), ROTATED, r"down is \[2, 8, 3\] and up \[2, 4, 8\]"),
        (changed("layers.0.k.down", torch.zeros(3, 8, 3)), ROTATED, r"must be \[2, 8, r\]"),
        (changed("layers.0.k.down", torch.zeros(3)), ROTATED, r"down is \[3\]"),
        (changed("layers.0.k.up", torch.full((2, 3, 8), torch.nan)), ROTATED, "not finite"),
        (changed("layer.0.k.down", torch.zeros(2, 8, 3)), ROTATED, r"'layer\.0\.k\.down' is not a name"),
        (changed("layers.00.k.down", torch.zeros(2, 8, 3)), ROTATED, "is not a name"),
        (sides("2.v"), ROTATED, "the model has 2 layers"),
        (sides("0.k"), SHAPE, "rotation of this model's keys is not known"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], shape: KVShape, reason: str
):
    with pytest.raises(ValueError, match=reason):
        low_rank(tmp_path, tensors, shape)


# ---------------------------------------------------------------- building


def test_all_that_is_configured_is_built_and_identity(tmp_path: Path):
    save_file(sides("0.v"), tmp_path / "file")
    assert sorted(build(f"short=low_rank:{tmp_path / 'file'}", SHAPE)) == ["identity", "short"]
    assert sorted(build("", SHAPE)) == ["identity"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("a=unheard_of", "unknown kind 'unheard_of'; there are identity, low_rank"),
        ("a=low_rank:/nowhere/file", "'a'.*cannot be used.*/nowhere/file"),
        ("a=low_rank", "needs a file"),
        ("a=identity:3", "takes no argument"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(setting: str, reason: str):
    with pytest.raises(UnsupportedSGLang, match=reason) as refusal:
        build(setting, SHAPE)
    assert "\n" not in str(refusal.value)


def _fails(k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, layer: int) -> Any:
    raise KeyError("first\nsecond")


@pytest.mark.parametrize(
    ("mapper", "reason"),
    [
        (lambda k, v, positions, layer: (k[:1], v), r"makes k \[1, 2, 8\]"),
        (lambda k, v, positions, layer: (k, v.double()), r"makes v .* torch\.float64"),
        (lambda k, v, positions, layer: (k, v[..., :1]) if layer == 1 else (k, v), "in layer 1"),
        (lambda k, v, positions, layer: (k,), "shorter"),
        (_fails, "KeyError.*first.*second"),
    ],
)
def test_a_mapper_of_another_package_is_found_and_tried(monkeypatch: pytest.MonkeyPatch, mapper: Any, reason: str):
    def factory(shape: KVShape, argument: str | None) -> Any:
        return (lambda k, v, positions, layer: (k, v)) if argument == "good" else mapper

    entry = SimpleNamespace(name="other", load=lambda: factory)
    monkeypatch.setattr(mapping, "entry_points", lambda group: [entry] if group == "anabranch.mappers" else [])
    assert "a" in build("a=other:good", SHAPE)
    with pytest.raises(UnsupportedSGLang, match=reason) as refusal:
        build("a=other:bad", SHAPE)
    assert "\n" not in str(refusal.value)


def test_a_pool_of_another_kind_has_no_mappers_and_configured_ones_are_refused():
    allocator = SimpleNamespace(get_kvcache=lambda: object())
    context = SimpleNamespace(params=SimpleNamespace(token_to_kv_pool_allocator=allocator))
    assert build_for_server(context, "") == {}
    with pytest.raises(UnsupportedSGLang, match="KV pool object"):
        build_for_server(context, "a=identity")


# ---------------------------------------------------------------- writing


class Buffers:
    """The part of SGLang's pool that is used: 20 slots in two layers."""

    layer_num = 2

    def __init__(self, dtype: torch.dtype, store_dtype: torch.dtype):
        self.dtype, self.store_dtype = dtype, store_dtype
        self.k = [random(20, 2, 8, seed=i).to(dtype).view(store_dtype) for i in range(2)]
        self.v = [random(20, 2, 6, seed=9 + i).to(dtype).view(store_dtype) for i in range(2)]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k[layer].view(self.dtype)

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v[layer].view(self.dtype)

    def bytes(self, slots: list[int]) -> list[torch.Tensor]:
        return [buffer[slots].clone().view(torch.uint8) for buffer in (*self.k, *self.v)]


@pytest.mark.parametrize(
    ("dtype", "store"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.uint8),
        (torch.float8_e5m2, torch.uint8),
    ],
)
def test_only_the_slots_that_are_written_to_change_even_if_the_mapper_writes_into_what_it_gets(
    dtype: torch.dtype, store: torch.dtype
):
    def rude(k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, layer: int) -> Any:
        assert k.dtype == dtype
        assert positions.tolist() == [7, 8, 9]
        halved = (k.float() / 2).to(dtype), (v.float() / 2).to(dtype)
        k.view(store).zero_()
        v.view(store).zero_()
        return halved

    pool, source, to = Buffers(dtype, store), [3, 1, 9], [4, 19, 0]
    others = sorted({*range(20)} - {*to})
    before = pool.bytes(others)
    expected = [(pool.get_key_buffer(layer).float()[source] / 2).to(dtype).float() for layer in range(2)]
    write(pool, rude, torch.tensor(source), torch.tensor(to), torch.tensor([7, 8, 9]))
    for was, now in zip(before, pool.bytes(others), strict=True):
        assert torch.equal(was, now)
    for layer in range(2):
        assert torch.equal(pool.get_key_buffer(layer).float()[to], expected[layer])


def test_identity_copies_every_bit():
    pool = Buffers(torch.bfloat16, torch.bfloat16)
    write(pool, build("", SHAPE)["identity"], torch.tensor([1, 2]), torch.tensor([11, 12]), torch.arange(2))
    for from_, to in zip(pool.bytes([1, 2]), pool.bytes([11, 12]), strict=True):
        assert torch.equal(from_, to)
