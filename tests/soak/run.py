"""The soak run: a tiny model, a real server with every check switched on, a random program, a summary.

`python -m tests.soak.run --help`, or `scripts/soak`. Exits with 1 if anything was wrong, and says how to replay it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.serving import Served, serve

from . import checks, tally, tiny
from .calls import Violation
from .operations import TRAITS, WEIGHTS
from .rounds import Options, Soak

FLAGS = (
    *("--max-total-tokens", "2048", "--max-running-requests", "32", "--log-level", "warning"),
    *("--chunked-prefill-size", "32", "--enable-mixed-chunk", "--grammar-backend", "none"),
)
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    """The server of a run: more flags, and more environment."""

    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    """NAME=VALUE."""
    retract: bool = False
    tp: int = 1

    @property
    def all_flags(self) -> tuple[str, ...]:
        return (*FLAGS, *(("--tp", str(self.tp)) if self.tp > 1 else ()), *self.flags)

    @property
    def env(self) -> dict[str, str]:
        env = {"OMP_WAIT_POLICY": "PASSIVE"}
        if self.retract:
            env["SGLANG_TEST_RETRACT"] = "1"
        if self.tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(self.tp))
        return env | dict(variable.split("=", 1) for variable in self.variables)


def soak(options: Options, setting: Setting, folder: Path) -> dict[str, Any]:
    """Start a server in `folder`, run, stop it; returns the summary. The server's log stays there."""
    model = tiny.write(folder / "model")
    began = time.monotonic()
    with serve(model, setting.all_flags, folder / "server.log", env=setting.env) as served:
        print(f"the server came up in {time.monotonic() - began:.0f} s; its log is {served.log_file}", flush=True)
        family = [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children(recursive=True)]
        memory = megabytes(family)
        summary = asyncio.run(Soak.of(options, model, lambda: faults(served)).run(served.url))
        summary["server_megabytes"] = [memory, megabytes(family)]
        stopping = time.monotonic()
    summary["violations"] += after_the_end(served, family, time.monotonic() - stopping)
    return summary | {"seed": options.seed, "server": [*setting.all_flags], "environment": setting.env}


def megabytes(family: Sequence[psutil.Process]) -> int:
    """Resident memory of the processes that still run."""
    return sum(process.memory_info().rss for process in family if process.is_running()) // 2**20


def faults(served: Served) -> str | None:
    """What is wrong with the server as it runs."""
    try:
        checks.log(served.log)
    except Violation as fault:
        return str(fault)
    return None if served.process.poll() is None else f"the server ended:\n{served.log[-3000:]}"


def after_the_end(served: Served, family: Sequence[psutil.Process], seconds: float) -> list[str]:
    """What is wrong with how the server stopped."""
    left = [str(process.pid) for process in family if process.is_running() and process.status() != "zombie"]
    wrong = [f"processes {', '.join(left)} are left"] if left else []
    if seconds > STOP_SECONDS:
        wrong.append(f"the server took {seconds:.0f} s to stop")
    return wrong


def replay(options: Options, setting: Setting) -> str:
    """The command that does the same again."""
    words = ["scripts/soak", f"--seed {options.seed}", f"--operations {options.operations}"]
    words += [f"--workers {options.workers}", f"--every {options.every}"]
    words += [f"--without {','.join(sorted(options.without))}"] if options.without else []
    words += [f"--keys {','.join(options.keys)}"] if options.keys != Options().keys else []
    words += [f"--operator {options.operator}"] if options.operator else []
    words += [f"--tp {setting.tp}"] if setting.tp > 1 else []
    words += [f"--env {variable}" for variable in setting.variables]
    words += ["--retract"] if setting.retract else []
    return " ".join([*words, *(("--", *setting.flags) if setting.flags else ())])


def main(argv: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(argv)
    options = Options(
        seed=parsed.seed,
        operations=parsed.operations,
        workers=parsed.workers,
        every=parsed.every,
        without=frozenset(name for name in parsed.without.split(",") if name),
        keys=tuple(parsed.keys.split(",")),
        operator=parsed.operator,
    )
    flags = tuple(word for word in parsed.flags if word != "--")
    setting = Setting(flags, tuple(parsed.env), parsed.retract, parsed.tp)
    folder = parsed.folder or Path(tempfile.mkdtemp(prefix="anabranch-soak-"))
    try:
        summary = soak(options, setting, folder)
    except AssertionError as error:  # the server did not come up
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the server is stopped, its log: {folder / 'server.log'}", file=sys.stderr)
        return 130
    tally.show(summary)
    if parsed.json:
        parsed.json.write_text(json.dumps(summary, indent=1) + "\n")
    if summary["violations"]:
        print(*(f"VIOLATION {what}" for what in summary["violations"][: tally.SHOWN]), sep="\n")
        print(f"the server's log: {folder / 'server.log'}\nagain: {replay(options, setting)}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--operations", type=int, default=default.operations, help=f"default {default.operations}")
    parser.add_argument("--workers", type=int, default=default.workers, help="at the same time; 1 replays exactly")
    parser.add_argument("--every", type=int, default=default.every, help="operations between two rests")
    parser.add_argument("--without", default="", help=f"a,b,c: leave out of {', '.join((*WEIGHTS, *TRAITS))}")
    parser.add_argument("--keys", default=",".join(default.keys), help="API keys of the tenants")
    parser.add_argument("--operator", help="API key of the operator")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--retract", action="store_true", help="force retractions (SGLANG_TEST_RETRACT)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the server")
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    parser.add_argument("--folder", type=Path, help="for the model and the server's log; default: a new one in /tmp")
    parser.add_argument("flags", nargs="*", help="after --: more flags of the server")
    return parser


if __name__ == "__main__":
    sys.exit(main())
