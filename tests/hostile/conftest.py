"""The server that hostile tests share: a tiny model, small limits, every check switched on; and what must hold after.

A test of it names the fixture `besieged`. Tests that kill a server start their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.aftermath import Answer, empty, settled
from tests.serving import Served, serve
from tests.soak import tiny

FLAGS = (
    *("--max-total-tokens", "16384", "--context-length", "256", "--max-running-requests", "64"),
    *("--log-level", "warning", "--enable-mixed-chunk", "--chunked-prefill-size", "64"),
)
ENV = {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def siege(tiny_model: Path, logs: Path) -> Iterator[tuple[Served, Answer]]:
    """The server, and what it answered to a normal question before anybody was hostile."""
    with serve(tiny_model, FLAGS, logs / "besieged.log", env=ENV) as served:
        before = Answer.of(served)
        empty(served)
        yield served, before


@pytest.fixture
def besieged(siege: tuple[Served, Answer]) -> Iterator[Served]:
    served, before = siege
    begun = len(served.log)
    yield served
    settled(served, before, served.log[begun:])
