"""Settings: arguments, environment, defaults, and what is refused. Not what they do."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch import InvalidRequestError
from anabranch.config import Config, resolve


def test_configuration():
    assert resolve(environ={}) == Config("http://127.0.0.1:30000", None, 600.0, 5.0, 2)
    assert (resolve(environ={}).lease, resolve(environ={}).on_lost) == (300, "error")
    assert resolve(environ={"ANABRANCH_LEASE": "60"}).lease == 60
    assert resolve(lease=5, on_lost="rebuild", environ={"ANABRANCH_LEASE": "x"}).lease == 5
    with pytest.raises(InvalidRequestError, match="ANABRANCH_LEASE is 'soon'"):
        resolve(environ={"ANABRANCH_LEASE": "soon"})
    env = {"ANABRANCH_BASE_URL": "https://host:1/prefix/", "ANABRANCH_API_KEY": "k"}
    assert resolve(environ=env) == Config("https://host:1/prefix", "k", 600.0, 5.0, 2)
    assert resolve("http://other", api_key="x", timeout=2, max_retries=0, environ=env) == Config(
        "http://other", "x", 2, 2, 0
    )
    urls = ("localhost:30000", "ftp://x", "http://", "http://x:99999")
    others: list[dict[str, Any]] = [{"timeout": 0}, {"timeout": float("inf")}, {"max_retries": -1}, {"api_key": "a\nb"}]
    others += [{"lease": lease} for lease in (0, -1, float("inf"), float("nan"), 8 * 24 * 3600)] + [{"on_lost": "hope"}]
    for bad in [*({"base_url": url} for url in urls), *others]:
        with pytest.raises(InvalidRequestError):
            resolve(**bad, environ={})
