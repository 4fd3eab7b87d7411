"""The state store: tenants apart from each other, leases and their ends, and what one key may have.

How time is told is in `test_leases.py`, who is which tenant in `test_tenancy.py`.
"""

from __future__ import annotations

import pytest

from anabranch_server.limits import Limits
from tests.server.pool import ID, Pool, inherit, refused

KEY = "key:0123"
"""A tenant that no operator named."""


def limited(**limits: float) -> Pool:
    return Pool(Limits(**limits))  # pyright: ignore[reportArgumentType]


def gone(pool: Pool, letter: str, tenant: str = "") -> None:
    with refused("state_not_found"):
        pool.store.state(tenant, ID[letter])


# ---------------------------------------------------------------- tenants


def test_the_states_of_one_tenant_are_not_found_by_another(pool: Pool):
    pool.make("a", tenant="x")
    pool.open("b", tenant="x")
    pool.wait("c", "b", tenant="x")
    for letter in "abc":
        for question in (pool.store.known, pool.store.info, pool.store.release, pool.store.renew):
            with refused("state_not_found"):
                question("y", ID[letter])
        with refused("state_not_found"):
            pool.store.parents("y", [inherit(letter)])
        with refused("state_not_found"):
            pool.store.turn_after("y", [inherit(letter)])
        pool.store.check_new("y", ID[letter])
    assert list(pool.store.list("y")) == []
    assert len(list(pool.store.list("x"))) == 3


def test_one_id_of_two_tenants_is_two_states(pool: Pool):
    pool.make("a", tenant="x", n=2)
    pool.make("a", tenant="y", n=3)
    pool.release("a", tenant="x")
    assert (pool.held, pool.store.spaces.keys()) == (3, {"y"})
    with refused("state_released"):
        pool.store.state("x", ID["a"])
    assert pool.store.state("y", ID["a"]).segment.owner == "y"


def test_a_tenant_that_has_nothing_any_more_is_forgotten(pool: Pool):
    pool.make("a", tenant=KEY)
    pool.open("b", inherit("a"), tenant=KEY)
    pool.release("a", tenant=KEY)
    assert pool.store.spaces.keys() == {KEY}
    pool.close("b", "cancelled", tenant=KEY)
    assert pool.store.spaces == {}
    pool.wait("c", "b", tenant=KEY)
    pool.store.stop_waiting(KEY, ID["c"])
    assert pool.store.spaces == {}


def test_who_waits_of_any_tenant_is_found_when_ready(pool: Pool):
    pool.open("a", tenant="x")
    pool.wait("b", "a", "of x", tenant="x")
    pool.wait("b", "a", "of y", tenant="y")
    ready = pool.store.next_ready()
    assert ready is not None and ready.request == "of y", "y has no a"
    assert pool.store.next_ready() is None


def test_events_of_a_named_tenant_are_counted_under_its_name_for_ever(pool: Pool):
    pool.make("a", tenant="x")
    pool.release("a", tenant="x")
    pool.open("b", tenant="x")
    pool.close("b", "failed", tenant="x")
    assert pool.store.counts == {("x", "created"): 1, ("x", "freed"): 1, ("x", "failed"): 1}


def test_of_a_key_without_a_name_nothing_is_remembered_when_its_last_state_is_gone(pool: Pool):
    pool.make("a", tenant=KEY)
    assert pool.store.counts == {(KEY, "created"): 1}
    pool.release("a", tenant=KEY)
    pool.make("a", tenant="key:4567")
    pool.tell(1)
    pool.tell(10_000)
    assert pool.store.counts == {("unnamed", "created"): 2, ("unnamed", "freed"): 1, ("unnamed", "expired"): 1}


def test_nor_when_its_last_request_ends_and_what_that_read_goes_with_it(pool: Pool):
    pool.make("a", tenant=KEY)
    pool.open("b", inherit("a"), tenant=KEY)
    pool.release("a", tenant=KEY)
    pool.close("b", "cancelled", tenant=KEY)
    assert {tenant for tenant, _ in pool.store.counts} == {"unnamed"}


def test_nor_when_it_expires_while_something_of_it_is_being_computed_again(pool: Pool):
    state = pool.make("a", tenant=KEY)
    pool.tell(1)
    pool.store.read(state.handed_on)
    pool.store.expire(20_000)
    pool.store.done_reading(state.handed_on)
    assert {tenant for tenant, _ in pool.store.counts} == {"unnamed"}


def test_events_of_an_unnamed_key_that_has_nothing_are_counted_with_those_of_the_others(pool: Pool):
    pool.store.count(KEY, "rejected")
    pool.store.count("", "rejected")
    pool.store.count("x", "rejected")
    assert pool.store.counts == {("unnamed", "rejected"): 1, ("", "rejected"): 1, ("x", "rejected"): 1}


# ---------------------------------------------------------------- leases


