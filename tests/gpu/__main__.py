"""`python -m tests.gpu [--kernels cuda,tilelang]`: the correctness suite on this machine's card, without pytest.

Each kernel has a process of its own. Ends with 1 if one of them gave a wrong result, or did not come to its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.kernels.ours import ALL
from benchmarks.kernels.processes import Process

from . import suite

KERNELS = "cuda-narrow,cuda-wide,tilelang,tilelang-prefill"
SECONDS, SILENCE = 900, 120
"""After which a kernel is ended: in all, and without a word. Some compile when they are first used."""
SHOWN = 10


def verdicts(kernel: str, options: list[str], seconds: float) -> dict[str, Any]:
    """All that is wrong, what cannot be done, and the summary; told as it comes."""
    found: dict[str, Any] = {"kernel": kernel, "faults": [], "cannot": {}, "summary": None, "ended": None}
    for line in Process("tests.gpu.worker", kernel, *options).turn(seconds, SILENCE):
        if "at" in line:
            continue
        if "faults" in line:
            found["faults"].append(line)
            if len(found["faults"]) <= SHOWN:
                print(f"{kernel}: {line['case']}: {'; '.join(line['faults'])}", flush=True)
        elif "cannot" in line and "case" in line:
            found["cannot"][line["case"]] = line["cannot"]
        elif "ended" in line:
            found["ended"] = line["ended"]
        else:
            found["summary"] = line
    return found


def row(found: dict[str, Any]) -> str:
    summary = found["summary"]
    if summary is None:
        return f"{found['kernel']:<18} NOT ENDED  {found['ended']}"
    worst = " ".join(f"{name} {value:.1e}" for name, (value, _) in summary["worst"].items())
    verdict = f"{summary['wrong']} WRONG" if summary["wrong"] else "right"
    cannot = f", {summary['cannot']} not for it" if summary["cannot"] else ""
    return f"{found['kernel']:<18} {verdict:<10} of {summary['tried']}{cannot} in {summary['seconds']} s; {worst}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--kernels", default=KERNELS, help=f"of {', '.join(ALL)}; default {KERNELS}")
    parser.add_argument("--count", type=int, default=suite.DRAWN, help="random plans")
    parser.add_argument("--common", action="store_true", help="leave out the rare shapes")
    parser.add_argument("--only", default="", help="a word of the names of cases")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which a kernel is ended")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write all of it to this file")
    given = parser.parse_args()
    options = ["--count", str(given.count), "--only", given.only, "--device", given.device]
    options += ["--common"] if given.common else []
    found = [verdicts(kernel, options, given.seconds) for kernel in given.kernels.split(",")]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(*map(row, found), sep="\n")
    return int(any(one["summary"] is None or one["summary"]["wrong"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
