"""The planner: which rows of `req_to_token` see what, and a step's task plan from it, on the host.

It computes no attention, copies nothing to a device, and looks into no slot: lengths are enough.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anabranch_kernels.native import NoCompiler
from anabranch_kernels.native_planner import NativePlanner
from anabranch_kernels.numpy_planner import NumpyPlanner
from anabranch_kernels.tasks import Int32s, Layout, Misfit, TaskPlan

logger = logging.getLogger(__name__)


class Planner:
    """Plans steps of one engine. Not for use by several threads at once.

    layout: where plans go, and how much fits, if `plan` is not told otherwise. table_width: columns of `req_to_token`.
    kv_tile: runs are cut in multiples of so many tokens, which should be a multiple of what a kernel takes at a time.
    Without a C++ compiler the same plans are made in Python, which takes milliseconds; `why_slow` says so then.
    """

    def __init__(self, layout: Layout, table_width: int, kv_tile: int = 64):
        self.layout, self.table_width = layout, table_width
        self.why_slow: str | None = None
        try:
            self._planner = NativePlanner(table_width, kv_tile)
        except NoCompiler as reason:
            self._planner = NumpyPlanner(table_width, kv_tile)
            self.why_slow = str(reason)
            logger.warning("steps are planned in Python, which takes milliseconds each: %s", reason)

    def set(self, row: int, intervals: Sequence[Sequence[int]] | NDArray[np.integer]) -> None:
        """What the request in a row of `req_to_token` has as its context, instead of what the row had before.

        intervals: [n, 4] {key, start, stop, delta} in the order of the row's slots, which begin with them; the
        request's own tokens follow. key: names one physical run of KV; equal keys mean equal slots at equal indices.
        Raises Misfit if they do not fit a row.
        """
        table = np.ascontiguousarray(intervals, dtype=np.int64)
        if table.size % 4:
            raise Misfit(f"row {row}: intervals of shape {table.shape} instead of [n, 4]")
        self._planner.set(row, table.reshape(-1, 4))

    def forget(self, row: int) -> None:
        """The row has no context any more. Nothing happens if it had none."""
        self._planner.forget(row)

    def plan(
        self,
        rows: ArrayLike,
        kv_lengths: ArrayLike,
        new_tokens: ArrayLike | None,
        buffer: Int32s,
        layout: Layout | None = None,
    ) -> TaskPlan:
        """Plan one step into `buffer`.

        rows, kv_lengths, new_tokens: [requests], each request's row of `req_to_token`, the tokens it sees with its
        own and newest ones (0: a padding lane, which sees nothing), and its query rows (None: one each).
        layout: for this step, as different kernels want different ones.
        buffer: [layout.size] int32, contiguous, at an address that is a multiple of 16 bytes.
        Raises PlanTooLarge, and then the buffer is as it was; Misfit if the numbers do not fit each other.
        """
        rows, kv_lengths = _int32s(rows), _int32s(kv_lengths)
        new_tokens = np.ones_like(rows) if new_tokens is None else _int32s(new_tokens)
        if not rows.shape == kv_lengths.shape == new_tokens.shape == (len(rows),):
            raise Misfit(f"{rows.shape} rows, {kv_lengths.shape} lengths, {new_tokens.shape} counts of new tokens")
        if buffer.dtype != np.int32 or not buffer.flags.c_contiguous or buffer.ctypes.data % 16:
            raise Misfit("the buffer is not int32, contiguous and at a multiple of 16 bytes")
        layout = layout or self.layout
        if buffer.size < layout.size:
            raise Misfit(f"a buffer of {buffer.size} for a layout of {layout.size}")
        return self._planner.plan(layout, rows, kv_lengths, new_tokens, buffer)


def _int32s(values: ArrayLike) -> Int32s:
    return np.ascontiguousarray(values, dtype=np.int32)
