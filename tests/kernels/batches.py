"""Random steps for planners, and what a plan reads, slot by slot.

Requests see intervals of few segments with few ends and few shifts, so that they often meet. Nothing is planned here.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import strategies as st

from anabranch_kernels.tasks import CAUSAL, COUNT, FRESH, Layout, TaskPlan
from benchmarks.kernels.placing import Placed
from benchmarks.kernels.workloads import Request, Seen, Workload

from .executor import filled_slots

SEGMENT = 333
ENDS = (0, 1, 50, 63, 64, 65, 100, 200, SEGMENT)
DELTAS = (0, 0, 5, -17, 100_000, -100_000)


def room(n_bins: int, readers_per_task: int) -> Layout:
    """A layout that is large enough for what tests do."""
    return Layout(n_bins, readers_per_task, 1 << 11, 1 << 15, 1 << 14, 1 << 17)


@st.composite
def seen(draw: st.DrawFn) -> Seen:
    start, stop = sorted((draw(st.sampled_from(ENDS)), draw(st.sampled_from(ENDS))))
    return Seen(draw(st.integers(0, 4)), start, stop, draw(st.sampled_from(DELTAS)))


@st.composite
def workloads(draw: st.DrawFn, most_requests: int = 9) -> Workload:
    """Some requests see the same beginning of the same context, and a little more."""
    contexts = draw(st.lists(st.lists(seen(), max_size=6), min_size=1, max_size=3))
    requests: list[Request] = []
    for _ in range(draw(st.integers(0, most_requests))):
        if draw(st.integers(0, 9)) == 0:
            requests.append(Request((), 0))
            continue
        context = draw(st.sampled_from(contexts))[: draw(st.integers(0, 6))] + draw(st.lists(seen(), max_size=2))
        new = draw(st.sampled_from([1, 1, 1, 2, 5, 19]))
        requests.append(Request(tuple(context), new + draw(st.sampled_from([0, 1, 62, 130])), new))
    return Workload("random", (SEGMENT,) * 5, tuple(requests))


def layouts() -> st.SearchStrategy[Layout]:
    return st.builds(room, st.sampled_from([1, 2, 7, 33]), st.sampled_from([1, 2, 4, 16]))


def read_by_plan(plan: TaskPlan, placed: Placed) -> list[Counter[tuple[int, int]]]:
    """Of each query row, which (slot, delta) it reads how often. Checks on the way that tasks keep the rules of
    `tasks.py`; that their flags say what is so; and that what must wait is last in its bin."""
    slots = filled_slots(plan, torch.from_numpy(placed.table)).numpy()
    newest = {
        slot for one, request in zip(placed.slots, placed.workload.requests, strict=True)
        for slot in (one[-request.new :].tolist() if request.length else [])
    }  # fmt: skip
    found: list[Counter[tuple[int, int]]] = [Counter() for _ in range(plan.n_rows)]
    partials: list[list[int]] = [[] for _ in range(plan.n_rows)]
    next_reader = plan.n_tasks
    for begin, length, reader, flagged in plan.tasks.tolist():
        assert reader == next_reader
        next_reader += flagged & COUNT
        task_slots = slots[begin : begin + length].tolist()
        words = plan.words[reader:next_reader].tolist()
        assert min(task_slots) >= 0, "reads what no copy wrote"
        assert bool(flagged & FRESH) == (not newest.isdisjoint(task_slots))
        assert bool(flagged & CAUSAL) == any(seen < length for *_, seen in words)
        assert any(seen == length for *_, seen in words), "slots that nobody sees"
        for row, delta, partial, seen in words:
            found[row].update((slot, delta) for slot in task_slots[:seen])
            partials[row].append(partial)
    assert next_reader == plan.n_tasks + plan.n_readers
    for (first, stop, *_), _ in plan.bins.tolist():
        waits = (plan.tasks[first:stop, 3] & FRESH != 0).tolist()
        assert waits == sorted(waits)
    for row, mine in enumerate(partials):
        assert sorted(mine) == list(range(plan.pointers[row], plan.pointers[row + 1]))
    assert (plan.pointers[plan.n_rows :] == plan.n_partials).all()
    return found


def read_by_requests(placed: Placed) -> list[Counter[tuple[int, int]]]:
    """The same, as the workload says."""
    rows: list[Counter[tuple[int, int]]] = []
    for request, slots in zip(placed.workload.requests, placed.slots, strict=True):
        deltas = [one.delta for one in request.context for _ in range(one.start, one.stop)] + [0] * request.own
        pairs = list(zip(slots.tolist(), deltas, strict=True))
        rows += [Counter(pairs[: len(pairs) - request.new + new + 1]) for new in range(request.new)]
    return rows


def loads(plan: TaskPlan) -> np.ndarray:
    """[n_bins]: tokens that each bin reads."""
    return np.array([plan.tasks[first:stop, 1].sum() for (first, stop, *_), _ in plan.bins.tolist()])
