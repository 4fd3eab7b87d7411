"""Where the server is, how patiently it is asked, how long it keeps: arguments, then environment, then defaults.

It opens no connection.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from anabranch.errors import InvalidRequestError
from anabranch.wire import MAX_LEASE

OnLost: TypeAlias = Literal["error", "rebuild"]

DEFAULT_BASE_URL = "http://127.0.0.1:30000"
DEFAULT_TIMEOUT = 600.0
CONNECT_TIMEOUT = 5.0
DEFAULT_LEASE = 300.0
MAX_RETRIES = 2
FIRST_BACKOFF = 0.5
LAST_BACKOFF = 8.0
LONGEST_RETRY_AFTER = 60.0


@dataclass(frozen=True, slots=True)
class Config:
    """A client's settings. Times in seconds; `timeout` bounds the wait for an answer, or for a stream's next event;
    `lease` is how long the server keeps a state that is neither used nor renewed."""

    base_url: str = DEFAULT_BASE_URL
    api_key: str | None = field(default=None, repr=False)
    timeout: float = DEFAULT_TIMEOUT
    connect_timeout: float = CONNECT_TIMEOUT
    max_retries: int = MAX_RETRIES
    lease: float = DEFAULT_LEASE
    on_lost: OnLost = "error"

    @property
    def loopback(self) -> bool:
        return urlsplit(self.base_url).hostname in ("127.0.0.1", "localhost", "::1")


def resolve(
    base_url: str | None = None,
    *,
    api_key: str | None = None,
    timeout: float | None = None,
    max_retries: int | None = None,
    lease: float | None = None,
    on_lost: OnLost = "error",
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Settings from arguments, `ANABRANCH_BASE_URL`, `ANABRANCH_API_KEY` and `ANABRANCH_LEASE`, and defaults, in this
    order.

    Raises InvalidRequestError for a URL that is not http(s), a time that is not positive, a key that no header can
    carry.
    """
    env = os.environ if environ is None else environ
    url = (base_url or env.get("ANABRANCH_BASE_URL") or DEFAULT_BASE_URL).strip().rstrip("/")
    key = api_key or env.get("ANABRANCH_API_KEY") or None
    seconds = DEFAULT_TIMEOUT if timeout is None else timeout
    retries = MAX_RETRIES if max_retries is None else max_retries
    kept = _lease(env.get("ANABRANCH_LEASE")) if lease is None else lease
    _check_url(url)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InvalidRequestError("the API key has characters that no HTTP header can carry", param="api_key")
    check_timeout(seconds)
    if retries < 0:
        raise InvalidRequestError(f"max_retries is {retries}; 0 turns retries off", param="max_retries")
    check_lease(kept)
    if on_lost not in ("error", "rebuild"):
        raise InvalidRequestError(f"on_lost is {on_lost!r}", param="on_lost", hint='"error" or "rebuild"')
    return Config(url, key, seconds, min(CONNECT_TIMEOUT, seconds), retries, kept, on_lost)


def check_lease(seconds: float) -> None:
    """Raise InvalidRequestError unless `seconds` is a positive time of at most a week."""
    if not 0 < seconds <= MAX_LEASE:
        raise InvalidRequestError(
            f"lease is {seconds}; it must be a positive number of seconds, at most {MAX_LEASE:g}", param="lease"
        )


def check_timeout(seconds: float) -> None:
    """Raise InvalidRequestError unless `seconds` is a positive, finite time."""
    if not (seconds > 0 and math.isfinite(seconds)):
        raise InvalidRequestError(f"timeout is {seconds}; it must be a positive number of seconds", param="timeout")


def _lease(text: str | None) -> float:
    try:
        return float(text) if text else DEFAULT_LEASE
    except ValueError:
        raise InvalidRequestError(f"ANABRANCH_LEASE is {text!r}, not a number of seconds", param="lease") from None


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequestError(
            f"{url!r} is not a server's address", param="base_url", hint=f"for example {DEFAULT_BASE_URL}"
        )