def test_a_state_whose_lease_is_over_was_never_there(pool: Pool):
    pool.make("a", n=4, lease=10.0)
    pool.make("b", n=2, lease=11.0)
    pool.tell(0)
    assert (pool.tell(9.5), pool.gone) == (0, "")
    assert (pool.tell(10), pool.gone, pool.held) == (1, "a", 2)
    gone(pool, "a")
    pool.make("a")
    assert pool.store.counts["", "expired"] == 1


def test_children_keep_what_they_see_of_a_state_whose_lease_is_over(pool: Pool):
    pool.make("a", n=4, lease=10.0)
    pool.tell(0)
    pool.tell(4)
    pool.make("b", inherit("a"), n=2, lease=100.0)
    pool.tell(5)
    assert pool.store.info("", ID["a"]).lease == 10.0, "to use it is to renew it"
    assert pool.tell(14.9) == 0
    assert (pool.tell(15), pool.held) == (1, 6)
    assert pool.tell(105) == 1
    assert pool.held == 0


def test_a_lease_begins_when_the_state_is_sealed(pool: Pool):
    pool.open("a", lease=10.0)
    pool.tell(50)
    pool.seal("a")
    pool.tell(50)
    assert pool.tell(59) == 0
    assert pool.tell(60) == 1


def test_who_says_nothing_gets_the_default_and_who_asks_for_too_much_the_maximum():
    pool = limited(default_lease=20.0, max_lease=30.0)
    for letter, lease in [("a", None), ("b", 25.0), ("c", 31.0), ("d", 1.0)]:
        pool.make(letter, lease=lease)
    assert [pool.store.info("", ID[letter]).lease for letter in "abcd"] == [20, 25, 30, 1]
    pool.store.renew("", ID["d"], 1000.0)
    assert pool.store.info("", ID["d"]).lease == 30
    pool.store.renew("", ID["c"], 5.0)
    pool.tell(4)
    pool.store.renew("", ID["c"])
    assert pool.store.info("", ID["c"]).lease == 5


def test_a_running_request_can_be_promised_another_lease(pool: Pool):
    pool.open("a", lease=10.0)
    pool.store.renew("", ID["a"])
    assert pool.store.info("", ID["a"]).lease == 10
    pool.store.renew("", ID["a"], 20.0)
    pool.store.renew("", ID["a"], 1e9)
    assert pool.store.info("", ID["a"]).lease == 86_400
    pool.seal("a")
    assert pool.store.info("", ID["a"]).lease == 86_400


def test_to_renew_what_waits_does_nothing(pool: Pool):
    pool.wait("a", "b")
    pool.store.renew("", ID["a"], 5.0)
    assert pool.store.info("", ID["a"]).lease is None


# ---------------------------------------------------------------- what one key may have


def test_a_key_may_have_so_many_states_and_no_more():
    pool = limited(max_states=3)
    pool.make("a", tenant="x")
    pool.open("b", tenant="x")
    pool.store.check_new("x", ID["c"])
    pool.wait("c", "b", tenant="x")
    with refused("rate_limited") as refusal:
        pool.open("d", tenant="x")
    assert refusal.value.status == 429
    assert "3 states" in refusal.value.message
    pool.store.check_new("y", ID["d"])
    pool.release("a", tenant="x")
    pool.store.check_new("x", ID["d"])


def test_a_key_may_have_so_many_requests_and_no_more():
    pool = limited(max_unfinished=2)
    pool.make("a")
    pool.open("b")
    pool.store.check_new("", ID["c"])
    pool.wait("c", "b")
    with refused("rate_limited") as refusal:
        pool.store.check_new("", ID["d"])
    assert "2 unfinished requests" in refusal.value.message
    pool.store.check_new("y", ID["d"])
    pool.seal("b")
    pool.store.check_new("", ID["d"])


def test_a_key_may_hold_so_many_tokens_in_memory_or_not():
    pool = limited(max_held_tokens=10)
    pool.make("a", n=4, tenant="x")
    pool.make("b", n=3, tenant="x")
    pool.store.check_tokens("x", 3)
    pool.evict(4)
    with refused("rate_limited") as refusal:
        pool.store.check_tokens("x", 4)
    assert "10 tokens; it holds 7, and asks for 4" in refusal.value.message
    pool.store.check_tokens("y", 10)
    pool.release("a", tenant="x")
    pool.store.check_tokens("x", 7)


def test_0_is_no_limit():
    pool = limited(max_states=0, max_unfinished=0, max_held_tokens=0)
    pool.make("a", n=4)
    pool.open("b")
    pool.store.check_new("", ID["c"])
    pool.store.check_tokens("", 10**9)


@pytest.mark.parametrize("letter", ["a", "b", "c"])
def test_an_id_in_use_is_named_before_any_limit(letter: str):
    pool = limited(max_states=2)
    pool.make("a")
    pool.open("b")
    with refused("rate_limited" if letter == "c" else "invalid_request"):
        pool.store.check_new("", ID[letter])
