"""Holdings in pages of several slots: hand-made cases of what is kept, freed and computed again with which token.

Any life at all, at these page sizes too, is in `test_lives.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch_server.segments import Interval, Segment
from tests.server.pool import Memory, Pool, artifact, inherit

SIZES = (1, 16, 64)


def whole(segment: Segment) -> Interval:
    return Interval(segment, 0, len(segment))


@pytest.fixture
def paged() -> Callable[[int], Pool]:
    return lambda size: Pool(memory=Memory(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("more", [0, 1, -1])
def test_a_state_takes_whole_pages(paged: Callable[[int], Pool], size: int, more: int):
    pool = paged(size)
    pool.make("a", n=3 * size + more)
    pages = 3 + (more > 0) - (more < 0) * (size == 1)
    assert pool.held == pool.reclaimable == pool.memory.used == pages * size
    assert pool.holdings.owned_tokens == {"": pages * size}
    pool.release("a")
    assert (pool.memory.used, pool.held, pool.reclaimable) == (0, 0, 0)


@pytest.mark.parametrize("size", SIZES)
def test_of_every_span_of_a_state_just_the_pages_that_it_touches_stay(paged: Callable[[int], Pool], size: int):
    n = 2 * size + 2
    ends = sorted({0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, n})
    for start, stop in [(a, b) for a in ends for b in ends if a <= b]:
        pool = paged(size)
        pool.make("a", n=n)
        pool.make("b", artifact("a", start, stop), n=1)
        pool.release("a")
        pages = {i // size for i in range(start, stop)}
        assert pool.here.get("a", []) == [i for i in range(n) if i // size in pages], (start, stop)
        assert pool.held == pool.memory.used == (len(pages) + 1) * size
        pool.release("b")
        assert pool.memory.used == pool.held == 0


@pytest.mark.parametrize("size", SIZES)
def test_two_spans_in_one_page_keep_it_until_both_are_gone(paged: Callable[[int], Pool], size: int):
    pool = paged(size)
    pool.make("a", n=3 * size)
    at = size if size > 1 else 0
    pool.make("b", artifact("a", at, at + 1), n=1)
    pool.make("c", artifact("a", 2 * size - 1, 2 * size), n=1)
    pool.release("a", "b")
    kept = range(size, 2 * size) if size > 1 else range(1, 2)
    assert pool.here["a"] == list(kept)
    pool.release("c")
    assert pool.memory.used == 0


@pytest.mark.parametrize("size", [16, 64])
def test_what_shares_a_page_with_a_kept_token_is_computed_again_with_it(paged: Callable[[int], Pool], size: int):
    pool = paged(size)
    pool.make("a", n=3 * size + 5)
    pool.make("b", artifact("a", size + 2, size + 3), n=1)
    a = pool.segment("a")
    pool.release("a")
    pool.put_out(a)
    assert pool.holdings.needed_of(a) == 2 * size
    assert pool.holdings.unmovable_beside([Interval(a, size + 2, size + 3)]) == 2 * size
    pool.rebuild(a)
    assert pool.here["a"] == list(range(size, 2 * size)), "the page before is given back"
    assert pool.held == pool.memory.used == 2 * size


@pytest.mark.parametrize("size", [16, 64])
def test_no_more_is_computed_again_than_there_is(paged: Callable[[int], Pool], size: int):
    pool = paged(size)
    pool.make("a", n=size + 3)
    a = pool.segment("a")
    pool.evict(1)
    assert pool.holdings.needed_of(a) == size + 3
    assert pool.holdings.unmovable_beside([whole(a)]) == 2 * size, "but it will take whole pages"
    pool.rebuild(a)
    assert pool.held == pool.memory.used == 2 * size


@pytest.mark.parametrize("size", SIZES)
def test_what_became_unneeded_while_it_was_computed_again_is_freed_by_pages(paged: Callable[[int], Pool], size: int):
    pool = paged(size)
    n = 4 * size + size // 2 + 1
    pool.make("a", n=n)
    pool.make("b", artifact("a", size, size + 1), artifact("a", 3 * size, 3 * size + 1), n=1)
    a = pool.segment("a")
    pool.put_out(a, pool.segment("b"))
    pool.release("a")
    pool.holdings.restore(a, pool.memory.take("a", n))
    pool.store.check()
    assert pool.here["a"] == [*range(size, 2 * size), *range(3 * size, 4 * size)]
    assert pool.held == pool.memory.used == 2 * size


@pytest.mark.parametrize("size", [16, 64])
def test_a_context_is_whole_as_long_as_its_pages_are(paged: Callable[[int], Pool], size: int):
    """What `b` saw was let go of, but a neighbour in the page is kept: `b` can still be computed again."""
    pool = paged(size)
    pool.make("a", n=2 * size)
    pool.make("b", artifact("a", 3, 5, propagate=False), n=1)
    pool.make("c", artifact("a", 7, 8), n=1)
    a, b = pool.segment("a"), pool.segment("b")
    pool.release("a")
    assert b.context is not None
    pool.evict(3 * size)
    pool.release("c")
    assert (pool.memory.used, pool.missing(b)) == (0, "ab"), "a is kept so that b can come back"
    pool.rebuild(a)
    assert pool.here == {"a": list(range(size))}
    pool.rebuild(b)
    assert (b.context, pool.here) == (None, {"b": [0]})


@pytest.mark.parametrize("size", SIZES)
def test_of_an_empty_interval_nothing_is_kept(paged: Callable[[int], Pool], size: int):
    pool = paged(size)
    pool.make("a", n=3 * size)
    nothing = Interval(pool.segment("a"), size + size // 2, size + size // 2)
    pool.holdings.retain([nothing])
    pool.release("a")
    assert pool.memory.used == 0


@pytest.mark.parametrize("size", [16, 64])
def test_evicting_one_token_frees_a_page_at_least(paged: Callable[[int], Pool], size: int):
    pool = paged(size)
    for letter in "abc":
        pool.make(letter, n=1)
    assert (pool.reclaimable, pool.evict(1), pool.evict(size + 1)) == (3 * size, size, 2 * size)


@pytest.mark.parametrize("size", SIZES)
def test_a_fork_at_every_token_keeps_its_part_of_the_parent(paged: Callable[[int], Pool], size: int):
    n = 2 * size + 3
    for k in range(n + 1):
        pool = paged(size)
        pool.make("a", n=n)
        pool.make("b", inherit("a", upto=k), n=1)
        pool.release("a")
        assert len(pool.here.get("a", [])) == min(n, -(-k // size) * size)
        assert pool.held == pool.memory.used == (-(-k // size) + 1) * size
