"""Batch plans: what is refused, and what a plan says of slots and shifts.

No attention is computed.
"""

from __future__ import annotations

import pytest
import torch

from anabranch_kernels import BatchPlan, Part, plan_batch


def slots(n: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + n, dtype=torch.int32)


def shifts(plan: BatchPlan) -> list[list[tuple[int, list[int]]]]:
    return [[(delta, columns.tolist()) for delta, columns in request.shifts] for request in plan.requests]


def test_slots_become_int64_in_their_order():
    plan = plan_batch([torch.tensor([9, 2, 7], dtype=torch.int32)], [1])
    (request,) = plan.requests
    assert request.slots.dtype == torch.int64
    assert request.slots.tolist() == [9, 2, 7]
    assert (request.n_new, request.shifts) == (1, ())


def test_queries_are_counted_over_all_requests():
    assert plan_batch([slots(5), slots(0), slots(3)], [2, 0, 3]).n_queries == 5
    assert plan_batch([], []).n_queries == 0
    assert plan_batch([], [], []).requests == ()


def test_parts_with_one_delta_are_one_shift():
    plan = plan_batch([slots(12)], [1], [[Part(0, 2, 5), Part(4, 6, -3), Part(7, 9, 5)]])
    assert shifts(plan) == [[(5, [0, 1, 7, 8]), (-3, [4, 5])]]
    assert all(columns.dtype == torch.int64 for _, columns in plan.requests[0].shifts)


def test_what_does_not_move_is_no_shift():
    assert shifts(plan_batch([slots(6)], [1], [[Part(0, 3, 0), Part(3, 3, 9), Part(6, 6, 4), Part(0, 0, -1)]])) == [[]]


def test_parts_belong_to_the_request_in_their_place():
    plan = plan_batch([slots(3), slots(3), slots(3)], [1, 1, 1], [[Part(0, 1, 7)], [], [Part(1, 3, 8)]])
    assert shifts(plan) == [[(7, [0])], [], [(8, [1, 2])]]


def test_a_part_may_cover_everything():
    assert shifts(plan_batch([slots(3)], [3], [[Part(0, 3, -2)]])) == [[(-2, [0, 1, 2])]]


@pytest.mark.parametrize("n_new", [-1, 4, 2**40])
def test_as_many_queries_as_visible_tokens_at_most(n_new: int):
    with pytest.raises(ValueError, match="visible tokens"):
        plan_batch([slots(3)], [n_new])
    with pytest.raises(ValueError, match="visible tokens"):
        plan_batch([slots(9), slots(0)], [1, 1])


@pytest.mark.parametrize("part", [Part(-1, 2, 5), Part(0, 4, 5), Part(2, 1, 5), Part(4, 4, 5), Part(-2, -1, 5)])
def test_a_part_outside_the_slots_is_refused_whatever_its_delta(part: Part):
    for delta in (part.delta, 0):
        with pytest.raises(ValueError, match="part"):
            plan_batch([slots(3)], [1], [[part._replace(delta=delta)]])


def test_lists_of_different_lengths_are_refused():
    for arguments in [([slots(3)], []), ([], [1]), ([slots(3)], [1], []), ([slots(3), slots(2)], [1, 1], [[]])]:
        with pytest.raises(ValueError, match="slot lists"):
            plan_batch(*arguments)


def test_planning_does_not_change_the_slots_it_was_given():
    given = torch.tensor([4, 4, 1])
    plan_batch([given], [1], [[Part(0, 1, 3)]])
    assert given.tolist() == [4, 4, 1]
