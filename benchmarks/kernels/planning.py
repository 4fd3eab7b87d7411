"""The host work that our kernels need before a step: the planner told of the contexts, and one plan made.

It launches nothing.
"""

from __future__ import annotations

import numpy as np

from anabranch_kernels.planner import Planner
from anabranch_kernels.tasks import Int32s, Layout, TaskPlan
from benchmarks.kernels.placing import Placed


def aligned(size: int) -> Int32s:
    """[size] int32 at an address that is a multiple of 16 bytes, holding nonsense."""
    spare = np.full(size + 4, -7, np.int32)
    skip = -(spare.ctypes.data // 4) % 4
    return spare[skip : skip + size]


def layout_for(placed: Placed, n_bins: int, readers_per_task: int) -> Layout:
    """With room for this step, and not much more."""
    requests = placed.workload.requests
    return Layout.for_requests(
        n_bins,
        readers_per_task,
        requests=len(requests),
        intervals=max(len(request.context) for request in requests),
        tokens=max(1, int(placed.lengths.sum())),
        new_tokens=int(placed.new.max()),
    )


def plan(placed: Placed, layout: Layout) -> TaskPlan:
    planner = Planner(layout, placed.table.shape[1])
    for request, row in enumerate(placed.rows.tolist()):
        planner.set(row, placed.intervals(request))
    return planner.plan(placed.rows, placed.lengths, placed.new, aligned(layout.size))
