"""The servers that tests share, each started once a session and only if a test asks for it.

`overlapped` is how people run it, with prefills cut small and mixed with decodes; `stepped` runs every step to its end
before the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import SMALL, Served, serve


@pytest.fixture(scope="session")
def model_dir() -> Path:
    from anabranch_server.pull import pull

    return pull("smollm2")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def overlapped(model_dir: Path, logs: Path) -> Iterator[Served]:
    flags = (*SMALL, "--chunked-prefill-size", "16", "--enable-mixed-chunk")
    with serve(model_dir, flags, logs / "overlapped.log") as served:
        yield served


@pytest.fixture(scope="session")
def stepped(model_dir: Path, logs: Path) -> Iterator[Served]:
    flags = (*SMALL, "--disable-overlap-schedule")
    with serve(model_dir, flags, logs / "stepped.log") as served:
        yield served


@pytest.fixture(scope="module")
def unextended(model_dir: Path, logs: Path) -> Iterator[Served]:
    """SGLang without our plugin; only the platform that lets it run on a CPU."""
    flags = (*SMALL, "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native")
    flags += ("--disable-cuda-graph", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.8")
    with serve(
        model_dir,
        (*flags, "--sleep-on-idle"),
        logs / "unextended.log",
        command=("-m", "sglang.launch_server"),
        env={"SGLANG_PLUGINS": "anabranch_cpu"},
        ready="/health",
    ) as served:
        yield served


@pytest.fixture(scope="session", params=["overlapped", "stepped"])
def served(request: pytest.FixtureRequest) -> Served:
    """Every way the scheduler can run, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def oracle_server(served: Served) -> Served:
    return served
