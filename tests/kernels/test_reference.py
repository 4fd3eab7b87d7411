"""The reference kernel against attention with moved keys in fp64, and against nasty cases worked out by hand.

Everything runs on the CPU, and where there is a GPU on that too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from anabranch_kernels import BatchPlan, Part, RequestPlan, Rotary, plan_batch, segmented_attention

from .naive import Request, attention, planned

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def frequencies(dim: int, theta: float = 10000.0) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


@dataclass
class Case:
    """A batch with its KV. Slots that no request reads hold NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    requests: list[Request]
    rotary: Rotary | None
    scale: float

    def run(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        q, k_cache, v_cache = (tensor.to(device) for tensor in (self.q, self.k_cache, self.v_cache))
        plan = planned(self.requests, device)
        out, lse = segmented_attention(q, k_cache, v_cache, plan, scale=self.scale, rotary=self.rotary)
        return out.cpu(), lse.cpu()

    def check(self, atol: float = 2e-5) -> None:
        expected_out, expected_lse = attention(
            self.q, self.k_cache, self.v_cache, self.requests, self.scale, self.rotary
        )
        for device in DEVICES:
            out, lse = self.run(device)
            assert (out.dtype, lse.dtype) == (self.q.dtype, torch.float32)
            torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=2e-6)
            torch.testing.assert_close(out.double(), expected_out, atol=atol, rtol=atol)


def case(
    sizes: list[tuple[int, int]],
    parts: list[list[Part]] | None = None,
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    rotary: Rotary | None = None,
    dtype: torch.dtype = torch.float32,
    shared: int = 0,
    seed: int = 0,
) -> Case:
    """Requests of (context, new) tokens in scattered slots; the first `shared` context tokens are all requests'."""
    rng, torch_rng = Random(seed), torch.Generator().manual_seed(seed)
    total = sum(context + new for context, new in sizes) + 23
    free = list(range(total))
    rng.shuffle(free)
    common = [free.pop() for _ in range(shared)]
    requests = []
    for i, (context, new) in enumerate(sizes):
        head = common[:context]
        own = [free.pop() for _ in range(context - len(head) + new)]
        requests.append(Request(head + own[: len(own) - new], own[len(own) - new :], parts[i] if parts else []))
    k_cache = torch.randn(total, kv_heads, head_dim, generator=torch_rng).to(dtype)
    v_cache = torch.randn(total, kv_heads, v_head_dim or head_dim, generator=torch_rng).to(dtype)
    unread = sorted(set(range(total)) - {slot for request in requests for slot in request.slots})
    assert unread
    k_cache[unread] = v_cache[unread] = torch.nan
    tokens = sum(new for _, new in sizes)
    q = torch.randn(tokens, kv_heads * group, head_dim, generator=torch_rng).to(dtype)
    return Case(q, k_cache, v_cache, requests, rotary or Rotary(frequencies(head_dim)), head_dim**-0.5)


def some_parts(rng: Random, n: int, most: int = 100_000) -> list[Part]:
    """Disjoint parts of `n` slots, some of them empty, at shifts of both signs."""
    cuts = sorted(rng.choices(range(n + 1), k=6))
    deltas = [rng.randint(-most, most), rng.randint(-20, 20), most, -most, 0]
    parts = [Part(a, b, rng.choice(deltas)) for a, b in pairwise(cuts) if rng.random() < 0.8]
    rng.shuffle(parts)
    return parts


# ---------------------------------------------------------------- any shapes


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (64, 32), (128, 16)])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (3, 3), (1, 4)])
def test_it_agrees_with_moved_keys_in_fp64(
    kv_heads: int, group: int, head_dim: int, rotary_dim: int, interleaved: bool
):
    rng = Random(head_dim + rotary_dim + group)
    sizes = [(37, 1), (0, 5), (12, 0), (9, 8), (0, 0), (1, 1)]
    case(
        sizes,
        [some_parts(rng, context) for context, _ in sizes],
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        rotary=Rotary(frequencies(rotary_dim), interleaved),
        seed=rng.randrange(2**20),
    ).check()


