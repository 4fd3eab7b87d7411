"""The planner: its plans, carried out word by word, are attention, and read just what the requests see.

How work is cut and when it is shared is in `test_plan_shapes.py`, its two implementations in `test_native_planner.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from anabranch_kernels import Rotary, segmented_attention
from anabranch_kernels.planner import Planner
from anabranch_kernels.tasks import Layout, Misfit, PlanTooLarge
from benchmarks.kernels.placing import place
from benchmarks.kernels.planning import aligned, plan
from benchmarks.kernels.workloads import Request, Seen, Workload, nasty

from .batches import layouts, read_by_plan, read_by_requests, room, workloads
from .executor import execute
from .test_reference import frequencies

HEAD_DIM = 16


def assert_attends(workload: Workload, layout: Layout) -> None:
    """The plan of a workload, carried out, is what the reference computes. Slots that nobody sees hold NaN."""
    placed = place(workload)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(workload.rows, 2, HEAD_DIM, generator=generator)
    k_cache, v_cache = torch.randn(2, placed.used.max(initial=0) + 1, 1, HEAD_DIM, generator=generator)
    unused = torch.ones(len(k_cache), dtype=torch.bool)
    unused[torch.from_numpy(placed.used).long()] = False
    k_cache[unused] = v_cache[unused] = torch.nan
    scale, rotary = 0.25, Rotary(frequencies(HEAD_DIM))
    out, lse = execute(
        plan(placed, layout), q, k_cache, v_cache, torch.from_numpy(placed.table), scale=scale, rotary=rotary
    )
    expected = segmented_attention(q, k_cache, v_cache, placed.batch_plan(), scale=scale, rotary=rotary)
    torch.testing.assert_close(out, expected[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=1e-5)


@settings(max_examples=80, deadline=None)
@given(workloads(), layouts())
def test_a_plan_carried_out_is_attention(workload: Workload, layout: Layout):
    assert_attends(workload, layout)


@pytest.mark.parametrize("workload", nasty(), ids=lambda workload: workload.name)
def test_what_kernels_get_wrong_is_planned_right(workload: Workload):
    for layout in (room(33, 16), room(3, 1)):
        assert_attends(workload, layout)
        placed = place(workload)
        assert read_by_plan(plan(placed, layout), placed) == read_by_requests(placed)


@settings(max_examples=300, deadline=None)
@given(workloads(most_requests=20), layouts())
def test_each_query_reads_each_token_that_it_sees_once(workload: Workload, layout: Layout):
    placed = place(workload)
    assert read_by_plan(plan(placed, layout), placed) == read_by_requests(placed)


# ------------------------------------------------------------ steps one after another


def test_steps_that_append_are_planned_as_if_they_were_the_first():
    """The grouping is kept from step to step; it must not show."""
    workload = Workload("", (300, 70), tuple(Request((Seen(0, 0, 300, i % 2), Seen(1, 0, 70, 5)), 1) for i in range(5)))
    layout = room(7, 4)
    placed = place(replace(workload, requests=tuple(replace(one, own=200) for one in workload.requests)))
    kept = Planner(layout, placed.table.shape[1])
    for row, request in enumerate(placed.rows.tolist()):
        kept.set(request, placed.intervals(row))
    for own in range(1, 200):
        requests = tuple(replace(request, own=own) for request in workload.requests)
        now = replace(placed, workload=replace(workload, requests=requests))
        buffer = aligned(layout.size)
        kept.plan(now.rows, now.lengths, None, buffer)
        assert np.array_equal(buffer, plan(now, layout).buffer), own


def test_a_row_has_the_context_that_it_was_given_last():
    layout = room(3, 4)
    planner = Planner(layout, 1000)
    buffer = aligned(layout.size)
    rows, lengths = [4, 2], [130, 105]
    for context, n_slots in [
        ([(1, 0, 100, 0)], 130 + 105 - 100),  # shared
        ([(2, 0, 100, 0)], 130 + 105),
        ([(1, 0, 100, 9), (1, 0, 20, 9)], 130 + 105 - 100 - 20),
        ([], 130 + 105),
        ([(1, 0, 100, 0)], 130 + 105 - 100),
    ]:
        planner.set(4, context)
        planner.set(2, [(1, 0, 100, 0)])
        assert planner.plan(rows, lengths, None, buffer).n_slots == n_slots
    planner.forget(4)
    assert planner.plan(rows, lengths, None, buffer).n_slots == 130 + 105
    planner.forget(2)
    planner.forget(2)
    planner.forget(77)
    assert planner.plan(rows, lengths, None, buffer).n_slots == 130 + 105
    assert planner.plan(rows, [1, 1], None, buffer).n_slots == 2


def test_rows_that_are_in_no_step_do_not_matter():
    layout = room(3, 4)
    planner = Planner(layout, 1000)
    planner.set(0, [(1, 0, 100, 0)])
    alone = planner.plan([0], [120], None, aligned(layout.size)).buffer.copy()
    planner.set(1, [(1, 0, 50, 0), (2, 0, 9, 3)])
    assert np.array_equal(planner.plan([0], [120], None, aligned(layout.size)).buffer, alone)


def test_a_row_that_is_twice_in_a_step_is_two_requests():
    layout = room(3, 4)
    planner = Planner(layout, 1000)
    planner.set(5, [(1, 0, 300, 7)])
    found = planner.plan([5, 5, 0], [310, 310, 0], None, aligned(layout.size))
    assert (found.n_rows, found.n_slots) == (3, 300 + 10 + 10)


def test_each_step_may_have_another_layout():
    layout, other = room(3, 4), room(5, 2)
    planner = Planner(layout, 1000)
    for row in range(4):
        planner.set(row, [(1, 0, 500, row)])
    step = range(4), [510] * 4, None
    for used in (layout, other, layout):
        found = planner.plan(*step, aligned(used.size), used)
        assert found.layout == used
        assert found.bins.shape == (used.n_bins, 2, 4)
        fresh = Planner(used, 1000)
        for row in range(4):
            fresh.set(row, [(1, 0, 500, row)])
        assert np.array_equal(found.buffer, fresh.plan(*step, aligned(used.size)).buffer)


# ------------------------------------------------------------ what does not fit


STEP = (range(3), [500] * 3, [2, 2, 2])


@pytest.mark.parametrize(("what", "needed"), [("rows", 6), ("slots", 3 * 500), ("partials", None), ("words", None)])
def test_what_is_too_much_is_named_and_nothing_is_written(what: str, needed: int | None):
    def planned(layout: Layout):
        buffer = aligned(layout.size)
        planner = Planner(layout, 1000)
        for row in range(3):
            planner.set(row, [(row, 0, 400, 9)])
        try:
            return planner.plan(*STEP, buffer)
        except PlanTooLarge:
            assert (buffer == -7).all()
            with pytest.raises(PlanTooLarge):
                planner.plan(*STEP, buffer)
            planner.forget(1)
            found = planner.plan([1], [20], None, buffer)
            assert found.n_tasks == 1
            raise

    enough = planned(room(3, 16))
    needed = needed or {"partials": enough.n_partials, "words": len(enough.words)}[what]
    planned(replace(room(3, 16), **{f"max_{what}": needed}))
    with pytest.raises(PlanTooLarge, match=f"max_{what}") as caught:
        planned(replace(room(3, 16), **{f"max_{what}": needed - 1}))
    assert (caught.value.what, caught.value.capacity) == (what, needed - 1)
    assert caught.value.needed >= needed


@settings(max_examples=200, deadline=None)
@given(workloads(most_requests=20), layouts())
def test_a_layout_for_so_many_requests_is_enough(workload: Workload, layout: Layout):
    """However their intervals overlap: what does not fit shared is read by each request on its own."""
    placed = place(workload)
    least = Layout.for_requests(
        layout.n_bins,
        layout.readers_per_task,
        requests=max(len(workload.requests), 1),
        intervals=max((len(request.context) for request in workload.requests), default=0),
        tokens=int(placed.lengths.sum()),
        new_tokens=int(placed.new.max(initial=1)),
    )
    assert read_by_plan(plan(placed, least), placed) == read_by_requests(placed)


def test_intervals_cut_in_too_many_ways_are_not_shared():
    rewound = [[(1, 0, 2000 - 100 * i, 0)] for i in range(16)]
    least = Layout.for_requests(4, 16, requests=16, intervals=1, tokens=16 * 2000)
    for layout, shared in [(room(4, 16), True), (least, False)]:
        planner = Planner(layout, 4000)
        for row, context in enumerate(rewound):
            planner.set(row, context)
        buffer = aligned(layout.size)
        for more in range(2):
            found = planner.plan(range(16), [2001 - 100 * i + more for i in range(16)], None, buffer)
            assert (found.n_slots <= 2000 + 16 * 2) == shared


@pytest.mark.parametrize(
    ("rows", "lengths", "new"),
    [
        ([0, 1], [50, 110], None),
        ([0, 1], [102, 110], [3, 1]),
        ([0, 1], [1001, 110], None),
        ([0, 1], [-1, 110], None),
        ([0, 1], [110, 110], [-1, 1]),
        ([0, -1], [110, 110], None),
        ([0, 2**31 // 1000], [110, 110], None),
        ([0, 1], [110], None),
        ([0, 1], [110, 110], [1]),
        ([[0, 1]], [[110, 110]], None),
    ],
)
def test_steps_that_cannot_be_are_refused(rows, lengths, new):
    layout = room(3, 4)
    planner = Planner(layout, 1000)
    planner.set(0, [(1, 0, 100, 0)])
    buffer = aligned(layout.size)
    with pytest.raises(Misfit):
        planner.plan(rows, lengths, new, buffer)
    assert (buffer == -7).all()
    assert planner.plan([0, 1], [110, 110], None, buffer).n_tasks == 2


@pytest.mark.parametrize(
    ("row", "intervals"),
    [
        (0, [(1, -1, 5, 0)]),
        (0, [(1, 6, 5, 0)]),
        (0, [(1, 0, 5, 0), (1, 2**31, 2**31 + 1, 0)]),
        (0, [(1, 0, 5, 2**31)]),
        (0, [(1, 0, 5, -(2**31) - 1)]),
        (0, [(1, 0, 900, 0), (2, 0, 101, 0)]),
        (0, [(1, 0, 5)]),
        (-1, [(1, 0, 5, 0)]),
        (2**31 // 1000, [(1, 0, 5, 0)]),
    ],
)
def test_contexts_that_cannot_be_are_refused(row: int, intervals: list):
    layout = room(3, 4)
    planner = Planner(layout, 1000)
    planner.set(0, [(1, 0, 100, 0)])
    with pytest.raises(Misfit):
        planner.set(row, intervals)
    with pytest.raises(Misfit):
        planner.plan([0], [50], None, aligned(layout.size))  # the context is still there


def test_buffers_of_another_kind_are_refused():
    layout = room(3, 4)
    planner = Planner(layout, 1000)
    good = aligned(layout.size + 4)
    bad_ones: list[Any] = [good[:-5], good[1:], good.astype(np.int64), np.repeat(good, 2)[::2]]
    for bad in bad_ones:
        with pytest.raises(Misfit, match="buffer"):
            planner.plan([0], [3], None, bad)
    assert planner.plan([0], [3], None, good).n_tasks == 1
