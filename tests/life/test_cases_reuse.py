"""Failures that users of systems like this reported, as tests: correctness of reuse, and positions (CASES.md).

What a kernel or the compiler alone can get wrong is in tests/kernels and tests/server.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anabranch import wire
from tests.engine.api import artifact, inherit, ok
from tests.life.living import LOGPROBS, TOLERANCE, Live, noise, same

pytestmark = pytest.mark.engine

QUESTION = [65, 66, 67]


def _asked(live: Live, refs: Sequence[dict], own: Sequence[int] = QUESTION, **more) -> wire.GenerateResponse:
    return ok(live, refs, own, 8, keep=False, sampling=LOGPROBS, **more)


def _apart(one: wire.GenerateResponse, other: wire.GenerateResponse) -> float:
    """The largest difference of a logprob that both report, up to the first token in which they differ."""
    assert one.logprobs and other.logprobs
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max(abs(a - dict(theirs.top).get(token, a)) for mine, theirs in pairs for token, a in mine.top)


def test_vllm_5543_42699_40896_cold_warm_forked_joined_and_rebuilt_agree(lively: Live):
    """Cached and uncached answers differed. The same question, with its context computed now, found, forked, joined
    from parts, and computed again after it left memory: no greedy flip, and the largest difference is told."""
    context = noise(31, 90)
    cold = _asked(lively, (), [*context, *QUESTION])
    whole, first = ok(lively, text=context), ok(lively, text=context[:37])
    rest = ok(lively, [inherit(first.id)], context[37:])
    fork = ok(lively, [inherit(rest.id)], QUESTION[:1])
    found = {
        "cold again": _asked(lively, (), [*context, *QUESTION]),
        "warm": _asked(lively, [inherit(whole.id)]),
        "forked": _asked(lively, [inherit(fork.id)], QUESTION[1:]),
        "joined": _asked(lively, [inherit(first.id), inherit(rest.id)]),
        "joined from spans": _asked(lively, [inherit(whole.id, upto=50), artifact(whole.id, span=(50, 90))]),
    }
    assert lively.flush().status_code == 200
    assert not lively.info(rest.id).json()["resident"]
    found["rebuilt"] = _asked(lively, [inherit(first.id), inherit(rest.id)])
    largest = {name: _apart(cold, one) for name, one in found.items()}
    flips = {name: sum(a != b for a, b in zip(cold.tokens, one.tokens, strict=True)) for name, one in found.items()}
    print(f"largest difference of a logprob: {largest}; greedy flips: {flips}; tolerance {TOLERANCE}")
    assert set(flips.values()) == {0}, flips
    assert max(largest.values()) <= TOLERANCE, largest


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 31, 32, 33, 63])
def test_tenstorrent_415_a_prefill_that_resumes_from_kv_at_any_token(lively: Live, cut: int):
    """Chunks are 16 tokens here: resuming before, at, and after their borders, with more than a chunk to come."""
    tokens = noise(32, 64)
    parent = ok(lively, text=tokens)
    resumed = _asked(lively, [inherit(parent.id, upto=cut)], [*tokens[cut:], *QUESTION])
    same(resumed, _asked(lively, (), [*tokens, *QUESTION]))
    assert (resumed.usage.reused_tokens, resumed.usage.computed_tokens) == (cut, 64 - cut + 3)


def test_llama_cpp_3825_4097_a_hundred_replacements_equal_one(lively: Live):
    """Two shifts kept only the last, and many made answers worse. A state that is placed again by each of its
    descendants is seen where the last one puts it, as if it had been placed once."""
    first, second = ok(lively, text=noise(33, 20)), ok(lively, text=noise(34, 24))
    once = ok(lively, [inherit(first.id, base=0), inherit(second.id, base=500)], [65], place={"start": 600})
    moved = ok(lively, [inherit(first.id, base=7), inherit(second.id, base=90)], [65], place={"start": 200})
    for i in range(99):
        refs = [inherit(first.id, base=3 * i), inherit(second.id, base=100 + 5 * i), artifact(moved.id, span=(0, 1))]
        moved = ok(lively, refs, [65], place={"start": 800})
    last = ok(lively, [inherit(first.id, base=0), inherit(second.id, base=500)], [65], place={"start": 600})
    same(_asked(lively, [inherit(last.id)]), _asked(lively, [inherit(once.id)]))
    told = wire.Explanation.model_validate(lively.post("/anabranch/v1/explain", id=last.id).json())
    assert [(one.native, one.effective) for one in told.intervals] == [(0, 0), (0, 500)]


def test_llama_cpp_4097_a_state_that_is_moved_on_and_on(lively: Live):
    """Each descendant sees the same 20 tokens ten positions further on: the sum of the shifts, not their rounding."""
    root = ok(lively, text=noise(35, 20))
    state = root
    for i in range(1, 101):
        state = ok(lively, [inherit(state.id, base=10 * i)], [65], place={"start": 10 * i + 40}, keep=True)
    far = ok(lively, [inherit(root.id, base=1000)], [65], place={"start": 1040})
    told = [
        wire.Explanation.model_validate(lively.post("/anabranch/v1/explain", id=one.id).json()) for one in (far, state)
    ]
    assert [(one.native, one.effective) for one in told[0].intervals] == [(0, 1000)]
    assert [one.effective for one in told[1].intervals if one.state == root.id] == [1000]


def test_cacheblend_6_explain_prints_native_and_effective_positions(lively: Live):
    """Nobody could tell which positions a reused chunk had."""
    a, b = ok(lively, text=noise(36, 10)), ok(lively, text=noise(37, 6))
    spec = {"refs": [inherit(a.id), artifact(b.id, span=(2, 6))], "place": "concat"}
    told = wire.Explanation.model_validate(lively.post("/anabranch/v1/explain", spec=spec).json())
    assert [(one.state, one.native, one.effective) for one in told.intervals] == [(a.id, 0, 0), (b.id, 2, 10)]
    assert (told.start, told.context_tokens) == (14, 14)
