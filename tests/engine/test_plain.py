"""Requests without a DAG: the same answers and the same cache hits as SGLang without us, whatever states exist."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.api import inherit, ok
from tests.serving import Served

pytestmark = pytest.mark.engine

PROMPTS = ("The capital of France is", "The capital of France is Paris, and the capital of Italy is", "def add(a, b):")


def plain(served: Served, text: str, n: int = 6) -> tuple[str, int]:
    """The text, and how many tokens came from the prefix cache."""
    answer = served.post("/generate", text=text, sampling_params={"max_new_tokens": n, "temperature": 0}).json()
    return answer["text"], answer["meta_info"]["cached_tokens"]


@pytest.fixture(scope="module")
def expected(unextended: Served) -> list[Any]:
    """Each prompt twice, on SGLang as it comes."""
    unextended.post("/flush_cache")  # what its warm-up left
    return [plain(unextended, prompt) for prompt in (*PROMPTS, *PROMPTS)]


def test_answers_and_cache_hits_are_those_of_sglang_without_us(stepped: Served, expected: list[Any]):
    stepped.post("/flush_cache")
    assert [plain(stepped, prompt) for prompt in (*PROMPTS, *PROMPTS)] == expected
    assert expected[3][1] > 0, "the second time a prompt comes it is cached"


def test_a_joined_context_never_serves_a_plain_prompt(stepped: Served, expected: list[Any]):
    """The same text as a plain prompt has other KV: it was computed under another mask, at other positions."""
    stepped.post("/flush_cache")
    left, right = ok(stepped, text="The capital of France is Paris,"), ok(stepped, text=" and the capital of Italy is")
    ok(stepped, [inherit(left.id), inherit(right.id)], " Rome", 4)
    assert plain(stepped, PROMPTS[1]) == (expected[1][0], 0)
    assert plain(stepped, "The capital of France is Paris, and the capital of Italy is Rome")[1] <= 14


def test_plain_requests_beside_states_are_undisturbed(stepped: Served, expected: list[Any]):
    root = ok(stepped, text=PROMPTS[0])
    ok(stepped, [inherit(root.id)], " Lyon", 3, place={"start": 100})
    assert plain(stepped, PROMPTS[0])[0] == expected[0][0]
    assert plain(stepped, PROMPTS[2])[0] == expected[2][0]
