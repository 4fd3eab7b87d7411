"""Failures that users of systems like this reported, as tests: what attention kernels got wrong (CASES.md).

The reference is held to them here; faster kernels run the same.
"""

from __future__ import annotations

import math

import pytest
import torch

from anabranch_kernels import BatchPlan, Part, RequestPlan, Rotary, plan_batch, segmented_attention

from .test_reference import case, frequencies


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
def test_llama_cpp_5652_9743_a_quantised_key_is_shifted(dtype: torch.dtype):
    """A shift of stored keys quantises them again. Here the query turns: exact, whatever keys are kept in."""
    batch = case([(40, 3), (9, 1)], [[Part(0, 17, 9), Part(17, 40, -300)], [Part(2, 9, 1)]])
    kept = {"k_cache": batch.k_cache.to(dtype), "v_cache": batch.v_cache.to(dtype)}
    plan = plan_batch(
        [torch.tensor(request.slots) for request in batch.requests],
        [3, 1],
        [request.parts for request in batch.requests],
    )
    settings = {"scale": batch.scale, "rotary": batch.rotary}
    found = segmented_attention(batch.q, **kept, plan=plan, **settings)
    exact = segmented_attention(batch.q, **{name: one.float() for name, one in kept.items()}, plan=plan, **settings)
    assert torch.equal(found[0], exact[0])
    assert torch.equal(found[1], exact[1])


def test_llama_cpp_3825_two_shifts_of_a_query_are_their_sum():
    """Two shifts kept only the last."""
    rotary = Rotary(frequencies(64))
    q = torch.randn(5, 4, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotary.turned(rotary.turned(q, 700), -123), rotary.turned(q, 577), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_new", [1, 3])
def test_flashinfer_4051_5262_an_empty_segment_is_no_nan(n_new: int):
    """A segment without tokens, shifted or not, anywhere in the context, changes nothing."""
    parts = [Part(4, 9, 20)]
    plain = case([(12, n_new)], [parts]).run()
    for empty in (Part(0, 0, 5), Part(7, 7, -900), Part(12, 12, 1)):
        found = case([(12, n_new)], [[*parts, empty]]).run()
        assert torch.equal(found[0], plain[0])
        assert torch.equal(found[1], plain[1])


def test_flashinfer_4484_a_row_that_sees_nothing_is_no_nan():
    """Not in itself, and not in the rows beside it."""
    nothing, something = RequestPlan(torch.empty(0, dtype=torch.int64), 2), RequestPlan(torch.tensor([0]), 1)
    out, lse = segmented_attention(
        torch.ones(5, 1, 2), torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0), BatchPlan((nothing, something, nothing)),
        scale=1.0,
    )  # fmt: skip
    assert out.isfinite().all()
    assert out.flatten(1).tolist() == [[0, 0], [0, 0], [3, 3], [0, 0], [0, 0]]
    assert not lse.isnan().any()


def test_flashmla_77_flash_attention_978_the_lse_without_keys_and_its_base():
    """Minus infinity, whatever the sign of the scale; natural log where there are keys."""
    nothing = RequestPlan(torch.empty(0, dtype=torch.int64), 1)
    two = RequestPlan(torch.tensor([0, 1]), 1)
    keys = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    for scale in (1.0, -1.0, 0.0):
        _, lse = segmented_attention(torch.ones(2, 1, 2), keys, keys, BatchPlan((nothing, two)), scale=scale)
        assert lse[0].item() == -math.inf
        assert lse[1].item() == pytest.approx(scale + math.log(2))
