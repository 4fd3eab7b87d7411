"""Real servers for tests: start one, wait until it answers, stop it and all its processes.

It knows no test; the fixtures in conftest.py say which servers there are.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "ANABRANCH_DEBUG": "1",
    "HF_HUB_OFFLINE": "1",
}
SMALL = ("--max-total-tokens", "8192", "--max-running-requests", "32", "--log-level", "warning")
START_SECONDS = 600


@dataclass(frozen=True)
class Served:
    """A running server. `url` has no path; `log` is what it printed so far."""

    url: str
    model_dir: str
    log_file: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60)

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=300)

    def delete(self, path: str) -> httpx.Response:
        return httpx.delete(f"{self.url}{path}", timeout=60)

    def stats(self) -> dict[str, int]:
        return self.get("/anabranch/v1/stats").json()

    def release_all(self) -> dict[str, int]:
        """Release every state; returns the stats when nothing runs any more, the server's own warm-up included."""
        self._idle()
        for state in self.get("/anabranch/v1/states").json()["states"]:
            self.delete(f"/anabranch/v1/states/{state['id']}")
        return self._idle()

    def _idle(self) -> dict[str, int]:
        deadline = time.monotonic() + 60
        while (stats := self.stats())["running"] or stats["waiting"] or stats["in_use_tokens"]:
            assert time.monotonic() < deadline, f"requests never end: {stats}"
            time.sleep(0.05)
        return stats


@contextmanager
def serve(
    model_dir: Path,
    flags: Sequence[str],
    log_file: Path,
    *,
    command: Sequence[str] = ("-m", "anabranch.cli", "serve"),
    env: Mapping[str, str] | None = None,
    ready: str = "/anabranch/v1/health",
) -> Iterator[Served]:
    """Start a server with `flags` and stop it on leaving; fails with the end of its log if it does not come up."""
    port = free_port()
    words = [sys.executable, *command, "--model-path", str(model_dir), "--port", str(port), *flags]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            words, env={**os.environ, **STRICT, **(env or {})}, stdout=log, stderr=log, start_new_session=True
        )
    served = Served(f"http://127.0.0.1:{port}", str(model_dir), log_file, process)
    try:
        _wait_until_ready(served, ready)
        yield served
    finally:
        stop(process)


def _wait_until_ready(served: Served, path: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert served.process.poll() is None, f"the server ended while it started:\n{served.log[-4000:]}"
        try:
            if served.get(path).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server did not come up in {START_SECONDS} s:\n{served.log[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> list[int]:
    """End a server as an operator would; returns the ids of processes that had to be killed."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs([*family], timeout=30)
    for child in alive:
        child.kill()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    return [child.pid for child in alive]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
