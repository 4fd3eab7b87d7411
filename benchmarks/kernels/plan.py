"""How long the host plans a step: `python -m benchmarks.kernels.plan [NAME]`. No GPU.

It says nothing of how good plans are; the kernel benchmark does.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from anabranch_kernels.planner import Planner
from benchmarks.kernels.placing import place
from benchmarks.kernels.planning import aligned, layout_for
from benchmarks.kernels.workloads import Request, Seen, Workload, decodes

REPEATS = 300
STEPS = 8
"""That append only, after each first one."""


def alone(requests: int = 64, intervals: int = 20) -> Workload:
    """Every request sees segments of its own, each at another shift: as much work for the planner as can be."""
    dice = Random(0)
    lengths = [dice.randint(100, 500) for _ in range(requests * intervals)]
    mine = [range(request * intervals, (request + 1) * intervals) for request in range(requests)]
    contexts = [tuple(Seen(i, 0, lengths[i], 1 + i) for i in some) for some in mine]
    return Workload("nothing shared", tuple(lengths), tuple(Request(context, 300) for context in contexts))


def mixed(requests: int = 64, intervals: int = 20) -> Workload:
    """Every request sees a root, and half of twice as many segments, at shifts of its own."""
    dice = Random(0)
    lengths = [4096, *(dice.randint(500, 2000) for _ in range(2 * intervals - 2))]
    contexts = []
    for _ in range(requests):
        chosen = sorted(dice.sample(range(1, len(lengths)), intervals - 1))
        contexts.append((Seen(0, 0, 4096, 0), *(Seen(i, 0, lengths[i], dice.randint(0, 2000)) for i in chosen)))
    return Workload("much shared", tuple(lengths), tuple(Request(context, 300) for context in contexts))


def measure(only: str = "", repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Of each workload whose name has `only` in it: microseconds of a first step, and of those that append to it."""
    return [_measured(one, repeats) for one in (alone(), mixed(), *decodes()) if only in one.name]


def _measured(workload: Workload, repeats: int) -> dict[str, Any]:
    grown = tuple(replace(request, own=request.own + STEPS) for request in workload.requests)
    placed = place(replace(workload, requests=grown))
    layout = layout_for(placed, 33, 16)
    planner = Planner(layout, placed.table.shape[1])
    contexts = [placed.intervals(request) for request in range(len(grown))]
    rows, lengths, buffer = placed.rows, placed.lengths - STEPS, aligned(layout.size)
    contexts_us, first, others = [], [], []
    for _ in range(repeats):
        start = perf_counter()
        for row, context in zip(rows.tolist(), contexts, strict=True):
            planner.set(row, context)
        contexts_us.append((perf_counter() - start) * 1e6 / len(grown))
        for step in range(STEPS + 1):
            now = lengths + step
            start = perf_counter()
            plan = planner.plan(rows, now, None, buffer)
            (others if step else first).append((perf_counter() - start) * 1e6)
    return {
        "workload": workload.name,
        "requests": len(grown),
        "intervals": max(len(context) for context in contexts),
        "tasks": plan.n_tasks,
        "partials": plan.n_partials,
        "bytes": 4 * plan.used,
        "in_python": planner.why_slow,
        "context_us": _summary(contexts_us),
        "first_us": _summary(first),
        "next_us": _summary(others),
    }


def _summary(times: list[float]) -> dict[str, float]:
    return {"least": round(min(times), 1), "median": round(median(times), 1)}


def line(one: dict[str, Any]) -> str:
    times = "  ".join(
        f"{name} {one[f'{name}_us']['least']:6.1f} / {one[f'{name}_us']['median']:6.1f}"
        for name in ("first", "next", "context")
    )
    return f"{one['workload']:16} {one['tasks']:5} tasks {one['partials']:5} partials {one['bytes']:6} B  us {times}"


if __name__ == "__main__":
    print("least / median of a step's plan: the first with its contexts, the next ones; of telling one context")
    for measured in measure():
        print(line(measured))
