"""A process for each kernel: one that reads where nothing is, or never ends, must not take the others with it.

It knows nothing of what they do.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Line = dict[str, Any]


class Process:
    """A command that prints JSON lines, and begins with its work when it is told to."""

    def __init__(self, *command: str) -> None:
        self.log = Path(tempfile.mkstemp(prefix="anabranch-kernels-", suffix=".log")[1])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def turn(self, seconds: float, silence: float) -> Iterator[Line]:
        """Tell it to begin; all that it says until it ends, or is ended: after `seconds`, or if it says nothing for
        `silence` seconds, because a kernel may never end. The last line says how, if that was not as it should be."""
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.close()
        ended: str | None = None
        last: Line = {}
        end = time.monotonic() + seconds
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()
        while True:
            left = end - time.monotonic()
            try:
                line = lines.get(timeout=max(0.0, min(silence, left)))
            except queue.Empty:
                ended = f"took more than {seconds:.0f} s" if left < silence else f"silent for {silence:.0f} s"
                self.process.kill()
                break
            if line is None:
                break
            if line.startswith("{"):
                last = json.loads(line)
                yield last
        code = self.process.wait()
        if ended:
            yield {"ended": f"{ended} after {json.dumps(last)}"[:300]}
        elif code:
            said = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            yield {"ended": f"exit code {code}: {''.join(said[-1:])}"[:300]}
        self.log.unlink()

    def _listen(self, lines: queue.Queue[str | None]) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            lines.put(line)
        lines.put(None)


def wait() -> None:
    """In the process: until it is its turn."""
    sys.stdin.readline()


def say(**what: Any) -> None:
    """In the process."""
    print(json.dumps(what), flush=True)
