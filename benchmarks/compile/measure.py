"""The measurements: joins, links of a chain, and memory. Each gives plain numbers, ready for JSON.

Nothing is printed, and nothing is judged here.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import anabranch_server
from anabranch_server.compile import compile_context
from anabranch_server.trunk import clear_shelf
from benchmarks.compile.baseline import look_up
from benchmarks.compile.shapes import JOINED, build, spec_of, to_join

Numbers = dict[str, Any]
COMPILER = ("compile", "plan", "positions", "trunk", "union")


def join(shape: str, size: int, repeat: int = 100) -> Numbers:
    """Join the 64 youngest of `size` states. Milliseconds. `first` is the first time after the graph was made, `cold`
    after everything was forgotten that can be written out again; the others are of many in a row. `processor` leaves
    out the time in which others had the machine."""
    graph = build(shape, size)
    parents = to_join(graph)
    spec = spec_of(*parents)

    def ours() -> Any:
        return compile_context(spec, graph.states)

    first = _times(ours, 1)[0]
    times = _times(ours, repeat)
    processor = _times(ours, repeat, thread_time)
    clear_shelf()
    cold = _times(ours, 1)[0]
    plan = ours()
    visible, start = look_up(parents, graph.states)
    assert [interval.segment.id for interval in plan.intervals] == list(visible), "the baseline sees the same"
    assert plan.start == start
    baseline = _times(lambda: look_up(parents, graph.states), max(3, repeat // 5))
    return {
        "shape": shape,
        "states": size,
        "joined": JOINED,
        "intervals": plan.rows,
        "pieces": len(plan.view.trunk.head.pieces),
        "first_ms": first,
        "median_ms": median(times),
        "best_ms": min(times),
        "processor_median_ms": median(processor),
        "cold_ms": cold,
        "baseline_median_ms": median(baseline),
        "baseline_best_ms": min(baseline),
    }


def chain(length: int = 1000, repeat: int = 100) -> Numbers:
    """Links of a chain, each of which inherits the one before. Microseconds for the k-th, by k: the median over many
    chains. The ratio compares the last 20 links with links 2 to 21, link by link the fastest of all chains."""
    taken: list[list[float]] = [[] for _ in range(length + 1)]
    for _ in range(repeat):
        graph = build("line", 1)
        name = next(iter(graph.states))
        for k in range(2, length + 1):
            spec = spec_of(name)
            began = perf_counter()
            plan = compile_context(spec, graph.states)
            taken[k].append((perf_counter() - began) * 1e6)
            name = graph.seal(plan, name)
            del plan  # at leisure, not while the next one is timed
    best = [min(some, default=0.0) for some in taken]
    asked = [k for k in (2, 10, 100, 500, 1000) if k <= length]
    return {
        "length": length,
        "median_us": {str(k): median(taken[k]) for k in asked},
        "ratio": median(best[-20:]) / median(best[2:22]),
        "ratio_of_medians": median(map(median, taken[-20:])) / median(map(median, taken[2:22])),
    }


def memory(shape: str, size: int) -> Numbers:
    """Bytes that the compiler allocates for each state of a graph, and what lies on its shelf on top of that."""
    build(shape, min(size, 200))  # so that what is allocated once is not counted
    clear_shelf()
    gc.collect()
    tracemalloc.start()
    try:
        graph = build(shape, size)
        with_shelf = _allocated()
        clear_shelf()
        without = _allocated()
    finally:
        tracemalloc.stop()
    visible = sum(state.context.rows for state in graph.states.values())
    return {
        "shape": shape,
        "states": size,
        "intervals_per_state": visible / size,
        "bytes_per_state": without / size,
        "shelf_bytes": with_shelf - without,
    }


def _allocated() -> int:
    gc.collect()
    folder = Path(anabranch_server.__file__).parent
    only = [tracemalloc.Filter(True, str(folder / f"{name}.py")) for name in COMPILER]
    snapshot = tracemalloc.take_snapshot().filter_traces(only)
    return sum(one.size for one in snapshot.statistics("filename"))


def _times(what: Callable[[], Any], repeat: int, clock: Callable[[], float] = perf_counter) -> list[float]:
    """Milliseconds of each call."""
    times: list[float] = []
    for _ in range(repeat):
        began = clock()
        what()
        times.append((clock() - began) * 1e3)
    return times
