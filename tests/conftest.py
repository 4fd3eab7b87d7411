"""The servers that tests share, each started once a session and only if a test asks for it.

`overlapped` is how people run it, with prefills cut small and mixed with decodes; `stepped` runs every step to its end
before the next. `paged` has pages of several slots; a test names the size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import SMALL, Served, serve
from tests.soak import tiny


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a card are left out where there is none."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        import torch

        if not torch.cuda.is_available():
            config.hook.pytest_deselected(items=needing)
            items[:] = [item for item in items if item not in needing]


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


@pytest.fixture(scope="session")
def paged(request: pytest.FixtureRequest, logs: Path) -> Iterator[Served]:
    """A server with pages of as many slots as the test's parameter says, with the soak run's tiny model and a small
    pool. Pages of 64 slots are served step by step, with requests retracted in the middle."""
    size = request.param
    cut = ("--page-size", str(size), "--chunked-prefill-size", str(max(size, 16)))
    how = ("--disable-overlap-schedule",) if size == 64 else ("--enable-mixed-chunk",)
    flags = (*SMALL, "--max-total-tokens", str(max(2048, 64 * size)), "--grammar-backend", "none", *cut, *how)
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"} if size == 64 else {}
    with serve(tiny.write(logs / "tiny"), flags, logs / f"pages-of-{size}.log", env=env) as served:
        yield served


@pytest.fixture(scope="session", params=["overlapped", "stepped"])
def served(request: pytest.FixtureRequest) -> Served:
    """Every way the scheduler can run, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def oracle_server(served: Served) -> Served:
    return served
