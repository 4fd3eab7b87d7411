"""A prefill of many chunks on top of a joined context, at full size (CASES.md: sglang#2255, PR#25091)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.api import inherit, ok
from tests.life.living import LOGPROBS, noise, same
from tests.serving import SMALL, Served, serve
from tests.soak import tiny

pytestmark = pytest.mark.engine

CHUNK, NEW = 2048, 10_000


@pytest.fixture(scope="module")
def roomy(logs: Path) -> Iterator[Served]:
    flags = (*SMALL, "--max-total-tokens", "32768", "--chunked-prefill-size", str(CHUNK), "--page-size", "16")
    with serve(tiny.write(logs / "roomy"), flags, logs / "roomy.log") as served:
        yield served


def test_sglang_2255_25091_ten_thousand_tokens_after_a_join_of_three(roomy: Served):
    """Chunked prefill tripped over a cached prefix. Here none of the lengths is a multiple of a chunk or of a page, and
    the same tokens in parts of another size, a state each, must give the same answer."""
    root = ok(roomy, text=noise(41, 333))
    arms = [ok(roomy, [inherit(root.id)], noise(42 + i, 100 + 7 * i)) for i in range(3)]
    refs, new = [inherit(arm.id) for arm in arms], noise(50, NEW)
    at_once = ok(roomy, refs, new, 8, sampling=LOGPROBS, place="concat")
    visible = 333 + 100 + 107 + 114
    assert (at_once.usage.reused_tokens, at_once.usage.computed_tokens) == (visible, NEW)
    part = ok(roomy, refs, new[:1111], place="concat")
    for start in range(1111, NEW - 1111, 1111):
        part = ok(roomy, [inherit(part.id)], new[start : start + 1111])
    in_parts = ok(roomy, [inherit(part.id)], new[NEW // 1111 * 1111 :], 8, sampling=LOGPROBS)
    assert in_parts.usage.context_tokens == visible + NEW // 1111 * 1111
    same(in_parts, at_once)
    roomy.release_all()
