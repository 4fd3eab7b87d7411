"""What a server leaves behind when it ends: processes, shared memory, sockets and files.

A server that is looked at here has a folder of its own for temporary files: whatever is in there is its.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.serving import Served, serve

SHARED = Path("/dev/shm")
NAMES = ("sem.loky-{}-*", "sgl_shm_mq_{}_*")
"""Of semaphores and queues, by the process that made them."""
FLAGS = ("--max-total-tokens", "8192", "--max-running-requests", "16", "--log-level", "warning")


@dataclass(frozen=True)
class Remains:
    """Taken while the server runs; `left` then says what outlived it."""

    folder: Path
    family: tuple[psutil.Process, ...]
    shared: frozenset[Path]

    @classmethod
    def of(cls, served: Served, folder: Path) -> Remains:
        supervisor = psutil.Process(served.process.pid)
        family = (supervisor, *supervisor.children(recursive=True))
        noted = [
            Path(line) for notes in folder.glob("anabranch-leftovers-*") for line in notes.read_text().splitlines()
        ]
        mapped = [path for one in family for path in _mapped(one.pid)]
        shared = frozenset(path for path in (*noted, *mapped) if path.is_relative_to(SHARED))
        assert shared, "a server has shared memory"
        return cls(folder, family, shared)

    def process(self, name: str) -> psutil.Process:
        """`supervisor`, `main`, or what the process calls itself."""
        known = {"supervisor": self.family[0], "main": self.family[1]}
        return known.get(name) or next(one for one in self.family if name in " ".join(one.cmdline()))

    def left(self, patience: float = 5.0) -> list[str]:
        """What is still there after `patience` seconds at most."""
        deadline = time.monotonic() + patience
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        alive = [one for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        names = [pattern.format(one.pid) for one in self.family for pattern in NAMES]
        semaphores = [path for name in names for path in SHARED.glob(name)]
        # Empty folders of libraries that were killed, and their caches, are not looked at.
        caches = set(self.folder.glob("torchinductor_*"))
        inside = [path for path in self.folder.rglob("*") if not path.is_dir() and not caches & {*path.parents}]
        files = [*(path for path in self.shared if path.exists()), *semaphores, *inside]
        return [*(f"process {one.pid} {one.name()}" for one in (*alive, *self._orphans())), *map(str, files)]

    def _orphans(self) -> Iterator[psutil.Process]:
        for one in psutil.process_iter():
            try:
                if one.environ().get("TMPDIR") == str(self.folder) and one not in self.family:
                    yield one
            except psutil.Error:
                continue


@contextmanager
def mortal(
    model: Path, log: Path, flags: Sequence[str] = FLAGS, more: Mapping[str, str] | None = None
) -> Iterator[tuple[Served, Remains]]:
    """A server that the test will end, and its remains."""
    folder = Path(tempfile.mkdtemp(prefix="mortal-"))
    env = {"TMPDIR": str(folder), "OMP_WAIT_POLICY": "PASSIVE", **(more or {})}
    remains = None
    try:
        with serve(model, flags, log, env=env) as served:
            remains = Remains.of(served, folder)
            yield served, remains
    finally:
        for path in remains.shared if remains is not None else ():
            path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _mapped(pid: int) -> list[Path]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines() if os.path.exists(f"/proc/{pid}/maps") else []
    return [Path(line[line.index("/") :]) for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]
