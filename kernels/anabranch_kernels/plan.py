"""The batch plan: which KV slots each request of one step reads, and with which position shifts.

One plan serves all layers and heads of the step. It holds no query, no KV, and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """Entries `start:stop` of a request's slot list, seen at native position plus `delta`."""

    start: int
    stop: int
    delta: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestPlan:
    """What one request reads.

    slots: [n_kv] int64, KV slots of all visible tokens; the last `n_new` are this step's own tokens, in order.
    n_new: number of query tokens; query `j` sees `slots[: n_kv - n_new + j + 1]`.
    shifts: (delta, columns) for every delta that is not 0; columns: [k] int64 indices into `slots`.
    """

    slots: torch.Tensor
    n_new: int
    shifts: tuple[tuple[int, torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """One step: requests in the order of their query tokens."""

    requests: tuple[RequestPlan, ...]

    @property
    def n_queries(self) -> int:
        return sum(request.n_new for request in self.requests)


def plan_batch(
    slots: Sequence[torch.Tensor], n_new: Sequence[int], parts: Sequence[Sequence[Part]] | None = None
) -> BatchPlan:
    """Plan one step.

    slots: one [n_kv] integer tensor a request. n_new: query tokens a request, 0 <= n_new <= n_kv.
    parts: the shifted parts of each request's slots; what is not named is seen where it was computed.
    Raises ValueError if the lengths do not fit each other.
    """
    parts = [()] * len(slots) if parts is None else parts
    if not len(slots) == len(n_new) == len(parts):
        raise ValueError(f"{len(slots)} slot lists, {len(n_new)} query counts, {len(parts)} lists of parts")
    return BatchPlan(tuple(_plan_request(*request) for request in zip(slots, n_new, parts, strict=True)))


def _plan_request(slots: torch.Tensor, n_new: int, parts: Sequence[Part]) -> RequestPlan:
    n_kv = slots.numel()
    if not 0 <= n_new <= n_kv:
        raise ValueError(f"{n_new} query tokens among {n_kv} visible tokens")
    by_delta: dict[int, list[torch.Tensor]] = {}
    for start, stop, delta in parts:
        if not 0 <= start <= stop <= n_kv:
            raise ValueError(f"part {start}:{stop} of {n_kv} visible tokens")
        if delta and stop > start:
            by_delta.setdefault(delta, []).append(torch.arange(start, stop, device=slots.device))
    shifts = tuple((delta, torch.cat(columns)) for delta, columns in by_delta.items())
    return RequestPlan(slots.to(torch.int64), n_new, shifts)
