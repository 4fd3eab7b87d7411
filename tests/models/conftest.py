"""One server at a time for each tiny model; it stops when the tests of that model are over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny
from tests.serving import SMALL, Served, serve

IN_CI = ("llama-yarn", "qwen3", "glm4")
"""Between them: scaled frequencies and scaled cosines, QK-norm, a partial and interleaved rotation. A server takes a
minute to start, so the others are slow."""
MODELS = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in sorted(tiny.SUPPORTED)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one supported model."""
    return tiny.write(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def served_model(model: Path, logs: Path) -> Iterator[Served]:
    flags = (*SMALL, "--chunked-prefill-size", "16", "--enable-mixed-chunk")
    with serve(model, flags, logs / f"{model.name}.log") as served:
        yield served
