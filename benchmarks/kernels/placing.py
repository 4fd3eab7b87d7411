"""A workload with slots: where its tokens lie in the pool, as SGLang's tables and as plans.

Nothing is on a device, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch_kernels import BatchPlan, Part, plan_batch
from anabranch_kernels.plan import RequestPlan
from benchmarks.kernels.workloads import Request, Workload

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A workload whose tokens have slots. used: [n] int32, every slot in use.

    slots: of each request, [length] int32, in the order in which it sees them.
    rows: [requests] int32, its row in SGLang's tables.
    table: [rows, width] int32, SGLang's `req_to_token`; what is not in use names a slot that nobody reads.
    """

    workload: Workload
    slots: tuple[Int32s, ...]
    rows: Int32s
    table: Int32s
    used: Int32s

    @property
    def lengths(self) -> Int32s:
        """[requests]: tokens that each request's last query sees."""
        return np.array([request.length for request in self.workload.requests], np.int32)

    @property
    def new(self) -> Int32s:
        return np.array([request.new for request in self.workload.requests], np.int32)

    def intervals(self, request: int) -> NDArray[np.int64]:
        """[n, 4] {key, start, stop, delta}: a request's context, as the planner is told."""
        return np.array(self.workload.requests[request].context, np.int64).reshape(-1, 4)

    def batch_plan(self, device: str = "cpu") -> BatchPlan:
        """The same, as the reference is told."""
        plans = []
        for request, slots in zip(self.workload.requests, self.slots, strict=True):
            here = torch.from_numpy(slots).to(device)
            if not request.length:
                plans.append(RequestPlan(here.long(), request.new))
                continue
            plans += plan_batch([here], [request.new], [parts(request)]).requests
        return BatchPlan(tuple(plans))


def parts(request: Request) -> list[Part]:
    """Where in its slot list what it sees of each segment lies."""
    found: list[Part] = []
    at = 0
    for seen in request.context:
        found.append(Part(at, at + seen.stop - seen.start, seen.delta))
        at += seen.stop - seen.start
    return found


def slots_needed(workload: Workload) -> int:
    """Slots in whole pages."""
    tokens = [*workload.segments, *(request.own for request in workload.requests)]
    return sum(-(-length // workload.page) * workload.page for length in tokens)


def place(workload: Workload, seed: int = 0, *, free: Sequence[int] | None = None, spare_rows: int = 3) -> Placed:
    """Give every segment, and every request's own tokens, pages at random.

    free: the pages that may be used, the first ones first; one page more than needed, which is given to nobody, stands
    for what must not be read. By default as many as needed, shuffled.
    """
    dice = Random(seed)
    page = workload.page
    if free is None:
        free = list(range(slots_needed(workload) // page + 1))
        dice.shuffle(free)
    unread = free[-1] * page
    pages = iter(free[:-1])

    def some(length: int) -> Int32s:
        taken = np.array([next(pages) for _ in range(-(-length // page))], np.int32)
        return (taken[:, None] * page + np.arange(page, dtype=np.int32)).reshape(-1)[:length]

    segments = [some(length) for length in workload.segments]
    own = [some(request.own) for request in workload.requests]
    slots = tuple(
        np.concatenate([*(segments[seen.segment][seen.start : seen.stop] for seen in request.context), mine])
        for request, mine in zip(workload.requests, own, strict=True)
    )
    n_rows = len(slots) + spare_rows
    rows = np.array(dice.sample(range(n_rows), len(slots)), np.int32)
    table = np.full((n_rows, max(map(len, slots), default=0) + 5), unread, np.int32)
    for row, some_slots in zip(rows, slots, strict=True):
        table[row, : len(some_slots)] = some_slots
    return Placed(workload, slots, rows, table, np.concatenate([*segments, *own, np.empty(0, np.int32)]))
