"""What the tests of the server's core share. No server is started here."""

from __future__ import annotations

import pytest

from tests.server.pool import Pool


@pytest.fixture
def pool() -> Pool:
    return Pool()
