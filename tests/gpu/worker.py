"""The process that holds one kernel to the suite: it waits for its turn, names each case, and says what is wrong.

The suite itself is in `suite.py`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

import torch

from benchmarks.kernels.ours import ALL
from benchmarks.kernels.processes import say, wait
from benchmarks.kernels.steps import CannotDo

from . import suite


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=[*ALL])
    parser.add_argument("--count", type=int, default=suite.DRAWN)
    parser.add_argument("--common", action="store_true", help="leave out the rare shapes")
    parser.add_argument("--only", default="", help="a word of the case's name")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    torch.empty(1, device=given.device)
    wait()
    began = time.monotonic()
    tried = wrong = cannot = 0
    worst: dict[str, tuple[float, str]] = {}
    for case in suite.cases(count=given.count, rare=not given.common):
        if given.only not in str(case):
            continue
        say(at=str(case))
        try:
            verdict = suite.check(ALL[given.kernel], case.step(given.device), str(case))
        except CannotDo as reason:
            cannot += 1
            say(case=str(case), cannot=str(reason))
            continue
        except Exception as error:
            verdict = suite.Verdict(str(case), faults=[f"{type(error).__name__}: {error}"[:300]])
            say(**asdict(verdict))
            torch.cuda.synchronize()  # raises if the card does nothing more for this process
        else:
            if verdict.faults:
                say(**asdict(verdict))
        tried += 1
        wrong += bool(verdict.faults)
        for name in ("out_error", "row_error", "lse_error", "lse_step"):
            worst[name] = max(worst.get(name, (0.0, "")), (getattr(verdict, name), str(case)))
    say(tried=tried, wrong=wrong, cannot=cannot, worst=worst, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
