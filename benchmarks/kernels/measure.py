"""One contender on one workload: is it right, and how long does it take. Gives plain numbers, ready for JSON.

It prints nothing and compares nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from anabranch_kernels import segmented_attention
from benchmarks.kernels import timing
from benchmarks.kernels.contenders import Contender
from benchmarks.kernels.placing import place, slots_needed
from benchmarks.kernels.steps import CannotDo, Shape, Step, pool, queries
from benchmarks.kernels.workloads import Workload

Numbers = dict[str, Any]
SHAPE = Shape()
POOL_SLOTS = 136 << 10
"""0.57 GB, eleven times the L2 cache of an H200."""
SETS = 3
"""Places in the pool that take turns, so that what is read was not read lately."""
LAYERS = 6
WRONG = 1e-2
"""Relative error of out from which on a kernel is not timed. What is asked of ours is in `tests/gpu`."""


@dataclass(frozen=True, slots=True)
class Repeats:
    single: int = 60
    layers: int = 30


def case(contender: Contender, workload: Workload, repeats: Repeats, *, layers: bool) -> Numbers:
    """single_us: one call, replayed from a graph. layer_us: a sixth of a graph of six calls. Medians of all repeats."""
    if not contender.shifts:
        workload = workload.unshifted
    steps = placed(workload)
    expected = _expected(steps[0])
    best: Numbers = {}
    reasons: list[str] = []
    for way, prepare in contender.ways.items():
        try:
            found = _one_way(prepare, steps, expected, repeats, layers=layers)
        except CannotDo as reason:
            reasons.append(str(reason))
        except Exception as error:  # of somebody's kernel, and anything may be wrong there
            torch.cuda.synchronize()  # raises if the card does nothing more for this process
            reasons.append(f"{way} {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200].strip())
        else:
            if not best or found["single_us"] < best["single_us"]:
                best = found | {"way": way}
    return best or {"left_out": "; ".join(dict.fromkeys(reasons))}


def _one_way(
    prepare: Callable[[Step], Callable[[], Tensor]],
    steps: Sequence[Step],
    expected: Tensor,
    repeats: Repeats,
    *,
    layers: bool,
) -> Numbers:
    launches = [prepare(step) for step in steps]
    error = ((launches[0]().float() - expected).norm() / expected.norm()).item()
    if not error < WRONG:
        raise CannotDo(f"relative error {error:.1e}")
    return _timed(launches, repeats, layers=layers) | {"out_error": error}


def placed(workload: Workload) -> list[Step]:
    """The workload at several places of one pool, which overlap only if it has no room for all of them."""
    needed = slots_needed(workload) + 1
    slots = max(POOL_SLOTS, needed)
    k_cache, v_cache = pool(SHAPE, slots, "cuda")
    q = queries(SHAPE, workload.rows, "cuda")
    return [
        Step(place(workload, i, free=free), SHAPE, q, k_cache, v_cache) for i, free in enumerate(places(needed, slots))
    ]


def places(needed: int, slots: int) -> list[list[int]]:
    """Which slots each set has: one after the other from a shuffled pool, from its begin again once it is used up."""
    order = list(range(slots))
    random.Random(0).shuffle(order)
    firsts = [i * needed % slots for i in range(SETS)]
    return [(order[first:] + order[:first])[:needed] for first in firsts]


def _expected(step: Step) -> Tensor:
    batch = step.placed.batch_plan("cuda")
    out, _ = segmented_attention(
        step.q, step.k_cache, step.v_cache, batch, scale=step.shape.scale, rotary=step.shape.rotary
    )
    return out.float()


def _timed(launches: Sequence[Callable[[], Any]], repeats: Repeats, *, layers: bool) -> Numbers:
    single = timing.times([timing.captured(launch) for launch in launches], repeats.single)
    numbers = {"single_us": median(single), "single_best_us": min(single)}
    if layers:
        graphs = [timing.captured(_in_turn(launches, first)) for first in range(len(launches))]
        numbers["layer_us"] = median(timing.times(graphs, repeats.layers)) / LAYERS
    return numbers


def _in_turn(launches: Sequence[Callable[[], Any]], first: int) -> Callable[[], None]:
    def run() -> None:
        for layer in range(LAYERS):
            launches[(first + layer) % len(launches)]()

    return run
