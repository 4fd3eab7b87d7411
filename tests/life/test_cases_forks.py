"""Failures that users of systems like this reported, as tests: fork and branch (CASES.md).

Rewinding at page sizes over 1: tests/engine/test_pages.py.
"""

from __future__ import annotations

from statistics import median

import pytest

from tests.engine.api import body, inherit, ok, together
from tests.life.living import LOGPROBS, Live, asked_of, begin, begun, decoding, noise, parsed, same

pytestmark = pytest.mark.engine


def test_claude_code_77306_a_fork_keeps_the_parents_cache(lively: Live):
    """A forked conversation was computed anew from its start. The child's prefill is its own suffix only, and `usage`
    says so; also of a fork of a fork, of one at an earlier token, and of many at once."""
    long = ok(lively, text=noise(1, 1000), n=5)
    child = ok(lively, [inherit(long.id)], noise(2, 7), 3)
    assert (child.usage.context_tokens, child.usage.reused_tokens, child.usage.computed_tokens) == (1005, 1005, 7)
    deeper = ok(lively, [inherit(child.id)], noise(3, 4), 1)
    assert (deeper.usage.reused_tokens, deeper.usage.computed_tokens) == (1015, 4)
    earlier = ok(lively, [inherit(long.id, upto=600)], noise(4, 2), 1)
    assert (earlier.usage.reused_tokens, earlier.usage.computed_tokens) == (600, 2)
    many = together(lively, [body([inherit(long.id)], noise(i, 3), 1) for i in range(8)])
    assert {(one.usage.reused_tokens, one.usage.computed_tokens) for one in many} == {(1005, 3)}


def test_librefang_4291_a_fork_of_what_is_being_continued_sees_the_snapshot(lively: Live):
    """A fork read an id whose meaning moved on. Fork while the parent is being continued: the child sees the parent
    as it was, and the continuation is not seen by it."""
    root = ok(lively, text=noise(5, 40), n=4)
    alone = asked_of(lively, root.id)
    with decoding(lively, body([inherit(root.id)], [65], 300)):
        forks = [asked_of(lively, root.id) for _ in range(3)]
    for fork in forks:
        same(fork, alone)
        assert fork.usage.context_tokens == 44


def test_sglang_22393_rewind_to_every_token(lively: Live):
    """Going back lost or doubled tokens at page borders. Fork at every token of a state, inside its input and inside
    what it generated: the same as never having gone further."""
    tokens = noise(6, 20)
    state = ok(lively, text=tokens, n=13)
    tokens += state.tokens
    for k in range(len(tokens) + 1):
        rewound = ok(lively, [inherit(state.id, upto=k)], [65, 66], 4, keep=False, sampling=LOGPROBS)
        assert rewound.usage.context_tokens == k
        same(rewound, ok(lively, text=[*tokens[:k], 65, 66], n=4, keep=False, sampling=LOGPROBS))


def test_sglang_7817_two_generates_in_a_row_on_one_state(lively: Live):
    """The second reuses all of the first: its input, what it generated, and the last token too."""
    first = ok(lively, text=noise(7, 33), n=9)
    second = ok(lively, [inherit(first.id)], [65], 9)
    assert (second.usage.reused_tokens, second.usage.computed_tokens) == (33 + 9, 1)
    third = ok(lively, [inherit(second.id)], [66], 1)
    assert (third.usage.reused_tokens, third.usage.computed_tokens) == (33 + 9 + 1 + 9, 1)


def test_vllm_6078_parts_computed_apart_are_joined_without_computing_them_again(lively: Live):
    """A+B, A+C, A+D and then A+B+C+D. Also in another order, with one of them twice, and with a part of one."""
    a = ok(lively, text=noise(8, 50))
    b, c, d = together(lively, [body([inherit(a.id)], noise(i, 10 + i)) for i in range(3)])
    for parts in ([b, c, d], [d, b, c], [b, c, d, b]):
        joined = ok(lively, [inherit(part.id) for part in parts], [65, 66], 2, place="concat")
        usage = joined.usage
        assert (usage.context_tokens, usage.reused_tokens, usage.computed_tokens) == (50 + 33, 50 + 33, 2)
    part = ok(lively, [inherit(b.id, upto=4), inherit(c.id)], [65, 66], 2, place="concat")
    assert (part.usage.reused_tokens, part.usage.computed_tokens) == (50 + 4 + 11, 2)


def test_mlx_lm_1547_forking_costs_no_kv(lively: Live):
    """A fork copied the cache. Fifty forks of a long state hold the parent once, and one token each."""
    long = ok(lively, text=noise(9, 1200))
    before = lively.rest()
    forks = together(lively, [body([inherit(long.id)], [65 + i]) for i in range(50)])
    after = lively.rest()
    assert after["held_tokens"] - before["held_tokens"] == 50
    assert after["evictions"] == before["evictions"]
    deep = forks[0]
    for _ in range(20):
        deep = ok(lively, [inherit(deep.id)], [65])
    assert lively.rest()["held_tokens"] - after["held_tokens"] == 20


def test_mlx_lm_1547_forking_takes_no_longer_for_a_longer_parent(lively: Live):
    """Time proportional to the number of segments, not of tokens: here one segment, of 10 or of 1500 tokens."""
    took = {}
    for size in (10, 1500):
        root = ok(lively, text=noise(size, size))
        forks = [ok(lively, [inherit(root.id)], [65], 0, keep=False).timings for _ in range(15)]
        took[size] = median(fork.compile + fork.kv_prepare for fork in forks)
    assert took[1500] < 4 * took[10] + 0.002, took


def test_opencode_33763_after_a_fork_both_sides_generate_at_once(lively: Live):
    """Parent and child shared something that one of them moved. Both go on at the same time, several steps long, and
    each says what it says alone."""
    root = ok(lively, text=noise(10, 40), n=3)
    fork = ok(lively, [inherit(root.id)], noise(11, 3), 2)
    more = {"n": 30, "sampling": LOGPROBS}
    both = [body([inherit(state)], noise(i, 3), **more) for i, state in enumerate((root.id, fork.id))]
    alone = [ok(lively, [inherit(state)], noise(i, 3), **more) for i, state in enumerate((root.id, fork.id))]
    for one, expected in zip(together(lively, both), alone, strict=True):
        same(one, expected)


def test_opencode_33763_a_fork_of_what_still_generates(lively: Live):
    """The child is asked for while its parent runs; meanwhile the grandparent is continued, too."""
    root = ok(lively, text=noise(12, 40), n=3)
    parent = body([inherit(root.id)], noise(13, 100), 40)
    child = body([inherit(parent["id"])], [65, 66], 6, sampling=LOGPROBS)
    first = begun(lively, parent)
    second = begin(lively, child)
    beside = asked_of(lively, root.id)
    assert parsed(first.result()).usage.generated_tokens == 40
    same(parsed(second.result()), asked_of(lively, parent["id"]))
    same(beside, asked_of(lively, root.id))
