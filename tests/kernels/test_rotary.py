"""Turning by whole positions: by hand, and against the rotation as Llama's and GPT-J's own code writes it.

No attention.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from anabranch_kernels import Rotary

from .naive import moved


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def frequencies(dim: int, theta: float = 10000.0) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def test_one_pair_turns_by_its_frequency_times_the_positions():
    rotary = Rotary(torch.tensor([0.5]))
    turned = rotary.turned(torch.tensor([1.0, 0.0]), 3)
    assert turned.tolist() == pytest.approx([math.cos(1.5), math.sin(1.5)], abs=1e-7)
    assert rotary.turned(torch.tensor([0.0, 2.0]), -3).tolist() == pytest.approx(
        [2 * math.sin(1.5), 2 * math.cos(1.5)], abs=1e-6
    )


def test_which_entries_make_a_pair_depends_on_the_layout():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    freq = torch.tensor([math.pi / 2, 0.0])  # the first pair turns a quarter, the second stays
    assert Rotary(freq).turned(x, 1).tolist() == pytest.approx([-3.0, 2.0, 1.0, 4.0], abs=1e-6)
    assert Rotary(freq, interleaved=True).turned(x, 1).tolist() == pytest.approx([-2.0, 1.0, 3.0, 4.0], abs=1e-6)


@pytest.mark.parametrize("positions", [0, 1, -1, 77, 4096])
def test_it_is_the_rotation_of_llama(positions: int):
    x, freq = torch.randn(3, 2, 64), frequencies(64)
    angle = torch.cat((freq, freq)).double() * positions
    expected = x.double() * angle.cos() + rotate_half(x).double() * angle.sin()
    torch.testing.assert_close(Rotary(freq).turned(x, positions), expected.float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [1, -1, 12345, -100_000, 100_000])
def test_large_shifts_lose_nothing_to_the_angle(positions: int, interleaved: bool):
    rotary = Rotary(frequencies(128), interleaved)
    x = torch.randn(4, 128)
    torch.testing.assert_close(rotary.turned(x, positions), moved(x, positions, rotary).float(), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_rotary_part_of_a_head_turns(interleaved: bool):
    rotary = Rotary(frequencies(16), interleaved)
    x = torch.randn(5, 64)
    turned = rotary.turned(x, 9)
    assert torch.equal(turned[..., 16:], x[..., 16:])
    assert not torch.allclose(turned[..., :16], x[..., :16])
    torch.testing.assert_close(turned[..., :16], rotary.turned(x[..., :16], 9))


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_there_and_back_is_nothing_and_turns_add_up(interleaved: bool):
    rotary = Rotary(frequencies(64), interleaved)
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(rotary.turned(rotary.turned(x, 1000), -1000), x, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(rotary.turned(rotary.turned(x, 30), 12), rotary.turned(x, 42), atol=2e-6, rtol=1e-6)
    assert torch.equal(rotary.turned(x, 0), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_key_turned_forward_meets_a_query_as_the_query_turned_back_meets_the_key(interleaved: bool):
    rotary = Rotary(frequencies(64), interleaved)
    q, k = torch.randn(7, 64), torch.randn(7, 64)
    there = (q * rotary.turned(k, 321)).sum(-1)
    torch.testing.assert_close((rotary.turned(q, -321) * k).sum(-1), there, atol=1e-4, rtol=1e-5)


def test_the_result_is_fp32_and_the_input_stays():
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    before = x.clone()
    assert Rotary(frequencies(64)).turned(x, 5).dtype == torch.float32
    assert torch.equal(x, before)
    assert Rotary(frequencies(64)).turned(torch.zeros(0, 3, 64), 5).shape == (0, 3, 64)


@pytest.mark.parametrize("positions", [1, -1, 100_000, -100_000, 2**31 - 1])
def test_turns_give_the_angle_of_any_shift_without_its_whole_turns(positions: int):
    rotary = Rotary(frequencies(128, theta=500_000.0))
    angle = rotary.inv_freq.double() * positions
    upper = (rotary.turns * positions) >> 32  # wraps around, as in a kernel
    turned = upper.double() * 2**-32 * 2 * math.pi
    assert torch.allclose(turned.cos(), angle.cos(), atol=2e-9)
    assert torch.allclose(turned.sin(), angle.sin(), atol=2e-9)
