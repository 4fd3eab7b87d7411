"""The planner in C++ (`csrc/planner.cpp`), called through ctypes.

It decides nothing. `numpy_planner.py` makes the same plans, bit for bit.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, byref, c_int, c_int64, c_void_p
from dataclasses import astuple
from functools import cache

from numpy.typing import NDArray

from anabranch_kernels import native
from anabranch_kernels.tasks import Int32s, Layout, Misfit, PlanTooLarge, TaskPlan

TOO_MANY = {1: "rows", 2: "words", 3: "partials", 4: "slots"}
MISFIT = 5


class NativeLayout(ctypes.Structure):
    """`Layout`, field by field."""

    _fields_ = tuple((name, c_int) for name in Layout.__dataclass_fields__)


@cache
def native_layout(layout: Layout) -> NativeLayout:
    return NativeLayout(*astuple(layout))


class Report(ctypes.Structure):
    _fields_ = (
        ("n_rows", c_int),
        ("n_tasks", c_int),
        ("n_readers", c_int),
        ("n_copies", c_int),
        ("n_slots", c_int),
        ("needed", c_int64),
    )


@cache
def library() -> ctypes.CDLL:
    """The compiled planner. Raises NoCompiler."""
    functions = native.load("planner.cpp", ("pool.h", "contexts.h", "grouping.h", "cutting.h"))
    functions.planner_open.argtypes = (c_int64, c_int)
    functions.planner_open.restype = c_void_p
    functions.planner_close.argtypes = (c_void_p,)
    functions.planner_close.restype = None
    functions.planner_set.argtypes = (c_void_p, c_int, c_void_p, c_int)
    functions.planner_set.restype = c_int
    functions.planner_forget.argtypes = (c_void_p, c_int)
    functions.planner_forget.restype = None
    functions.planner_n_keys.argtypes = (c_void_p,)
    functions.planner_n_keys.restype = c_int
    functions.planner_plan.argtypes = (c_void_p, POINTER(NativeLayout), c_int, *[c_void_p] * 4, POINTER(Report))
    functions.planner_plan.restype = c_int
    return functions


class NativePlanner:
    """See `Planner`, which checks what it hands in here. Raises NoCompiler."""

    def __init__(self, table_width: int, kv_tile: int):
        self._library = library()
        self._planner = self._library.planner_open(table_width, kv_tile)
        weakref.finalize(self, self._library.planner_close, self._planner)

    def set(self, row: int, intervals: NDArray) -> None:
        fit = self._library.planner_set(self._planner, row, intervals.ctypes.data, len(intervals))
        if fit < 0:
            raise Misfit.of_row(row)
        if fit < len(intervals):
            raise Misfit.of_interval(row, fit)

    def forget(self, row: int) -> None:
        self._library.planner_forget(self._planner, row)

    @property
    def n_keys(self) -> int:
        """Keys there is room for: as many as were in use at once. The first step after a change looks at each."""
        return self._library.planner_n_keys(self._planner)

    def plan(self, layout: Layout, rows: Int32s, kv_lengths: Int32s, new_tokens: Int32s, buffer: Int32s) -> TaskPlan:
        report = Report()
        outcome = self._library.planner_plan(
            self._planner,
            byref(native_layout(layout)),
            len(rows),
            rows.ctypes.data,
            kv_lengths.ctypes.data,
            new_tokens.ctypes.data,
            buffer.ctypes.data,
            byref(report),
        )
        if outcome in TOO_MANY:
            what = TOO_MANY[outcome]
            raise PlanTooLarge(what, report.needed, getattr(layout, f"max_{what}"))
        if outcome == MISFIT:
            raise Misfit.of_request(report.needed)
        return TaskPlan(
            layout,
            buffer,
            report.n_rows,
            report.n_tasks,
            report.n_readers,
            report.n_copies,
            report.n_readers,
            report.n_slots,
        )
