"""Retries, as a transport around a transport: which failures are tried again, and after how long.

It sends nothing itself. Every request may be repeated: a generate names its state, so that the server knows it again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from anabranch.config import FIRST_BACKOFF, LAST_BACKOFF, LONGEST_RETRY_AFTER, MAX_RETRIES
from anabranch.errors import AnabranchError, APIConnectionError, APIStatusError, APITimeoutError
from anabranch.transport import Body, EventStream, Transport

T = TypeVar("T")

RETRIED = frozenset({429, 502, 503, 504})
"""The server refused before it began (429, 503), or something between lost the answer."""


class Retrying:
    """Tries again after a failed connect, a lost connection, and status 429, 502, 503 or 504.

    A generate that is repeated has the same id and body: the server attaches it to the first, or returns its result.
    It waits as long as Retry-After says (more than a minute: the error is raised at once), else 0.5 s, doubled each
    time up to 8 s, minus up to a quarter at random. A stream is retried only until the server begins to answer. An
    answer that did not come in time is not waited for again: the caller has said how long is long enough.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        max_retries: int = MAX_RETRIES,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._max_retries = max_retries
        self._sleep = sleep
        self._chance = chance

    async def request(self, method: str, path: str, body: Body | None = None, *, timeout: float | None = None) -> Any:
        return await self._run(lambda: self._inner.request(method, path, body, timeout=timeout))

    async def stream(self, path: str, body: Body, *, timeout: float | None = None) -> EventStream:
        return await self._run(lambda: self._inner.stream(path, body, timeout=timeout))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        failures = 0
        while True:
            try:
                return await attempt()
            except AnabranchError as error:
                pause = self._pause(error, failures)
                if failures >= self._max_retries or pause is None:
                    raise
            failures += 1
            await self._sleep(pause)

    def _pause(self, error: AnabranchError, failures: int) -> float | None:
        """Seconds to wait before the next attempt; None: this error is final."""
        backoff = min(FIRST_BACKOFF * 2 ** min(failures, 16), LAST_BACKOFF) * (1 - 0.25 * self._chance())
        if isinstance(error, APIStatusError) and error.status in RETRIED:
            if error.retry_after is None:
                return backoff
            return error.retry_after if error.retry_after <= LONGEST_RETRY_AFTER else None
        if isinstance(error, APIConnectionError):
            late = isinstance(error, APITimeoutError) and error.sent
            return None if late else backoff
        return None
