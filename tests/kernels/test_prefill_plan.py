"""The prefill plan, walked through in plain torch, against the reference on the same requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anabranch_kernels import Part, Rotary, plan_batch, segmented_attention
from anabranch_kernels.prefill_plan import PrefillPlan, Suffix, prefill_plan

WIDTH = 400
HEAD_DIM = 16
SCALE = 0.3
ROTARY = Rotary(1 / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))


def walked(
    plan: PrefillPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor, kv_block: int
) -> tuple[Tensor, Tensor]:
    """(out, lse), tile by tile and run by run as a kernel would; every row exactly once."""
    slots = torch.full((plan.n_slots,), -1, dtype=torch.int64)
    for source, target, length, _ in plan.copies.tolist():
        assert (slots[target : target + length] == -1).all()
        slots[target : target + length] = req_to_token.flatten()[source : source + length]
    assert (slots >= 0).all()
    out, lse = torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan)
    for first, count, position, run, blocks, *_ in plan.tiles.tolist():
        assert count >= 1 and out[first : first + count].isnan().all()
        scores: list[list[Tensor]] = [[] for _ in range(count)]
        values: list[list[Tensor]] = [[] for _ in range(count)]
        while blocks > 0:
            slot, length, delta, seen = plan.words[run].tolist()
            assert run < plan.n_runs and seen >= 1
            blocks -= -(-min(length, seen + position + count - 1) // kv_block)
            for j in range(count):
                where = slots[slot : slot + min(length, seen + position + j)]
                query = ROTARY.turned(q[first + j], -delta).unflatten(0, (k_cache.shape[1], -1))
                scores[j].append(torch.einsum("hgd,khd->hgk", query * SCALE, k_cache[where]).flatten(0, 1))
                values[j].append(v_cache[where].repeat_interleave(query.shape[1], 1))
            run += 1
        assert blocks == 0
        for j in range(count):
            row = torch.cat(scores[j], 1)
            lse[first + j] = row.logsumexp(1)
            out[first + j] = torch.einsum("hk,khd->hd", row.softmax(1), torch.cat(values[j]))
    return out, lse


@st.composite
def suffixes(draw: st.DrawFn) -> list[Suffix]:
    made = []
    for row in range(draw(st.integers(1, 4))):
        edges = sorted(draw(st.lists(st.integers(0, 250), min_size=2, max_size=12)))
        edges = edges[: len(edges) // 2 * 2]
        intervals = np.array(edges, np.int64).reshape(-1, 2)
        deltas = draw(
            st.lists(st.sampled_from([0, 0, 5, -7, 100_000]), min_size=len(intervals), max_size=len(intervals))
        )
        new = draw(st.integers(0, 70))
        length = edges[-1] + draw(st.integers(0, 60)) + new
        made.append(Suffix(row, length, new, np.c_[intervals, np.array(deltas, np.int64)]))
    return made


@settings(max_examples=60, deadline=None)
@given(suffixes(), st.sampled_from([1, 18, 32]), st.sampled_from([8, 64]))
def test_a_walk_along_the_plan_is_the_reference(made: list[Suffix], tokens_per_tile: int, kv_block: int) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(4 * WIDTH, generator=generator).reshape(4, WIDTH).int()
    q = torch.randn(sum(one.new for one in made), 4, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, 4 * WIDTH, 2, HEAD_DIM, generator=generator)
    plan = prefill_plan(made, table_width=WIDTH, tokens_per_tile=tokens_per_tile, kv_block=kv_block)
    out, lse = walked(plan, q, k, v, table, kv_block)
    batch = plan_batch(
        [table[one.table_row, : one.length] for one in made],
        [one.new for one in made],
        [[Part(*interval) for interval in one.intervals.tolist()] for one in made],
    )
    expected, expected_lse = segmented_attention(q, k, v, batch, scale=SCALE, rotary=ROTARY)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    work = plan.tiles[:, 4]
    assert (np.diff(work) <= 0).all()


def test_equal_deltas_are_one_run_and_the_new_tokens_end_the_last() -> None:
    intervals = np.array([[10, 20, 5], [30, 40, -5], [40, 60, 5]])
    plan = prefill_plan([Suffix(2, 100, 10, intervals)], table_width=WIDTH, tokens_per_tile=4, kv_block=16)
    assert plan.words[: plan.n_runs].tolist() == [[0, 10, -5, 10], [10, 30, 5, 30], [40, 60, 0, 51]]
    assert plan.copies[:, 2].sum() == 100 == plan.n_slots
    assert plan.tiles[:, :5].tolist() == [[0, 4, 0, 0, 7], [4, 4, 4, 0, 7], [8, 2, 8, 0, 7]]


@pytest.mark.parametrize("intervals", [[[10, 95, 5]], [[20, 30, 1], [25, 40, 2]], [[-1, 4, 2]]])
def test_intervals_outside_of_the_context_are_refused(intervals: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="intervals"):
        prefill_plan([Suffix(0, 100, 10, np.array(intervals))], table_width=WIDTH, tokens_per_tile=4, kv_block=16)


def test_nothing_new_is_no_tile() -> None:
    plan = prefill_plan(
        [Suffix(0, 9, 0, np.zeros((0, 3), np.int64))], table_width=WIDTH, tokens_per_tile=4, kv_block=16
    )
    assert len(plan.tiles) == 0 == plan.n_rows