@pytest.mark.parametrize("n_new", [255, 256, 257, 300])
def test_more_rows_than_fit_in_memory_at_once_change_nothing(n_new: int):
    parts = [[Part(0, 4, 77), Part(6, 9, -100_000)], []]
    case([(10, n_new), (3, 1)], parts, kv_heads=1, group=1, seed=n_new).check()


@pytest.mark.parametrize("delta", [1, -1, 4096, -4096, 100_000, -100_000])
def test_a_shift_of_the_whole_context(delta: int):
    case([(20, 3)], [[Part(0, 20, delta)]], seed=abs(delta)).check()


def test_parts_may_reach_into_the_new_tokens():
    case([(4, 6)], [[Part(2, 8, 11), Part(9, 10, -5)]]).check()


def test_one_context_may_have_200_parts_each_at_its_own_shift():
    case([(400, 2)], [[Part(2 * i, 2 * i + 1, 1000 - 7 * i) for i in range(200)]], kv_heads=1, group=2).check()


def test_requests_may_read_the_same_slots_at_different_shifts():
    parts = [[Part(0, 8, 5)], [Part(0, 8, -5)], [], [Part(2, 4, 60)]]
    batch = case([(10, 2), (10, 1), (10, 3), (8, 1)], parts, shared=8)
    assert batch.requests[0].context[:8] == batch.requests[3].context
    batch.check()


def test_values_may_be_of_another_width_than_keys():
    batch = case([(6, 2)], [[Part(1, 3, 4)]], head_dim=64, v_head_dim=48)
    assert batch.run()[0].shape == (2, 6, 48)
    batch.check()


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision_costs_no_more_than_the_rounding_of_the_result(dtype: torch.dtype, atol: float):
    parts = [[Part(0, 30, -100_000), Part(40, 41, 3)], [], [Part(0, 2, 7)]]
    batch = case([(50, 4), (0, 3), (7, 1)], parts, dtype=dtype)
    out, lse = batch.run()
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    batch.check(atol=atol)


def test_a_moved_key_is_the_key_that_would_have_been_computed_there():
    """End to end in positions: raw keys at native places and a shift, or raw keys at the effective places."""
    rotary, torch_rng = Rotary(frequencies(64)), torch.Generator().manual_seed(1)
    raw_q, raw_k = torch.randn(64, generator=torch_rng), torch.randn(5, 64, generator=torch_rng)
    v_cache = torch.randn(6, 1, 64, generator=torch_rng)
    native, delta = 300, -290

    def cache(first: int) -> Tensor:
        context = torch.stack([rotary.turned(key, first + i) for i, key in enumerate(raw_k)])
        return torch.cat((context, rotary.turned(raw_k[0], 15)[None]))[:, None]

    q = rotary.turned(raw_q, 15)[None, None]
    slots = [torch.arange(6)]
    shifted = segmented_attention(
        q, cache(native), v_cache, plan_batch(slots, [1], [[Part(0, 5, delta)]]), scale=0.3, rotary=rotary
    )
    there = segmented_attention(q, cache(native + delta), v_cache, plan_batch(slots, [1]), scale=0.3)
    elsewhere = segmented_attention(q, cache(native), v_cache, plan_batch(slots, [1]), scale=0.3)
    torch.testing.assert_close(shifted, there, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(elsewhere[1], there[1], atol=1e-2), "the shift must matter"


# ---------------------------------------------------------------- by hand

ONE_KEY = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[1.0, 0.0]]])  # [slots, 1, 2]
VALUES = torch.tensor([[[10.0]], [[20.0]], [[60.0]]])


def test_one_token_sees_itself():
    out, lse = segmented_attention(
        torch.tensor([[[2.0, 1.0]]]), ONE_KEY, VALUES, plan_batch([torch.tensor([0])], [1]), scale=0.5
    )
    assert out.tolist() == [[[10.0]]]
    assert lse.tolist() == [[5.0]]  # (2*3 + 1*4) / 2


