"""The correctness suite for kernels, tried on kernels made of torch: one that is right, and many that are not.

No GPU. What the suite asks of real kernels is in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import pytest
import torch
from torch import Tensor

from anabranch_kernels import Rotary, segmented_attention
from anabranch_kernels.tasks import CAUSAL, COUNT, TaskPlan
from benchmarks.kernels.placing import place
from benchmarks.kernels.planning import layout_for, plan
from benchmarks.kernels.steps import Launch, Shape, Step, poisoned
from benchmarks.kernels.workloads import Request, Seen, Workload
from tests.gpu import expected, suite

from .executor import execute

SMALL = Shape(64, 3, 2)
STEP = Workload(
    "all sorts",
    (100, 1, 333),
    (
        Request((Seen(0, 0, 100, 7), Seen(1, 0, 1, -5), Seen(2, 0, 333, 1000)), 5),
        Request((), 0),
        Request((Seen(0, 0, 100, 7), Seen(2, 10, 300, -100_000)), 70),
        Request((Seen(2, 0, 333, 0),), 20, 4),
    ),
)


class Rounded(Rotary):
    """Turned queries are rounded, as they are where they are multiplied by tensor cores."""

    def turned(self, x: Tensor, positions: int) -> Tensor:
        return super().turned(x, positions).to(torch.bfloat16).float()


@dataclass(frozen=True)
class Kernel:
    """Carries out task plans in torch. The functions change the plan before, and the results after."""

    plan: Callable[[TaskPlan], None] = lambda plan: None
    results: Callable[[Tensor, Tensor], None] = lambda out, lse: None
    rotary: type[Rotary] = Rounded

    def __call__(self, step: Step) -> Launch:
        planned = plan(step.placed, layout_for(step.placed, 8, 64 // step.shape.group))
        self.plan(planned)
        rotary = self.rotary(step.shape.rotary.inv_freq, step.shape.rotary.interleaved)
        table = torch.from_numpy(step.placed.table)
        results = torch.empty_like(step.q), torch.empty(step.q.shape[:-1])

        def launch() -> tuple[Tensor, Tensor]:
            found = execute(
                planned, step.q, step.k_cache, step.v_cache, table, scale=step.shape.scale, rotary=rotary
            )  # fmt: skip
            for result, values in zip(results, found, strict=True):
                result.copy_(values)
            self.results(*results)
            return results

        return launch


def verdict(kernel: Callable[[Step], Launch], workload: Workload = STEP, shape: Shape = SMALL) -> suite.Verdict:
    return suite.check(kernel, poisoned(place(workload), shape, "cpu"))


def test_a_right_kernel_passes():
    assert not verdict(Kernel()).faults
    assert verdict(Kernel()).out_error > 0


def test_a_right_kernel_passes_the_small_ones_of_all_cases():
    tried = 0
    for case in suite.cases(count=24, longest=333, most=7):
        if case.workload.read_by_each > 4000 or case.shape.stored_as:
            continue
        found = suite.check(Kernel() if case.shape.dtype == torch.bfloat16 else Kernel(rotary=Rotary), case.step("cpu"))
        assert not found.faults, f"{case}: {found}"
        tried += 1
    assert tried >= 40


def test_what_is_expected_is_what_the_reference_computes():
    for case in suite.cases(count=12, longest=333, most=7):
        step = replace(case, shape=replace(case.shape, dtype=torch.float32)).step("cpu")
        if case.workload.read_by_each > 4000:
            continue
        found = segmented_attention(
            step.q,
            step.k_cache,
            step.v_cache,
            step.placed.batch_plan(),
            scale=case.shape.scale,
            rotary=case.shape.rotary,
        )
        right = expected.attention(step)
        torch.testing.assert_close(found[0], right[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(found[1], right[1], atol=2e-5, rtol=2e-6)


def readers(plan: TaskPlan):
    return plan.words[plan.n_tasks : plan.n_tasks + plan.n_readers]


def turn_the_wrong_way(plan: TaskPlan) -> None:
    readers(plan)[:, 1] *= -1


def do_not_turn(plan: TaskPlan) -> None:
    readers(plan)[:, 1] = 0


def cut_deltas_to_16_bits(plan: TaskPlan) -> None:
    readers(plan)[:, 1] = readers(plan)[:, 1].astype("int16")


def see_the_future(plan: TaskPlan) -> None:
    for _, length, reader, flagged in plan.tasks[plan.tasks[:, 3] & CAUSAL != 0]:
        for word in plan.words[reader : reader + (flagged & COUNT)]:
            word[3] = min(word[3] + 1, length)


def miss_the_last_token(plan: TaskPlan) -> None:
    """Of the longest task."""
    task = plan.tasks[:, 1].argmax()
    plan.tasks[task, 3] |= CAUSAL
    plan.bins[plan.bins[:, 0, 0] == task, 1] = plan.tasks[task]
    _, length, reader, flagged = plan.tasks[task]
    words = plan.words[reader : reader + (flagged & COUNT)]
    words[:, 3] = words[:, 3].clip(max=length - 1)


@pytest.mark.parametrize(
    "change", [turn_the_wrong_way, do_not_turn, cut_deltas_to_16_bits, see_the_future, miss_the_last_token]
)
def test_a_kernel_that_reads_plans_wrongly_fails(change: Callable[[TaskPlan], None]):
    assert verdict(Kernel(plan=change)).faults


@pytest.mark.parametrize(("row", "column"), [(0, 49), (0, 51), (2, 400), (3, 340)])
def test_a_kernel_that_reads_a_wrong_slot_fails(row: int, column: int):
    """That of a neighbour, or of another request, instead of one."""

    def kernel(step: Step) -> Launch:
        table, rows = step.placed.table.copy(), step.placed.rows
        table[rows[0], 50] = table[rows[row], column]
        return Kernel()(replace(step, placed=replace(step.placed, table=table)))

    assert verdict(kernel).faults


RUNS = count()


def swap_two_rows(out: Tensor, lse: Tensor) -> None:
    out[[0, 2]] = out[[2, 0]].clone()


def swap_two_heads(out: Tensor, lse: Tensor) -> None:
    out[:, [0, 1]] = out[:, [1, 0]].clone()


def scale_one_row(out: Tensor, lse: Tensor) -> None:
    out[3] *= 1.03


def scale_all(out: Tensor, lse: Tensor) -> None:
    out *= 1.008


def give_lse_in_base_2(out: Tensor, lse: Tensor) -> None:
    lse *= 1.4427


def shift_one_lse(out: Tensor, lse: Tensor) -> None:
    lse[0, 0] += 0.02


def shift_all_lse(out: Tensor, lse: Tensor) -> None:
    lse *= 1.0003


def give_nan_for_an_empty_lane(out: Tensor, lse: Tensor) -> None:
    out[1] = torch.nan


def give_something_for_an_empty_lane(out: Tensor, lse: Tensor) -> None:
    out[1, 0, 0] = 1.0


def give_a_small_lse_for_an_empty_lane(out: Tensor, lse: Tensor) -> None:
    lse[1] = -1e30


def give_nothing_for_a_row(out: Tensor, lse: Tensor) -> None:
    out[0], lse[0] = 0, -torch.inf


def give_infinity(out: Tensor, lse: Tensor) -> None:
    out[0, 0, 0] = torch.inf


def differ_from_time_to_time(out: Tensor, lse: Tensor) -> None:
    lse[0, 0] += next(RUNS) * 1e-6


@pytest.mark.parametrize(
    "change",
    [
        swap_two_rows, swap_two_heads, scale_one_row, scale_all, give_lse_in_base_2, shift_one_lse, shift_all_lse,
        give_nan_for_an_empty_lane, give_something_for_an_empty_lane, give_a_small_lse_for_an_empty_lane,
        give_nothing_for_a_row, give_infinity, differ_from_time_to_time,
    ],
)  # fmt: skip
def test_a_kernel_that_gives_something_else_fails(change: Callable[[Tensor, Tensor], None]):
    assert verdict(Kernel(results=change)).faults


def test_a_row_that_is_written_only_once_fails():
    """The later runs find poison in their results."""
    right = Kernel()

    def kernel(step: Step) -> Launch:
        launch = right(step)
        written = [result.clone() for result in launch()]

        def only_some() -> tuple[Tensor, Tensor]:
            out, lse = launch()
            out[2] = written[0][2] if next(times) == 0 else torch.nan
            return out, lse

        times = count()
        return only_some

    assert "another time" in "".join(verdict(kernel).faults)


def test_memory_that_was_never_written_is_noticed():
    def kernel(step: Step) -> Launch:
        results = torch.empty_like(step.q), torch.empty(step.q.shape[:-1])
        return lambda: results

    assert "not finite" in "".join(verdict(kernel).faults)


def test_results_of_another_dtype_or_size_fail():
    def wide(step: Step) -> Launch:
        launch = Kernel()(step)
        return lambda: (launch()[0].float(), launch()[1])

    def short(step: Step) -> Launch:
        launch = Kernel()(step)
        return lambda: (launch()[0][:-1], launch()[1][:-1])

    assert verdict(wide).faults
    assert verdict(short).faults


class Interleaving(Rounded):
    def turned(self, x: Tensor, positions: int) -> Tensor:
        return Rounded(self.inv_freq, not self.interleaved).turned(x, positions)


class Whole(Rounded):
    """Turns all of a head."""

    def turned(self, x: Tensor, positions: int) -> Tensor:
        return Rounded(Shape(x.shape[-1]).rotary.inv_freq, self.interleaved).turned(x, positions)


@pytest.mark.parametrize("rotary", [Interleaving, Whole])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_kernel_that_turns_other_pairs_fails(rotary: type[Rotary], interleaved: bool):
    shape = replace(SMALL, rotary_dim=16, interleaved=interleaved)
    assert not verdict(Kernel(), shape=shape).faults
    assert verdict(Kernel(rotary=rotary), shape=shape).faults
