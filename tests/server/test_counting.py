"""The numbers of a store: states by condition, tokens by what may become of them, events; tenant by tenant."""

from __future__ import annotations

from anabranch_server.counting import FIELDS, counts_by_label, counts_of
from tests.server.pool import Pool, artifact, inherit


def shown(counts: dict[str, int]) -> dict[str, int]:
    assert counts.keys() <= FIELDS
    return {name: number for name, number in counts.items() if number}


def test_states_are_counted_by_condition(pool: Pool):
    pool.make("a", tenant="x")
    pool.make("b", tenant="x")
    pool.open("c", inherit("a"), tenant="x")
    pool.wait("d", "c", tenant="x")
    pool.wait("e", "d", tenant="x")
    pool.evict(1)
    counts = counts_of(pool.store, "x")
    assert [counts[name] for name in ("states", "running", "waiting", "evicted_states")] == [2, 1, 2, 1]


def test_tokens_are_counted_by_what_may_become_of_them(pool: Pool):
    pool.make("a", n=8, tenant="x")
    pool.make("b", artifact("a", 0, 3), n=4, tenant="x")
    pool.make("c", inherit("a", propagate=False), n=1, tenant="x")
    assert shown(counts_of(pool.store, "x")) == {
        "states": 3,
        "held_tokens": 13,
        "shared_tokens": 3,
        "reclaimable_tokens": 13,
        "created": 3,
    }
    pool.release("a", tenant="x")
    pool.open("d", inherit("b"), tenant="x")
    assert shown(counts_of(pool.store, "x")) == {
        "states": 2,
        "running": 1,
        "held_tokens": 8,
        "shared_tokens": 7,
        "pinned_tokens": 7,
        "created": 3,
        "freed": 1,
    }


def test_what_is_out_of_memory_is_counted_apart(pool: Pool):
    pool.make("a", n=8, tenant="x")
    pool.make("b", inherit("a"), n=4, tenant="x")
    pool.put_out(pool.segment("a", "x"))
    counts = shown(counts_of(pool.store, "x"))
    assert counts == {
        "states": 2,
        "evicted_states": 1,
        "held_tokens": 4,
        "reclaimable_tokens": 4,
        "evicted_tokens": 8,
        "created": 2,
        "evictions": 1,
    }
    pool.rebuild(pool.segment("a", "x"))
    counts = counts_of(pool.store, "x")
    assert (counts["evicted_tokens"], counts["held_tokens"], counts["rebuilds"]) == (0, 12, 1)


def test_what_running_requests_read_of_a_released_state_is_its_owners(pool: Pool):
    pool.make("a", n=8, tenant="x")
    pool.open("b", inherit("a"), tenant="x")
    pool.release("a", tenant="x")
    counts = counts_of(pool.store, "x")
    assert (counts["states"], counts["held_tokens"], counts["pinned_tokens"], counts["shared_tokens"]) == (0, 8, 8, 0)


def test_tenants_are_counted_apart_and_those_without_a_name_together(pool: Pool):
    pool.make("a", n=2, tenant="x")
    pool.make("a", n=3, tenant="key:1")
    pool.make("a", n=4, tenant="key:2")
    pool.make("a", n=5)
    pool.store.count("key:3", "rejected")
    held = {name: counts["held_tokens"] for name, counts in counts_by_label(pool.store).items()}
    assert held == {"x": 2, "unnamed": 7, "anonymous": 5}
    assert counts_by_label(pool.store)["unnamed"]["rejected"] == 1
    assert shown(counts_of(pool.store, "key:1")) == {
        "states": 1,
        "held_tokens": 3,
        "reclaimable_tokens": 3,
        "created": 1,
    }
    assert counts_of(pool.store, "")["held_tokens"] == 5
    assert shown(counts_of(pool.store, "key:9")) == {}


def test_the_labels_add_up_to_the_whole_store(pool: Pool):
    for i, tenant in enumerate(["x", "key:1", "key:2", ""]):
        pool.make("a", n=3 + i, tenant=tenant)
        pool.make("b", inherit("a"), n=2, tenant=tenant)
        pool.open("c", inherit("b"), tenant=tenant)
    pool.close("c", "cancelled", tenant="x")
    pool.evict(4)
    every = counts_by_label(pool.store).values()
    for name, number in [("held_tokens", pool.held), ("reclaimable_tokens", pool.reclaimable), ("states", 8)]:
        assert sum(counts[name] for counts in every) == number


def test_an_empty_store_counts_nothing_and_counting_leaves_it_empty(pool: Pool):
    assert counts_by_label(pool.store) == {}
    assert counts_of(pool.store, "x") == {}
    assert counts_by_label(pool.store)["nobody"]["states"] == 0
    assert (pool.store.spaces, pool.store.counts) == ({}, {})


def test_events_that_the_wire_does_not_know_are_not_shown(pool: Pool):
    pool.store.count("x", "wondered")
    assert shown(counts_of(pool.store, "x")) == {}
