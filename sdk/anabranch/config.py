"""Where the server is and how patiently it is asked: arguments first, then environment, then defaults.

It opens no connection.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from anabranch.errors import InvalidRequestError

DEFAULT_BASE_URL = "http://127.0.0.1:30000"
DEFAULT_TIMEOUT = 600.0
CONNECT_TIMEOUT = 5.0
MAX_RETRIES = 2
FIRST_BACKOFF = 0.5
LAST_BACKOFF = 8.0
LONGEST_RETRY_AFTER = 60.0


@dataclass(frozen=True, slots=True)
class Config:
    """Connection settings. Times in seconds; `timeout` bounds the wait for an answer, or for a stream's next event."""

    base_url: str = DEFAULT_BASE_URL
    api_key: str | None = field(default=None, repr=False)
    timeout: float = DEFAULT_TIMEOUT
    connect_timeout: float = CONNECT_TIMEOUT
    max_retries: int = MAX_RETRIES

    @property
    def loopback(self) -> bool:
        return urlsplit(self.base_url).hostname in ("127.0.0.1", "localhost", "::1")


def resolve(
    base_url: str | None = None,
    *,
    api_key: str | None = None,
    timeout: float | None = None,
    max_retries: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Settings from arguments, `ANABRANCH_BASE_URL` and `ANABRANCH_API_KEY`, and defaults, in this order.

    Raises InvalidRequestError for a URL that is not http(s), a time that is not positive, a key that no header can
    carry.
    """
    env = os.environ if environ is None else environ
    url = (base_url or env.get("ANABRANCH_BASE_URL") or DEFAULT_BASE_URL).strip().rstrip("/")
    key = api_key or env.get("ANABRANCH_API_KEY") or None
    seconds = DEFAULT_TIMEOUT if timeout is None else timeout
    retries = MAX_RETRIES if max_retries is None else max_retries
    _check_url(url)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InvalidRequestError("the API key has characters that no HTTP header can carry", param="api_key")
    check_timeout(seconds)
    if retries < 0:
        raise InvalidRequestError(f"max_retries is {retries}; 0 turns retries off", param="max_retries")
    return Config(url, key, seconds, min(CONNECT_TIMEOUT, seconds), retries)


def check_timeout(seconds: float) -> None:
    """Raise InvalidRequestError unless `seconds` is a positive, finite time."""
    if not (seconds > 0 and math.isfinite(seconds)):
        raise InvalidRequestError(f"timeout is {seconds}; it must be a positive number of seconds", param="timeout")


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