def test_lse_is_the_natural_log_of_the_sum():
    plan = plan_batch([torch.tensor([1, 2, 0])], [1])
    q = torch.tensor([[[math.log(2), 0.0]]])  # scores 0, ln 2, 3 ln 2
    out, lse = segmented_attention(q, ONE_KEY, VALUES, plan, scale=1.0)
    assert lse.item() == pytest.approx(math.log(1 + 2 + 8), abs=1e-6)
    assert out.item() == pytest.approx((20 + 2 * 60 + 8 * 10) / 11, abs=1e-4)


def test_new_tokens_see_the_context_and_those_before_them():
    plan = plan_batch([torch.tensor([0, 1, 2])], [2])
    out, lse = segmented_attention(torch.zeros(2, 1, 2), ONE_KEY, VALUES, plan, scale=1.0)
    assert out.flatten().tolist() == pytest.approx([15.0, 30.0])
    assert lse.flatten().tolist() == pytest.approx([math.log(2), math.log(3)])


def test_only_new_tokens_are_plain_causal_attention():
    plan = plan_batch([torch.tensor([2, 0, 1])], [3])
    out, lse = segmented_attention(torch.zeros(3, 1, 2), ONE_KEY, VALUES, plan, scale=1.0)
    assert out.flatten().tolist() == pytest.approx([60.0, 35.0, 30.0])
    assert lse.flatten().tolist() == pytest.approx([0.0, math.log(2), math.log(3)], abs=1e-6)


def test_query_heads_share_a_kv_head_in_groups_of_neighbours():
    values = torch.tensor([[[1.0], [2.0]]])  # one slot, two KV heads
    out, _ = segmented_attention(
        torch.zeros(1, 6, 4), torch.zeros(1, 2, 4), values, plan_batch([torch.tensor([0])], [1]), scale=1.0
    )
    assert out.flatten().tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_huge_scores_do_not_overflow():
    plan = plan_batch([torch.tensor([1, 2, 0])], [1])
    out, lse = segmented_attention(torch.tensor([[[1e6, 0.0]]]), ONE_KEY, VALUES, plan, scale=1.0)
    assert (out.item(), lse.item()) == (10.0, 3e6)
    out, lse = segmented_attention(torch.tensor([[[-1e6, 0.0]]]), ONE_KEY, VALUES, plan, scale=1.0)
    assert (out.item(), lse.item()) == (20.0, 0.0)


# ---------------------------------------------------------------- nasty


def test_no_request_at_all():
    out, lse = segmented_attention(
        torch.zeros(0, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), plan_batch([], []), scale=1.0
    )
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


def test_requests_without_queries_take_no_rows():
    batch = case([(0, 0), (5, 0), (3, 2), (0, 0), (4, 1), (9, 0)], [[], [Part(0, 5, 3)], [], [], [Part(1, 2, 8)], []])
    assert batch.run()[0].shape[0] == 3
    batch.check()


@pytest.mark.parametrize("n_new", [1, 2])
def test_a_token_that_sees_nothing_gets_0_and_minus_infinity(n_new: int):
    nothing = RequestPlan(torch.empty(0, dtype=torch.int64), n_new)
    something = RequestPlan(torch.tensor([0]), 1)
    out, lse = segmented_attention(
        torch.ones(2 * n_new + 1, 1, 2), ONE_KEY, VALUES, BatchPlan((nothing, something, nothing)), scale=1.0
    )
    assert out.flatten().tolist() == [0.0] * n_new + [10.0] + [0.0] * n_new
    assert lse.flatten().tolist() == [-math.inf] * n_new + [7.0] + [-math.inf] * n_new


def test_slots_that_are_not_read_do_not_leak():
    batch = case([(30, 3), (8, 2)], [[Part(3, 20, 40)], [Part(0, 8, -2)]])
    assert batch.k_cache.isnan().any()
    assert batch.v_cache.isnan().any()
    out, lse = batch.run()
    assert out.isfinite().all()
    assert lse.isfinite().all()
    unread = batch.k_cache.isnan()
    batch.k_cache[unread] = batch.v_cache[unread] = torch.inf
    again = batch.run()
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_queries_and_parents_kv_are_not_written():
    batch = case([(30, 3), (30, 300)], [[Part(3, 20, 40)], [Part(0, 8, -2)]], shared=30, group=1, kv_heads=1)
    tensors = (batch.q, batch.k_cache, batch.v_cache)
    before = [tensor.clone().view(torch.int32) for tensor in tensors]
    batch.run()
    assert all(torch.equal(tensor.view(torch.int32), was) for tensor, was in zip(tensors, before, strict=True))


