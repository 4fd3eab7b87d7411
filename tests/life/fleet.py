"""The servers of these tests: which there are, and one at a time, because each needs a gigabyte and a core.

It knows no test. All serve the tiny model of the soak run, with every check of ours and of SGLang's switched on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.adapters import UNPINNED, make_adapter
from tests.life import faults
from tests.life.living import Live
from tests.serving import serve

POOL = 4096
COMMON = ("--log-level", "warning", "--max-total-tokens", str(POOL), "--max-running-requests", "8")
CHUNKED = ("--chunked-prefill-size", "16", "--enable-mixed-chunk")
KEYS = {"alice": "alice-secret-4711", "bob": "bob-secret-4712", "operator": "operator-secret-4713"}
"""Of the walled server: names and keys."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a server is started with beside what all are."""

    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    """The operator's."""

    @property
    def ready(self) -> str:
        """What answers without a key."""
        return "/anabranch/v1/health" if self.key is None else "/health"


def settings(folder: Path) -> dict[str, Setting]:
    """By name. `folder` has the model, and keeps the files that they need."""
    keys = folder / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    return {
        "lively": Setting(CHUNKED),
        "limited": Setting(
            (
                *("--max-total-tokens", "600", "--anabranch-evict", "0", "--schedule-conservativeness", "0.1"),
                *("--anabranch-max-states", "12", "--anabranch-max-held-tokens", "400"),
                *("--anabranch-max-unfinished", "5"),
                *("--anabranch-default-lease", "60", "--anabranch-max-lease", "120"),
            )
        ),
        "hasty": Setting(
            ("--max-running-requests", "1", "--max-queued-requests", "2", "--skip-server-warmup"),
            {"SGLANG_REQ_WAITING_TIMEOUT": "1.5", "SGLANG_REQ_RUNNING_TIMEOUT": "2.5"},
        ),
        "shaken": Setting(
            (
                *("--disable-overlap-schedule", "--max-running-requests", "4", "--enable-priority-scheduling"),
                *("--default-priority-value", "0"),
            ),
            {"SGLANG_TEST_RETRACT": "1", **faults.plugin(folder / "faults")},
        ),
        "adapted": _adapted(folder),
        "walled": Setting(
            (
                *("--anabranch-api-keys-file", str(keys), "--enable-metrics"),
                *("--anabranch-evict", "0", "--anabranch-pinned-share", "0.25"),
            ),
            key=KEYS["operator"],
        ),
    }


def _adapted(folder: Path) -> Setting:
    """Serves two adapters, `calm` and `bold`; a third, `other`, can be loaded. Some names are declared as
    readers of others, for whatever is loaded under them."""
    (adapters := folder / "adapters").mkdir()
    (adapters / "sitecustomize.py").write_text(UNPINNED)
    config = json.loads((folder / "model" / "config.json").read_text())
    for seed, name in enumerate(("calm", "bold", "other")):
        make_adapter(adapters / name, seed, config)
    flags = ("--disable-overlap-schedule", "--enable-lora", "--lora-backend", "torch_native", "--lora-paths")
    served = (f"calm={adapters / 'calm'}", f"bold={adapters / 'bold'}")
    declared = ("--anabranch-adapter-reads", "lenient:base,calm;calm:lenient,again,gone;again:calm")
    path = os.pathsep.join(filter(None, (str(adapters), os.environ.get("PYTHONPATH"))))
    return Setting((*flags, *served, *declared), {"PYTHONPATH": path})


class Fleet:
    """Starts the server that is asked for, and stops the one before it."""

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder = model, folder
        self.settings = settings(folder)
        self._name = ""
        self._live: Live | None = None
        self._running = ExitStack()

    def get(self, name: str) -> Live:
        if self._live is None or self._name != name or self._live.process.poll() is not None:
            self.stop()
            setting = self.settings[name]
            env = {"OMP_WAIT_POLICY": "PASSIVE", **setting.env}
            flags = (*COMMON, *setting.flags)
            starting = serve(self.model, flags, self.folder / f"{name}.log", env=env, ready=setting.ready)
            served = self._running.enter_context(starting)
            self._live = Live.of(served, setting.key)
            self._running.callback(self._live.close)
            self._name = name
            self._live.warm_up()
        return self._live

    def stop(self) -> None:
        self._running.close()
        self._live = None
