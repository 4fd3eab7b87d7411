"""`python -m benchmarks.kernels [--quick] [--only NAMES]` measures, `python -m benchmarks.kernels report` tells.

It runs the contenders' processes one after the other; the numbers are made in `measure.py`, the page in `report.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.kernels import report
from benchmarks.kernels.contenders import CONTENDERS, ON_DEMAND
from benchmarks.kernels.measure import SHAPE, Numbers
from benchmarks.kernels.processes import ROOT, Process
from benchmarks.kernels.worker import chosen

RESULTS = ROOT / "benchmarks" / "results" / "kernels.json"
QUICK = "1 x 32768,16 x 32768,DAG,equal"
SECONDS = 600
"""After which a contender is ended."""


def run(names: Sequence[str], workloads: str, *, quick: bool) -> Numbers:
    import torch

    # All at once, so that one can import what it needs while another has its turn.
    options = ["--workloads", workloads, *(["--quick"] if quick else [])]
    known = {**CONTENDERS, **ON_DEMAND}
    processes = {name: Process("benchmarks.kernels.worker", name, *options) for name in names}
    results: list[Numbers] = []
    rates: list[float] = []
    versions: Numbers = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name, process in processes.items():
        for line in process.turn(SECONDS, known[name].patience):
            report.tell(name, line)
            versions |= line.get("versions", {})
            rates += [line["copy_rate"]] if "copy_rate" in line else []
            if "workload" in line or "ended" in line:
                results.append({"contender": name, **line})
    properties = torch.cuda.get_device_properties(0)
    return {
        "schema": 1,
        "command": _command(names, workloads, quick),
        **_commit(),
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "python": platform.python_version(),
        "versions": versions,
        "copy_bytes_per_us": median(rates) if rates else None,
        "copy_spread": (max(rates) - min(rates)) / median(rates) if rates else None,
        "quick": quick,
        "shape": str(SHAPE),
        "workloads": [
            {
                "name": one.name,
                "kind": kind,
                "rows": one.rows,
                "union_tokens": one.union,
                "tokens_read_by_each": one.read_by_each,
                "union_bytes": one.union * SHAPE.token_bytes,
            }
            for one, kind in chosen(workloads)
        ],
        "results": results,
    }


def _command(names: Sequence[str], workloads: str, quick: bool) -> str:
    """What makes the same numbers again, wherever they are written to."""
    words = ["python -m benchmarks.kernels", *(["--quick"] if quick else [])]
    words += ["--only", ",".join(names)] if list(names) != list(CONTENDERS) else []
    return " ".join([*words, *(["--workloads", repr(workloads)] if workloads else [])])


def _commit() -> Numbers:
    """Where there is no repository, the file COMMIT beside the packages says what it was."""
    carried = ROOT / "COMMIT"
    if carried.exists():
        return json.loads(carried.read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "uncommitted_changes": bool(changed.stdout.strip())}


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()[0]
    except (FileNotFoundError, IndexError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["measure", "report"], default="measure")
    parser.add_argument("--quick", action="store_true", help="four workloads, few repetitions")
    parser.add_argument("--only", default="", help=f"a,b,c of {', '.join((*CONTENDERS, *ON_DEMAND))}")
    parser.add_argument("--workloads", default="", help="words of their names, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the numbers are, or go")
    given = parser.parse_args()
    if given.action == "report":
        report.write(json.loads(given.out.read_text()), ROOT / "docs" / "benchmarks")
        return
    names = [name.strip() for name in given.only.split(",") if name.strip()] or list(CONTENDERS)
    if unknown := [name for name in names if name not in {**CONTENDERS, **ON_DEMAND}]:
        parser.error(f"not known: {', '.join(unknown)}")
    numbers = run(names, given.workloads or (QUICK if given.quick else ""), quick=given.quick)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(numbers, indent=1) + "\n")
    print(report.table(numbers))
    print(f"written to {given.out}")
    if faults := report.broken(numbers):
        raise SystemExit("\n".join(["broken:", *faults]))


if __name__ == "__main__":
    main()
