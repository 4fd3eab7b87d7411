"""After every test of a real server: nothing runs, nothing is held, and every token of the pool is accounted for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Served


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("overlapped", "stepped"):
        if name not in request.fixturenames and "served" not in request.fixturenames:
            continue
        server = request.getfixturevalue("served" if "served" in request.fixturenames else name)
        assert isinstance(server, Served)
        stats = server.release_all()
        assert server.process.poll() is None, f"the server died:\n{server.log[-4000:]}"
        assert stats["states"] == stats["held_tokens"] == stats["in_use_tokens"] == 0, stats
        assert stats["free_tokens"] + stats["evictable_tokens"] == stats["total_tokens"], stats
        break
