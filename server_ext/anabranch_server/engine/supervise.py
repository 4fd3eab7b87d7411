"""Runs the server as a child and cleans up after it, however it ends: processes, shared memory, temporary files.

SGLang's processes end each other by SIGKILL when one of them fails, so none of them can clean up itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 30.0
"""Seconds that a server which was told to stop may take."""
BEAT = 0.5
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOTES = "ANABRANCH_LEFTOVERS"
"""Names the file in which the server notes what has to be removed after it."""
PR_SET_CHILD_SUBREAPER = 36


def supervise(command: Sequence[str]) -> int:
    """Run `command` to its end. A signal to stop is passed on; returns the exit status."""
    notes, name = tempfile.mkstemp(prefix="anabranch-leftovers-")
    os.close(notes)
    if sys.platform == "linux":  # the server's processes become our children when their parents die, and we reap them
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, env={**os.environ, NOTES: name}, start_new_session=True)
    told: list[int] = []
    family: set[int] = set()

    def stop(number: int, frame: object) -> None:
        told.append(number)
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        status = _wait(server, told, family)
    finally:
        _clean(server.pid, Path(name), family)
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        return 0 if told[0] == signal.SIGTERM else 128 + told[0]
    if status < 0:
        print(
            f"anabranch serve: the server ended by {signal.Signals(-status).name}, because one of its processes died; "
            "the log above says which. Nothing of it is left running; start it again",
            file=sys.stderr,
        )
        return 1
    return status


def after_port_args(result: Any, cls: type, *args: Any, **kwargs: Any) -> None:
    """SGLang has chosen the names of its sockets and its shared memory, and leaves them behind: note them."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    if NOTES in os.environ:
        sockets = [name.removeprefix("ipc://") for name in vars(result).values() if str(name).startswith("ipc://")]
        with open(os.environ[NOTES], "a") as notes:
            notes.writelines(f"{path}\n" for path in [shm_path_for(result.instance_id), *sockets])


def _wait(server: subprocess.Popen[bytes], told: list[int], family: set[int]) -> int:
    waited, beats = 0.0, 0
    while True:
        if beats % 10 == 0:
            family |= _group(server.pid)
        beats += 1
        try:
            return server.wait(BEAT)
        except subprocess.TimeoutExpired:
            waited += BEAT if told else 0.0
            if waited >= PATIENCE:
                print(f"anabranch serve: it did not stop in {PATIENCE:g} s and is killed", file=sys.stderr)
                server.kill()


def _group(leader: int) -> set[int]:
    """The processes that the server has started and that are alive."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == leader:
                found.add(int(stat.parent.name))
    return found


def _clean(leader: int, notes: Path, family: set[int]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    for path in notes.read_text().splitlines():
        Path(path).unlink(missing_ok=True)
    for pid in family:
        # Semaphores that joblib, which SGLang imports, makes in each process; queues between tensor-parallel ranks.
        for name in (f"sem.loky-{pid}-*", f"sgl_shm_mq_{pid}_*"):
            for left in Path("/dev/shm").glob(name):
                left.unlink(missing_ok=True)
    notes.unlink()