def test_a_request_does_not_depend_on_its_neighbours():
    sizes = [(11, 2), (6, 3), (0, 4)]
    batch = case(sizes, [[Part(0, 5, 9)], [Part(1, 4, -9), Part(4, 6, 9)], []])
    out, lse = batch.run()
    at = 0
    for request, (_, n_new) in zip(batch.requests, sizes, strict=True):
        rows = slice(at, at + n_new)
        alone = Case(batch.q[rows], batch.k_cache, batch.v_cache, [request], batch.rotary, batch.scale).run()
        torch.testing.assert_close(alone, (out[rows], lse[rows]), atol=1e-6, rtol=1e-6)
        at += n_new


def test_the_order_of_the_context_does_not_matter():
    batch = case([(16, 3)], [[Part(4, 8, 50)]])
    out, lse = batch.run()
    (request,) = batch.requests
    context = request.context[8:] + request.context[4:8] + request.context[:4]
    turned = Case(batch.q, batch.k_cache, batch.v_cache, [], batch.rotary, batch.scale)
    turned.requests = [Request(context, request.new, [Part(8, 12, 50)])]
    torch.testing.assert_close(turned.run(), (out, lse), atol=2e-6, rtol=2e-6)


def test_a_cache_may_be_a_view_with_strides():
    batch = case([(9, 2)], [[Part(2, 5, 6)]])
    wide = torch.stack((batch.k_cache, batch.v_cache), dim=-1)
    batch.k_cache, batch.v_cache = wide[..., 0], wide[..., 1]
    assert not batch.k_cache.is_contiguous()
    batch.check()


# ---------------------------------------------------------------- refusals


def attend(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], plan: BatchPlan, rotary: Rotary | None = None):
    return segmented_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), plan, scale=1.0, rotary=rotary)


PLAN = plan_batch([torch.tensor([0, 1, 2])], [1])
SHIFTED = plan_batch([torch.tensor([0, 1, 2])], [1], [[Part(0, 2, 4)]])


@pytest.mark.parametrize("tokens", [0, 2])
def test_as_many_query_tokens_as_the_plan_has(tokens: int):
    with pytest.raises(ValueError, match=f"{tokens} query tokens, but the plan has 1"):
        attend((tokens, 4, 8), (3, 2, 8), (3, 2, 8), PLAN)


def test_query_heads_divide_into_kv_heads():
    with pytest.raises(ValueError, match="3 query heads do not divide into 2 KV heads"):
        attend((1, 3, 8), (3, 2, 8), (3, 2, 8), PLAN)


def test_a_plan_that_shifts_needs_the_models_rotation():
    with pytest.raises(ValueError, match="shifts tokens by 4 positions"):
        attend((1, 4, 8), (3, 2, 8), (3, 2, 8), SHIFTED)
    attend((1, 4, 8), (3, 2, 8), (3, 2, 8), PLAN)  # one that does not, does not


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((3, 2, 16), (3, 2, 8)),
        ((3, 2, 8), (3, 1, 8)),
        ((3, 2, 8), (3, 4, 8)),
        ((3, 2, 8), (2, 2, 8)),
        ((3, 16), (3, 2, 8)),
    ],
    ids=["key width", "fewer value heads", "more value heads", "fewer value slots", "no head axis"],
)
def test_caches_that_do_not_fit_the_queries_or_each_other_are_refused(k: tuple[int, ...], v: tuple[int, ...]):
    with pytest.raises(ValueError):
        attend((1, 4, 8), k, v, PLAN)


def test_a_rotation_wider_than_a_head_is_refused():
    with pytest.raises(ValueError):
        attend((1, 4, 8), (3, 2, 8), (3, 2, 8), SHIFTED, Rotary(frequencies(16)))
