"""What plans look like: what is shared and what is not, and how work is spread over bins.

That plans are right is in `test_planner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from anabranch_kernels.planner import Planner
from anabranch_kernels.tasks import COUNT, FRESH, Layout, TaskPlan
from benchmarks.kernels.placing import place
from benchmarks.kernels.planning import aligned, layout_for, plan
from benchmarks.kernels.workloads import Workload, decodes

from .batches import loads, room


def planned(
    contexts: Sequence[Sequence[tuple[int, int, int, int]]],
    own: int = 1,
    new: int = 1,
    layout: Layout | None = None,
) -> TaskPlan:
    layout = layout or room(1, 16)
    planner = Planner(layout, 1 << 16)
    lengths = []
    for row, context in enumerate(contexts):
        planner.set(row, context)
        lengths.append(sum(stop - start for _, start, stop, _ in context) + own)
    return planner.plan(range(len(contexts)), lengths, [new] * len(contexts), aligned(layout.size))


def tasks(plan: TaskPlan) -> list[tuple[int, int]]:
    """(length, readers) of each."""
    return [(length, flagged & COUNT) for _, length, _, flagged in plan.tasks.tolist()]


# ------------------------------------------------------------ what is one run


def test_what_one_request_sees_at_one_delta_is_one_run_with_its_own_tokens():
    found = planned([[(1, 0, 100, 0), (2, 10, 60, 0), (3, 0, 5, 0)]], own=7)
    assert tasks(found) == [(162, 1)]
    assert found.copies.tolist() == [[0, 0, 162, 0]]


def test_each_delta_is_a_run_and_its_slots_are_put_together():
    found = planned([[(1, 0, 100, 5), (2, 10, 60, 0), (3, 0, 30, 5)]], own=7)
    assert sorted(tasks(found)) == [(57, 1), (130, 1)]
    assert found.copies.tolist() == [[0, 0, 100, 0], [150, 100, 30, 0], [100, 130, 50, 0], [180, 180, 7, 0]]


def test_what_the_same_readers_see_is_one_run():
    found = planned([[(1, 0, 200, 5), (2, 10, 160, 5)], [(2, 10, 160, -3), (1, 0, 200, -3)]])
    assert tasks(found) == [(350, 2), (1, 1), (1, 1)]


def test_segments_seen_up_to_different_ends_are_cut_where_they_differ():
    found = planned([[(1, 0, 300, 0)], [(1, 0, 150, 0)], [(1, 100, 400, 0)]], layout=room(1, 16))
    # 0:100 seen by two, 100:150 by all, 150:300 by two, 300:400 by one, which has its own token after it
    assert sorted(tasks(found)) == [(1, 1), (1, 1), (50, 3), (100, 2), (101, 1), (150, 2)]


# ------------------------------------------------------------ what sharing costs


@pytest.mark.parametrize(("tokens", "shared"), [(71, False), (72, True)])
def test_a_run_is_shared_if_that_costs_less_than_reading_it_twice(tokens: int, shared: bool):
    """A task of two readers costs 64 + 64 * 2 / 16 tokens besides its own; read twice, nothing but the tokens."""
    found = planned([[(1, 0, tokens, 0)]] * 2)
    assert tasks(found) == ([(tokens, 2), (1, 1), (1, 1)] if shared else [(tokens + 1, 1)] * 2)


def test_a_short_run_is_shared_if_each_would_need_a_task_for_it_anyway():
    assert tasks(planned([[(1, 0, 5, 7)], [(1, 0, 5, 8)]])) == [(5, 2), (1, 1), (1, 1)]


def test_a_short_run_is_read_by_each_where_it_has_others_at_that_delta():
    contexts = [[(1, 0, 5, 7), (2 + row, 0, 90, 7)] for row in range(2)]
    assert sorted(tasks(planned(contexts))) == [(1, 1), (1, 1), (95, 1), (95, 1)]


def test_more_readers_make_sharing_pay():
    assert max(tasks(planned([[(1, 0, 20, 0)]] * 3))) == (21, 1)
    assert max(tasks(planned([[(1, 0, 20, 0)]] * 16))) == (20, 16)


# ------------------------------------------------------------ reader groups and bins


def test_a_shared_run_is_read_once_for_each_group_of_readers():
    for readers, sizes in [(16, {16}), (17, {8, 9}), (33, {11}), (64, {16})]:
        found = planned([[(1, 0, 1000, row)] for row in range(readers)], layout=room(5, 16))
        shared = [(length, n) for length, n in tasks(found) if n > 1]
        assert {n for _, n in shared} <= sizes
        assert sum(length for length, _ in shared) == 1000 * -(-readers // 16)


def test_groups_of_one_run_are_cut_alike_into_neighbouring_bins():
    found = planned([[(1, 0, 20_000, row)] for row in range(64)], layout=room(33, 16))
    for first in range(0, 32, 4):
        together = [found.tasks[begin:stop] for (begin, stop, *_), _ in found.bins[first : first + 4].tolist()]
        assert len({(one[0, 0], one[0, 1]) for one in together}) == 1
        assert len({found.words[one[0, 2], 0] for one in together}) == 4


def test_more_groups_than_bins_are_planned_too():
    found = planned([[(1, 0, 1000, row)] for row in range(64)], layout=room(3, 1))
    assert sum(length for length, _ in tasks(found)) == 64 * 1001


@pytest.mark.parametrize("workload", decodes(), ids=lambda workload: workload.name)
def test_bins_are_even(workload: Workload):
    """Runs are cut in multiples of 64 tokens, so a bin has at most that and one task's cost more than it should."""
    placed = place(workload)
    found = plan(placed, layout_for(placed, 33, 16))
    n_tasks = np.diff(found.bins[:, 0, :2]).flatten()
    costs = loads(found) + 64 * n_tasks
    for bin, ((first, stop, *_), _) in enumerate(found.bins.tolist()):
        costs[bin] += sum(4 * n for _, n in tasks(found)[first:stop])
    assert costs.max() <= costs.mean() * 1.02 + 64 + 16, (costs.max(), costs.mean())
    assert loads(found).max() <= 1.13 * loads(found).mean()


def test_a_small_step_uses_more_bins_than_requests():
    assert len(tasks(planned([[(1, 0, 1000, 0)]], layout=room(33, 16)))) >= 15


def test_most_shared_runs_come_first():
    contexts = [[(1, 0, 500, 0), *([(2, 0, 500, 0)] if row < 3 else [])] for row in range(8)]
    assert [n for _, n in tasks(planned(contexts))] == [8, 3, *[1] * 8]


def test_what_must_wait_is_last_in_its_bin():
    contexts = [[(10 * row + i, 0, 100, i) for i in range(4)] for row in range(8)]
    found = planned(contexts, layout=room(3, 16))
    for (first, stop, *_), _ in found.bins.tolist():
        waits = found.tasks[first:stop, 3] & FRESH != 0
        assert waits.any()
        assert not waits.all()
        assert (np.diff(waits.astype(int)) >= 0).all()


def test_new_tokens_of_an_extend_are_rows_of_their_own():
    found = planned([[(1, 0, 200, 4)]] * 2, own=30, new=3)
    assert found.n_rows == 6
    assert tasks(found) == [(200, 6), (30, 3), (30, 3)]
    seen = found.words[found.n_tasks + 6 : found.n_tasks + 12, 3].tolist()
    assert seen == [28, 29, 30] * 2
