"""The planner in C++ beside the one in Python, and what becomes of it where C++ cannot be compiled.

What plans must be is in `test_planner.py`, which runs with what a machine has.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_kernels import native, native_planner
from anabranch_kernels.native import NoCompiler
from anabranch_kernels.native_planner import NativePlanner
from anabranch_kernels.numpy_planner import NumpyPlanner
from anabranch_kernels.planner import Planner
from anabranch_kernels.tasks import Int32s, Layout, Misfit, PlanTooLarge
from benchmarks.kernels.plan import measure
from benchmarks.kernels.planning import aligned

from .batches import seen

HEADERS = ("pool.h", "contexts.h", "grouping.h", "cutting.h")
WIDTH = 2000


def result(planner: NativePlanner | NumpyPlanner, layout: Layout, step: Sequence[Int32s]):
    """All that a planner says of a step, and all that it writes."""
    buffer = aligned(layout.size)
    try:
        rows, lengths, new = step
        plan = planner.plan(layout, rows, lengths, new, buffer)
    except (Misfit, PlanTooLarge) as error:
        return repr(error), buffer.tolist()
    counts = plan.n_rows, plan.n_tasks, plan.n_readers, plan.n_copies, plan.n_partials, plan.n_slots
    return counts, buffer.tolist()


def tight_layouts() -> st.SearchStrategy[Layout]:
    """Some of them too small."""
    return st.builds(
        Layout,
        st.sampled_from([1, 2, 7, 33]),
        st.sampled_from([1, 2, 4, 16]),
        st.sampled_from([20, 200]),
        st.sampled_from([60, 400, 1 << 12]),
        st.sampled_from([40, 1 << 12]),
        st.sampled_from([1000, 1 << 16]),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_both_planners_do_the_same_bit_for_bit(data: st.DataObject):
    """Over several steps, as contexts come and go, lengths grow, and some steps are too large or cannot be."""
    planners = NativePlanner(WIDTH, 64), NumpyPlanner(WIDTH, 64)
    some_layouts = data.draw(st.lists(tight_layouts(), min_size=1, max_size=2))
    contexts = {}
    for _ in range(data.draw(st.integers(1, 4))):
        for row in data.draw(st.sets(st.integers(0, 7))):
            context = np.array(data.draw(st.lists(seen(), max_size=5)), np.int64).reshape(-1, 4)
            contexts[row] = int((context[:, 2] - context[:, 1]).sum())
            for planner in planners:
                planner.set(row, context)
        for row in data.draw(st.sets(st.integers(0, 7), max_size=2)):
            contexts.pop(row, None)
            for planner in planners:
                planner.forget(row)
        rows = data.draw(st.lists(st.integers(0, 8), max_size=12))
        new = data.draw(st.lists(st.sampled_from([1, 1, 1, 0, 3, 20]), min_size=len(rows), max_size=len(rows)))
        own = data.draw(st.lists(st.sampled_from([0, 1, 1, 5, 70]), min_size=len(rows), max_size=len(rows)))
        idle = data.draw(st.sets(st.integers(0, 11), max_size=2))
        for more in range(3):
            lengths = [contexts.get(row, 0) + n + o + more for row, n, o in zip(rows, new, own, strict=True)]
            lengths = [
                0 if i in idle else length - (o == 0) for i, (length, o) in enumerate(zip(lengths, own, strict=True))
            ]
            step = [np.array(numbers, np.int32) for numbers in (rows, lengths, new)]
            layout = data.draw(st.sampled_from(some_layouts))
            fast, slow = (result(planner, layout, step) for planner in planners)
            assert fast == slow


def test_a_step_is_planned_in_time():
    """100 us is what it may take; most of a busy machine's noise is not in the shortest of many."""
    (worst,) = measure("nothing shared")
    assert worst["first_us"]["least"] <= 150
    assert worst["next_us"]["least"] <= 0.8 * worst["first_us"]["least"], "nothing is kept from step to step"


