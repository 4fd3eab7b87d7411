"""Which failures are tried again, and after how long; with a clock that does not run. Not HTTP (test_transport.py)."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch import APIConnectionError, APITimeoutError, InternalError, PoolExhaustedError, RateLimitedError
from anabranch.retry import Retrying


class Failing:
    """Fails with these errors, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def request(self, *_: Any, **__: Any) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "well"

    stream: Any = request

    async def aclose(self) -> None: ...


async def pauses(*errors: Exception, method: str = "POST", retries: int = 9, chance: float = 0.0) -> list[float]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    retrying = Retrying(Failing(*errors), max_retries=retries, sleep=sleep, chance=lambda: chance)
    if method == "stream":
        assert await retrying.stream("/x", {}) == "well"
    else:
        assert await retrying.request(method, "/x") == "well"
    return slept


def busy(retry_after: float | None = None) -> PoolExhaustedError:
    return PoolExhaustedError("full", status=503, retry_after=retry_after)


async def test_backoff_doubles_up_to_eight_seconds():
    assert await pauses(*(busy() for _ in range(7))) == [0.5, 1, 2, 4, 8, 8, 8]


async def test_jitter_only_shortens_by_up_to_a_quarter():
    assert await pauses(busy(), busy(), chance=1.0) == [0.375, 0.75]


@pytest.mark.parametrize("method", ["POST", "GET", "stream"])
async def test_what_was_not_sent_is_tried_again(method: str):
    unsent = (APIConnectionError("refused", sent=False), APITimeoutError("no connection", sent=False))
    assert await pauses(*unsent, method=method) == [0.5, 1]


async def test_retry_after_goes_before_backoff():
    assert await pauses(busy(3), RateLimitedError("slow", status=429, retry_after=0)) == [3, 0]
    with pytest.raises(PoolExhaustedError):
        await pauses(busy(3600))


async def test_no_more_than_max_retries():
    assert len(await pauses(busy(), busy(), retries=2)) == 2
    with pytest.raises(PoolExhaustedError):
        await pauses(busy(), busy(), busy(), retries=2)
    with pytest.raises(PoolExhaustedError):
        await pauses(busy(), retries=0)


@pytest.mark.parametrize("method", ["POST", "GET", "stream"])
async def test_what_was_lost_on_the_way_is_tried_again(method: str):
    """A repeated generate attaches to the first: it names its state."""
    lost = (APIConnectionError("lost"), InternalError("gateway", status=502), InternalError("gateway", status=504))
    assert await pauses(*lost, method=method) == [0.5, 1, 2]


@pytest.mark.parametrize("method", ["POST", "GET", "stream"])
@pytest.mark.parametrize("error", [APITimeoutError("late"), InternalError("oops", status=500)])
async def test_what_took_too_long_or_failed_is_final(method: str, error: Exception):
    with pytest.raises(type(error)):
        await pauses(error, method=method)


async def test_errors_that_are_not_ours_pass():
    with pytest.raises(ZeroDivisionError):
        await pauses(ZeroDivisionError())
