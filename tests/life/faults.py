"""A plugin for SGLang that breaks our admission for requests whose input says so; for tests of what is left then.

It is installed as people install plugins: a folder on the path with an entry point.
"""

from __future__ import annotations

import os
from pathlib import Path

BEFORE, AFTER, CONTROL = [7, 7, 1], [7, 7, 2], "f" * 32
"""How the input of a request ends that breaks before, or after, its context is opened; and the state whose mention
breaks a question."""
ENTRY = "[sglang.srt.plugins]\nlife_faults = life_faults:activate\n"


def plugin(folder: Path) -> dict[str, str]:
    """Write the plugin into `folder`; returns the environment that makes a server load it."""
    info = folder / "life_faults-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: life_faults\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    (folder / "life_faults.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SGLANG_PLUGINS": "anabranch,anabranch_cpu,life_faults"}


def activate() -> None:
    """Called by SGLang in each of its processes."""
    from anabranch_server.engine import admission, control

    admit, info = admission._admit, control.OPERATIONS["info"]

    def break_admission(scheduler, cache, received, *more):
        end = list(received.input_ids[-3:])
        if end == BEFORE:
            raise RuntimeError("broken on purpose, before")
        run = admit(scheduler, cache, received, *more)
        if end == AFTER:
            raise RuntimeError("broken on purpose, after")
        return run

    def break_question(scheduler, cache, tenant, id):
        if id == CONTROL:
            raise RuntimeError("broken on purpose, in a question")
        return info(scheduler, cache, tenant, id)

    admission._admit = break_admission
    control.OPERATIONS["info"] = break_question