def test_keys_of_contexts_that_are_gone_are_gone():
    """A server lives for weeks, and every segment has a new key."""
    planner = NativePlanner(WIDTH, 64)
    for first in range(0, 10_000, 50):
        planner.set(first % 3, np.array([(first + i, 0, 1, 0) for i in range(50)]))
        if first % 1000 == 0:
            planner.forget(first % 3)
    assert planner.n_keys <= 4 * 50


# ------------------------------------------------------------ compiling


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kernels"
    monkeypatch.setenv("ANABRANCH_KERNEL_CACHE", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library of one function, which gives the number in its header."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "number.h"\nextern "C" int number() { return NUMBER; }')
    (folder / "number.h").write_text("#define NUMBER 1")
    monkeypatch.setattr(native, "SOURCES", folder)
    return folder


def number() -> int:
    return native.load("one.cpp", ("number.h",)).number()


def test_what_is_compiled_is_found_again(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    assert number() == 1
    monkeypatch.setattr(native, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert number() == 1


def test_another_header_is_another_file(cache: Path, source: Path):
    assert number() == 1
    (source / "number.h").write_text("#define NUMBER 2")
    assert number() == 2
    assert [file.suffix for file in cache.iterdir()] == [".so"] * 2


def test_every_header_of_the_planner_counts():
    assert {path.name for path in native.SOURCES.glob("*.h")} == set(HEADERS)


@pytest.mark.parametrize("harm", [lambda whole: whole[:5000], lambda whole: b"", lambda whole: whole[:-1] + b"?"])
def test_a_file_that_is_not_whole_is_compiled_anew(cache: Path, source: Path, harm):
    assert number() == 1
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.unlink()  # as the library is in use
    file.write_bytes(harm(whole))
    assert number() == 1
    assert file.read_bytes() == whole


PLAN = """
import numpy as np
from anabranch_kernels.planner import Planner
from anabranch_kernels.tasks import Layout
layout = Layout(4, 16, 8, 100, 100, 1000)
planner = Planner(layout, 500)
planner.set(0, [(1, 0, 100, 5)])
buffer = np.zeros(layout.size + 4, np.int32)
plan = planner.plan([0], [101], None, buffer[-buffer.ctypes.data % 16 // 4:])
print(plan.n_slots, planner.why_slow)
"""


def test_processes_that_compile_at_once_do_not_disturb_each_other(cache: Path):
    pipes = {"stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", PLAN], **pipes) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["101 None\n"] * 2
    assert [file.suffix for file in cache.iterdir()] == [".so"]


# ------------------------------------------------------------ without C++


def no_compiler_on_the_path(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("CXX", "false")


def a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(native, "_compiled", lambda *_: b"library")
    cache.write_text("not a folder")


def a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(native, "_compiled", lambda *_: b"no library")
    monkeypatch.setattr(native, "FLAGS", ("another name than that of the library which is loaded already",))


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (no_compiler_on_the_path, r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\) on the path"),
        (a_compiler_that_fails, "fails: exit code 1"),
        (a_cache_that_cannot_be_written, "cannot be kept"),
        (a_library_that_cannot_be_loaded, "cannot be loaded"),
    ],
)
def test_the_same_is_planned_in_python_and_said_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble, reason: str
):
    layout = Layout(4, 16, 8, 100, 100, 1000)
    fast = Planner(layout, 500)
    assert fast.why_slow is None
    monkeypatch.setattr(native_planner, "library", native_planner.library.__wrapped__)
    monkeypatch.setenv("ANABRANCH_KERNEL_CACHE", str(tmp_path / "kernels"))
    trouble(monkeypatch, tmp_path / "kernels")
    with pytest.raises(NoCompiler, match=reason):
        native_planner.library()
    slow = Planner(layout, 500)
    assert slow.why_slow
    assert "\n" not in slow.why_slow
    assert slow.why_slow in caplog.text
    buffers = []
    for planner in (fast, slow):
        planner.set(3, [(1, 0, 100, 5)])
        buffers.append(planner.plan([3], [102], [2], aligned(layout.size)).buffer.tolist())
    assert buffers[0] == buffers[1]
