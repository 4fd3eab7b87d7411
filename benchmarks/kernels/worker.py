"""The process of one contender: it says that it is ready, waits for its turn, and prints one JSON line a workload.

It starts no process and writes no file.
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from importlib import import_module

import torch

from benchmarks.kernels import measure, timing
from benchmarks.kernels.contenders import CONTENDERS, ON_DEMAND, versions
from benchmarks.kernels.processes import say, wait
from benchmarks.kernels.workloads import Workload, decodes, prefills


def chosen(names: str) -> list[tuple[Workload, str]]:
    """The workloads whose names contain one of these words, with their kinds; all if there are none."""
    every = [*((one, "decode") for one in decodes()), *((one, "prefill") for one in prefills())]
    words = [word.strip() for word in names.split(",") if word.strip()]
    return [(one, kind) for one, kind in every if not words or any(word in one.name for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--workloads", default="")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    contender = {**CONTENDERS, **ON_DEMAND}[given.contender]
    repeats = measure.Repeats(15, 6) if given.quick else measure.Repeats()
    for module in contender.modules:
        with suppress(Exception):  # if it is not there, that is said of each workload
            import_module(module)
    torch.empty(1, device="cuda")
    say(ready=given.contender, versions=versions(contender))
    wait()
    say(copy_rate=timing.copy_rate())
    for workload, kind in chosen(given.workloads):
        if kind not in contender.kinds:
            continue
        began = time.monotonic()
        say(at=workload.name)
        numbers = measure.case(contender, workload, repeats, layers=kind == "decode")
        say(workload=workload.name, seconds=round(time.monotonic() - began, 1), **numbers)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
