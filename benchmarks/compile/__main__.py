"""`python -m benchmarks.compile [--quick] [--out FILE]` measures, `python -m benchmarks.compile report` tells.

The numbers are made in `measure.py`, the page in `report.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy

from benchmarks.compile import measure, report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "compile.json"
SHAPES = ("chains", "late forks", "tree", "layers")


def run(*, quick: bool) -> measure.Numbers:
    """All measurements, and where they were made."""
    sizes = (100, 1000) if quick else (100, 1000, 10_000)
    joins: list[measure.Numbers] = []
    for shape in SHAPES:
        for size in sizes:
            joins.append(measure.join(shape, size, repeat=20 if quick else 100))
            print(report.join_line(joins[-1]), flush=True)
    chain = measure.chain(repeat=5 if quick else 100)
    print(report.chain_line(chain), flush=True)
    lengths = {"line": sizes, "tree": sizes, "chains": sizes, "layers": sizes[:2]}
    memory: list[measure.Numbers] = []
    for shape, some in lengths.items():
        for size in some:
            memory.append(measure.memory(shape, size))
            print(report.memory_line(memory[-1]), flush=True)
    return {**_place(), "quick": quick, "joins": joins, "chain": chain, "memory": memory}


def _place() -> measure.Numbers:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "schema": 1,
        "command": " ".join(["python -m benchmarks.compile", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "uncommitted_changes": bool(changed.stdout.strip()),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["measure", "report"], default="measure")
    parser.add_argument("--quick", action="store_true", help="small graphs, few repetitions")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the numbers are, or go")
    given = parser.parse_args()
    if given.action == "report":
        report.write(json.loads(given.out.read_text()), ROOT / "docs" / "benchmarks")
        return
    numbers = run(quick=given.quick)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
