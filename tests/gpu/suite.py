"""The correctness suite that every kernel is held to: which cases, and what is asked of the results.

It knows no kernel: one is handed in as the function that prepares a step. `tests/kernels/test_suite.py` shows that
wrong kernels fail here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.kernels.placing import place
from benchmarks.kernels.steps import Prepare, Shape, Step, poisoned
from benchmarks.kernels.workloads import Workload, drawn, nasty

from . import expected

OUT_LIMIT = 5e-3
"""Of the norm of the difference over the norm of what is expected, all rows together."""
ROW_LIMIT = 3 * OUT_LIMIT
"""The same for each row and head: a wrong row among many is small in the whole."""
LSE_LIMIT = 1e-4
FEW_LIMIT = 1e-3
"""The limit of lse for steps that see few tokens. A turned query is rounded to its dtype, which alone costs 7e-4 where
lse is that of one token, and 1e-4 where it is that of 70: many tokens average it out."""
LSE_STEP = 1e-2
"""Largest difference of one lse."""

E4M3 = torch.float8_e4m3fn
LLAMA = Shape()
COMMON = (LLAMA, Shape(64, 3, 3), Shape(128, 8, 4), Shape(128, 4, 8, torch.float16), Shape(64, 8, 1))
RARE = (
    Shape(128, 1, 4), Shape(128, 2, 4), Shape(128, 3, 4), Shape(128, 5, 8), Shape(128, 7, 4), Shape(64, 1, 5),
    Shape(64, 4, 2), Shape(64, 7, 2), Shape(256, 1, 2), Shape(256, 2, 4), Shape(256, 4, 1), Shape(256, 8, 1),
    Shape(128, 4, 2, rotary_dim=64), Shape(128, 4, 2, rotary_dim=64, interleaved=True), Shape(64, 5, 2, rotary_dim=16),
    Shape(128, 4, 8, stored_as=E4M3), Shape(64, 3, 3, stored_as=E4M3), Shape(256, 2, 2, torch.float16, stored_as=E4M3),
    Shape(64, 3, 3, torch.float16), Shape(256, 2, 4, torch.float16), Shape(256, 8, 1, rotary_dim=64, interleaved=True),
)  # fmt: skip
DRAWN = 300


@dataclass(frozen=True, slots=True)
class Case:
    """A workload for one model shape."""

    workload: Workload
    shape: Shape
    seed: int = 0

    def step(self, device: str) -> Step:
        return poisoned(place(self.workload, self.seed), self.shape, device, self.seed)

    def __str__(self) -> str:
        return f"{self.workload.name} | {self.shape}"


@dataclass(slots=True)
class Verdict:
    """What was found. Errors are relative, `lse_step` is absolute; no faults: it is right."""

    case: str
    out_error: float = 0.0
    row_error: float = 0.0
    lse_error: float = 0.0
    lse_step: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        numbers = f"out {self.out_error:.1e} row {self.row_error:.1e} lse {self.lse_error:.1e} {self.lse_step:.1e}"
        return f"{'; '.join(self.faults) or 'right'} | {numbers} | {self.case}"


def cases(*, count: int = DRAWN, rare: bool = True, longest: int = 3001, most: int = 64) -> Iterator[Case]:
    """The nasty ones for Llama's shape and one more, then `count` drawn ones; a third of these for rare shapes."""
    for workload in nasty():
        yield Case(workload, LLAMA)
        yield Case(workload, COMMON[1])
    for seed in range(count):
        shapes = RARE if rare and seed % 3 == 2 else COMMON
        yield Case(drawn(seed, longest=longest, most=most), shapes[seed // 3 % len(shapes)], seed)


def check(prepare: Prepare, step: Step, case: str = "") -> Verdict:
    """Run the kernel three times, the later times into results that were poisoned in between."""
    with new_memory_is_poison():
        launch = prepare(step)
        results = launch()
    first = tuple(result.clone() for result in results)
    verdict = compare(first, expected.attention(step), case)
    if first[0].dtype != step.q.dtype or first[1].dtype != torch.float32:
        verdict.faults.append(f"out is {first[0].dtype}, lse {first[1].dtype}")
    for _ in range(2):
        for result in results:
            result.fill_(torch.nan)
        again = launch()
        if not all(same_bits(*pair) for pair in zip(first, again, strict=True)):
            verdict.faults.append("another time it gives something else")
            break
    return verdict


def compare(found: tuple[Tensor, ...], right: tuple[Tensor, Tensor], case: str = "") -> Verdict:
    """Where they are infinite or no number first, then how far apart they are."""
    verdict = Verdict(case)
    out, lse = (one.float() for one in found)
    right_out, right_lse = right
    if out.shape != right_out.shape or lse.shape != right_lse.shape:
        verdict.faults.append(f"out is {list(out.shape)}, lse {list(lse.shape)}")
        return verdict
    if not out.isfinite().all():
        verdict.faults.append(f"out is not finite in {_rows(~out.isfinite().flatten(1).all(1))}")
    empty = right_lse.isneginf()
    if not torch.equal(lse.isneginf(), empty):
        verdict.faults.append(f"lse is -inf in the wrong rows: {_rows((lse.isneginf() != empty).any(1))}")
    if not lse[~lse.isneginf()].isfinite().all():
        verdict.faults.append(f"lse is no number in {_rows((lse.isnan() | lse.isposinf()).any(1))}")
    if out[empty].count_nonzero():
        verdict.faults.append("out is not 0 where nothing is seen")
    if verdict.faults or empty.all():
        return verdict
    verdict.out_error = _relative(out, right_out)
    difference = (out - right_out)[~empty].norm(dim=-1)
    verdict.row_error = (difference / right_out[~empty].norm(dim=-1)).max().item()
    verdict.lse_error = _relative(lse[~empty], right_lse[~empty])
    verdict.lse_step = (lse - right_lse)[~empty].abs().max().item()
    few = right_lse[~empty].square().mean().sqrt() < 5.0
    limits = {"out_error": OUT_LIMIT, "row_error": ROW_LIMIT, "lse_step": LSE_STEP}
    limits["lse_error"] = FEW_LIMIT if few else LSE_LIMIT
    verdict.faults += [
        f"{name} {getattr(verdict, name):.1e} > {limit:.0e}"
        for name, limit in limits.items()
        if getattr(verdict, name) > limit
    ]
    return verdict


def same_bits(one: Tensor, other: Tensor) -> bool:
    kinds = {2: torch.int16, 4: torch.int32}
    return torch.equal(one.view(kinds[one.dtype.itemsize]), other.view(kinds[other.dtype.itemsize]))


def _relative(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def _rows(wrong: Tensor) -> str:
    rows = wrong.nonzero().flatten().tolist()
    return f"rows {', '.join(map(str, rows[:8]))}{' ...' if len(rows) > 8 else ''} of {len(wrong)}"


@contextmanager
def new_memory_is_poison() -> Iterator[None]:
    """Within, `torch.empty` holds NaN, and integers that are nobody's slot."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
