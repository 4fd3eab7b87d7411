"""One server at a time for the tests of a state's life, and what holds after each of them.

Nothing runs then, and every token of the pool is accounted for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.api import ok
from tests.life.fleet import Fleet
from tests.life.living import Live, asked_of, noise, same
from tests.soak import tiny

SERVERS = ("lively", "limited", "hasty", "shaken", "walled", "adapted")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server follow each other, so that it is started once."""
    mine = [at for at, item in enumerate(items) if "tests/life/" in item.path.as_posix()]
    order = sorted((items[at] for at in mine), key=_server)
    for at, item in zip(mine, order, strict=True):
        items[at] = item


def _server(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    return next((SERVERS.index(name) for name in SERVERS if name in names), len(SERVERS))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("life")
    fleet = Fleet(tiny.write(folder / "model"), folder)
    yield fleet
    fleet.stop()


def _checked(fleet: Fleet, name: str) -> Iterator[Live]:
    live = fleet.get(name)
    yield live
    assert live.process.poll() is None, f"the server died:\n{live.log[-4000:]}"
    stats = live.give_all_up()
    assert stats["states"] == stats["held_tokens"] == stats["evicted_tokens"] == 0, stats


@pytest.fixture
def lively(fleet: Fleet) -> Iterator[Live]:
    """Small chunks, prefills mixed with decodes, steps that overlap; states may leave memory."""
    yield from _checked(fleet, "lively")


@pytest.fixture
def limited(fleet: Fleet) -> Iterator[Live]:
    """Every limit is low, the pool is small, and states stay in memory."""
    yield from _checked(fleet, "limited")


@pytest.fixture
def hasty(fleet: Fleet) -> Iterator[Live]:
    """One request runs at a time, for 2.5 s at most; two wait, for 1.5 s at most."""
    yield from _checked(fleet, "hasty")


@pytest.fixture
def shaken(fleet: Fleet) -> Iterator[Live]:
    """Running requests are retracted every few steps; priorities preempt; admission can be broken (`faults.py`)."""
    yield from _checked(fleet, "shaken")


@pytest.fixture
def walled(fleet: Fleet) -> Iterator[Live]:
    """Only the keys of a file are let in; asked as the operator. States have a quarter of the pool, and stay in it."""
    yield from _checked(fleet, "walled")


@pytest.fixture
def adapted(fleet: Fleet) -> Iterator[Live]:
    """With LoRA adapters."""
    yield from _checked(fleet, "adapted")


@pytest.fixture
def parent(request: pytest.FixtureRequest) -> Iterator[str]:
    """A state that the test may use, and that must answer afterwards as it did before."""
    live: Live = request.getfixturevalue(next(name for name in SERVERS if name in request.fixturenames))
    state = ok(live, text=noise(1, 30), n=6)
    before = asked_of(live, state.id)
    yield state.id
    live.rest()
    assert live.listed() == {state.id}, "something else is left"
    same(asked_of(live, state.id), before)
