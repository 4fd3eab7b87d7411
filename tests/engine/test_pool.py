"""A pool that states have filled: what cannot run is refused with a typed error, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.api import body, error, ok, send
from tests.serving import SMALL, Served, serve

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def crowded(model_dir: Path, logs: Path) -> Iterator[Served]:
    """A server whose pool has 600 tokens, and whose states stay in memory."""
    with serve(
        model_dir, (*SMALL, "--max-total-tokens", "600", "--anabranch-evict", "0"), logs / "crowded.log"
    ) as served:
        yield served
        assert served.release_all()["free_tokens"] > 0


def test_what_does_not_fit_beside_held_states_is_refused_at_once(crowded: Served):
    ok(crowded, text=[300] * 400)
    answer = send(crowded, **body(text=[301] * 100, n=120))
    assert error(answer).code == "pool_exhausted"
    assert answer.headers["retry-after"]
    assert ok(crowded, text=[301] * 20, n=2).usage.generated_tokens == 2
    crowded.release_all()
    assert send(crowded, **body(text=[301] * 100, n=120)).status_code == 200
    crowded.release_all()


def test_requests_that_fitted_when_they_came_do_not_wait_for_ever(crowded: Served):
    """Each of twelve fits alone; those that finish hold what the others need."""
    bodies = [body(text=[300 + i] * 60, n=30) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda one: send(crowded, **one), bodies))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 503}, codes
    assert 4 <= codes.count(200) <= 6
    crowded.release_all()


def test_a_plain_request_that_does_not_fit_is_refused_too(crowded: Served):
    ok(crowded, text=[300] * 400)
    plain = {"input_ids": [301] * 100, "sampling_params": {"max_new_tokens": 120, "temperature": 0}}
    answer = crowded.post("/generate", **plain)
    assert answer.status_code == 503
    assert "pool_exhausted" in answer.text
    crowded.release_all()
    assert crowded.post("/generate", **plain).status_code == 200
