"""One small step by one kernel, for tools that make everything slow: `python -m tests.gpu.small cuda-narrow`.

It shares, turns, hides the future, has an empty lane and unaligned tails. The suite proper is in `suite.py`.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.kernels.ours import ALL
from benchmarks.kernels.workloads import Request, Seen, Workload

from .suite import LLAMA, Case, check

SMALL = Workload(
    "small",
    (130, 65),
    (
        *(Request((Seen(0, 0, 130, 9 * i), Seen(1, 0, 65 - i, -i)), 1 + i) for i in range(17)),
        Request((), 0),
        Request((Seen(0, 3, 100, 0),), 12, 5),
    ),
)


def main() -> int:
    verdict = check(ALL[sys.argv[1]], Case(SMALL, LLAMA).step("cuda"), "small")
    torch.cuda.synchronize()
    print(f"{sys.argv[1]}: {verdict}", flush=True)
    return len(verdict.faults)


if __name__ == "__main__":
    sys.exit(main())
