"""Tasks say how many of their slots are written just before the kernel: those, and only those, must be waited for.

Both planners are asked; what else plans must be is tested in `test_planner.py`.
"""

from __future__ import annotations

import pytest
import torch

from anabranch_kernels import numpy_planner, planner
from anabranch_kernels.tasks import FRESH, FRESH_MOST, FRESH_SHIFT, fresh_flags
from benchmarks.kernels.placing import place
from benchmarks.kernels.planning import layout_for, plan
from benchmarks.kernels.workloads import Request, Seen, Workload, drawn

from .executor import filled_slots

WORKLOADS = [
    Workload("decode", (300,), tuple(Request((Seen(0, 0, 300, i % 3),), 1 + 70 * i) for i in range(20))),
    Workload("extends", (300,), tuple(Request((Seen(0, 0, 300, 0),), 64 + new, new) for new in (1, 2, 63, 65, 200))),
    *(drawn(seed) for seed in range(12)),
]


@pytest.fixture(params=["C++", "numpy"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(planner, "NativePlanner", numpy_planner.NumpyPlanner)


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_last_slots_of_a_task_are_the_fresh_ones(workload: Workload):
    placed = place(workload)
    made = plan(placed, layout_for(placed, 7, 9))
    slots = filled_slots(made, torch.from_numpy(placed.table)).tolist()
    requests = zip(placed.slots, workload.requests, strict=True)
    fresh = {slot for seen, request in requests if len(seen) for slot in seen[-request.new :].tolist()}
    for begin, length, _, flags in made.tasks.tolist():
        count = flags >> FRESH_SHIFT
        of_task = slots[begin : begin + length]
        assert bool(flags & FRESH) == (count > 0)
        assert [slot in fresh for slot in of_task] == [False] * (length - count) + [True] * count


def test_more_fresh_slots_than_can_be_said_are_any_of_them():
    assert fresh_flags(0) == 0
    assert fresh_flags(FRESH_MOST) == FRESH | FRESH_MOST << FRESH_SHIFT < 1 << 31
    assert fresh_flags(FRESH_MOST + 1) == FRESH
