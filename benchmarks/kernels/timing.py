"""How time is taken: CUDA graphs, replayed, with an event before and after each. Medians, in microseconds.

What is timed is not known here; whoever asks sees to it that the caches hold nothing useful.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

WARM_UP = 9


def captured(launch: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of what `launch` launches, which has run once before; returns its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def times(runs: Sequence[Callable[[], Any]], repeat: int) -> list[float]:
    """Microseconds of `repeat` runs, one after the other in turn."""
    for i in range(WARM_UP):
        runs[i % len(runs)]()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for i, (begun, ended) in enumerate(events):
        begun.record()
        runs[i % len(runs)]()
        ended.record()
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) * 1e3 for begun, ended in events]


def copy_rate() -> float:
    """Bytes a microsecond that a copy on the device reads and writes together. Not from a graph, where copies are made
    in another way, a third slower on an H200."""
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    fastest = min(median(times([way], 20)) for way in ways)
    return 2 * source.numel() * source.itemsize / fastest
