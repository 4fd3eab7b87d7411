"""The benchmark of the kernels, as far as it goes without a card: workloads, places, processes, and the page.

What it claims of kernels is judged by the numbers in `benchmarks/results`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.kernels import measure, report
from benchmarks.kernels.__main__ import RESULTS
from benchmarks.kernels.contenders import CONTENDERS, OURS
from benchmarks.kernels.peers import common_start
from benchmarks.kernels.placing import place, slots_needed
from benchmarks.kernels.processes import Process
from benchmarks.kernels.worker import chosen
from benchmarks.kernels.workloads import Request, Seen, Workload, dag, decodes, drawn, fork, nasty

COPY_RATE = 4.27e6  # bytes a microsecond, as design measured it


@pytest.mark.parametrize(
    ("workload", "bound"),
    [(fork(1, 32768, 256), 31.7), (fork(64, 32768, 256), 47.1), (fork(16, 8192, 1024), 23.6), (dag(), 23.6)],
)
def test_the_bound_counts_each_token_once(workload: Workload, bound: float):
    assert workload.union * measure.SHAPE.token_bytes / COPY_RATE == pytest.approx(bound, abs=0.05)


def test_parts_that_overlap_are_counted_once():
    requests = (Request((Seen(0, 0, 60, 0),), 2), Request((Seen(0, 40, 100, 9),), 3))
    workload = Workload("", (100,), requests)
    assert (workload.union, workload.read_by_each) == (105, 125)


@pytest.mark.parametrize("workload", [*nasty(), *map(drawn, range(40))], ids=lambda workload: workload.name)
def test_places_are_whole_pages_that_nobody_else_has(workload: Workload):
    placed = place(workload, seed=3)
    assert len(set(placed.used.tolist())) == len(placed.used)
    assert placed.used.max(initial=0) < slots_needed(workload) + workload.page
    unread = set(placed.table.ravel().tolist()) - set(placed.used.tolist())
    assert len(unread) == 1, "the rest of the table names a slot that nobody has"
    for slots, row, length in zip(placed.slots, placed.rows, placed.lengths, strict=True):
        assert len(slots) == length
        assert np.array_equal(placed.table[row, :length], slots)
    for page in range(0, len(placed.used) - workload.page, workload.page):
        if len(workload.segments) == 1 and page + workload.page <= workload.segments[0]:
            assert np.ptp(placed.used[page : page + workload.page]) == workload.page - 1


def test_what_is_read_again_was_read_long_ago():
    """Places in turn have no slot in common, as long as the pool has room for all."""
    for workload in decodes():
        if 3 * (slots_needed(workload) + 1) <= measure.POOL_SLOTS:
            free = measure.places(slots_needed(workload) + 1, measure.POOL_SLOTS)
            assert len(set().union(*free)) == sum(map(len, free))


def test_all_requests_of_a_fork_begin_with_what_they_share():
    assert common_start(place(fork(8, 300, 20))) == 300
    assert common_start(place(fork(1, 300, 20))) == 320
    assert common_start(place(Workload("", (3,), (Request((), 2), Request((Seen(0, 0, 3, 0),), 2))))) == 0


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def written(text: str) -> Process:
        (tmp_path / "a_contender.py").write_text(f"from benchmarks.kernels.processes import say, wait\n{text}\n")
        monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
        return Process("a_contender")

    return written


def test_a_process_says_things_and_ends(program):
    process = program("say(ready=1); wait(); say(found=2); print('noise')")
    assert list(process.turn(60, 60)) == [{"ready": 1}, {"found": 2}]


def test_a_process_that_falls_over_leaves_what_it_said_and_why(program):
    lines = list(program("say(found=2); raise ValueError('no such thing')").turn(60, 60))
    assert lines[0] == {"found": 2}
    assert "no such thing" in lines[1]["ended"]


def test_a_process_that_says_nothing_more_is_ended(program):
    began = time.monotonic()
    lines = list(program("import time; say(at='here'); time.sleep(600)").turn(300, 3))
    assert time.monotonic() - began < 60
    assert "silent" in lines[-1]["ended"]
    assert "here" in lines[-1]["ended"]


def test_a_process_that_goes_on_and_on_is_ended(program):
    lines = list(program("import time\nwhile True: say(at=1); time.sleep(0.1)").turn(4, 60))
    assert "more than" in lines[-1]["ended"]


def example() -> dict:
    """Numbers of a run that never was."""
    workloads = [
        {
            "name": one.name,
            "kind": kind,
            "rows": one.rows,
            "union_tokens": one.union,
            "tokens_read_by_each": one.read_by_each,
            "union_bytes": one.union * measure.SHAPE.token_bytes,
        }
        for one, kind in chosen("")
    ]
    results = [
        {"contender": name, "workload": one["name"], "single_us": 50.0, "layer_us": 40.0, "way": "", "out_error": 1e-3}
        for one in workloads
        for name, contender in CONTENDERS.items()
        if one["kind"] in contender.kinds and name != "cascade"
    ]
    results += [{"contender": "cascade", "workload": workloads[0]["name"], "left_out": "shares | nothing"}]
    results += [{"contender": "triton", "ended": "exit code 1"}]
    return {
        "command": "", "commit": "0" * 40, "uncommitted_changes": False, "card": "", "multiprocessors": 132,
        "driver": "", "python": "3", "versions": {"torch": "2"}, "copy_bytes_per_us": COPY_RATE, "copy_spread": 0.01,
        "workloads": workloads, "results": results,
    }  # fmt: skip


def test_page_and_plot_are_made_of_the_numbers(tmp_path: Path):
    numbers = example()
    for one in numbers["results"]:
        if one["contender"] == "cuda-narrow" and one["workload"] == "DAG":
            one |= {"single_us": 36.6, "layer_us": 31.1}
    report.write(numbers, tmp_path)
    page = (tmp_path / "kernels.md").read_text()
    assert "| DAG | 23.6 | 36.6 / 31.1 | 50.0 / 40.0 |" in page
    assert "| DAG | 101 | 1.55 / 1.32 |" in page
    assert "shares / nothing" in page
    assert "exit code 1" in page
    ElementTree.parse(tmp_path / "kernels.svg")
    assert "exit code 1" in report.table(numbers)


def test_speed_is_compared_with_the_best_of_the_others():
    numbers = example()
    for one in numbers["results"]:
        if one.get("workload") == "DAG" and one["contender"] not in OURS and "single_us" in one:
            one["single_us"] = {"fa3": 90.0, "triton": 75.0}.get(one["contender"], 1000.0)
    (line,) = [line for line in report.page(numbers).splitlines() if line.startswith("| DAG | 23.6")]
    assert line.endswith("| 1.50 |")


def test_a_kernel_of_ours_that_is_wrong_or_never_ends_is_broken():
    numbers = example()
    assert not report.broken(numbers), "what others cannot do is no fault of ours"
    numbers["results"].append({"contender": "tilelang", "workload": "DAG", "left_out": "ModuleNotFoundError: tilelang"})
    assert not report.broken(numbers)
    numbers["results"].append({"contender": "cuda-narrow", "workload": "DAG", "left_out": "relative error 3.0e-01"})
    numbers["results"].append({"contender": "tilelang", "ended": "silent for 60 s"})
    assert len(report.broken(numbers)) == 2


def test_the_work_of_a_prefill():
    """4,096 tokens over 32,768: 2.5e9 pairs of a query and a key, less the half square that is hidden."""
    (one, *_) = [one for one in example()["workloads"] if one["kind"] == "prefill"]
    assert report.flops(one) == pytest.approx(4 * 32 * 128 * (4096 * 32768 + 4096 * 4097 / 2), rel=1e-9)


@pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet")
def test_the_page_is_made_of_the_results_that_are_kept(tmp_path: Path):
    kept = json.loads(RESULTS.read_text())
    assert kept["schema"] == 1
    assert not kept["quick"]
    report.write(kept, tmp_path)
    for name in ("kernels.md", "kernels.svg"):
        page = RESULTS.parents[2] / "docs" / "benchmarks" / name
        assert (tmp_path / name).read_text() == page.read_text(), "run: python -m benchmarks.kernels report"
