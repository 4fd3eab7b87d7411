"""Fixtures of the SDK's tests: a fake server, a client of it, and a server whose requests can be held up.

No test here needs a model or a network beyond the loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from anabranch import AsyncClient
from anabranch.testing import FakeServer
from anabranch.transport import Body


class HeldServer(FakeServer):
    """A FakeServer that answers only while `gate` is set, so that requests overlap for sure."""

    def __init__(self, reply: Any = "ok") -> None:
        super().__init__(reply)
        self.gate = asyncio.Event()

    async def request(self, method: str, path: str, body: Body | None = None, *, timeout: float | None = None) -> Any:
        self.requests.append((method, path, body))
        await self.gate.wait()
        self.requests.remove((method, path, body))
        return await super().request(method, path, body, timeout=timeout)

    async def until(self, requests: int) -> None:
        """Wait until so many requests are held up, and give further ones a chance to arrive."""
        async with asyncio.timeout(5):
            while len(self.requests) < requests:  # noqa: ASYNC110 (nothing sets an event for it)
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer("one two three four")


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


@pytest.fixture
def held() -> HeldServer:
    return HeldServer("one two three four")
