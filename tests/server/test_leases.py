"""Leases: when they are over, beside a plain dictionary of ends.

What a state loses with its lease is in `test_store_tenants.py`.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.leases import Leases

A, B, C = ("", "a"), ("", "b"), ("x", "a")


def over(leases: Leases, now: float) -> list[tuple[str, str]]:
    """Who is over at `now`, each ended at once, as the store does it. It is told twice, so that all have begun."""
    return told(leases, now) + told(leases, now)


def told(leases: Leases, now: float) -> list[tuple[str, str]]:
    found = []
    for key in leases.advance(now):
        leases.end(key)
        found.append(key)
    return found


def begin(leases: Leases, key: tuple[str, str], seconds: float) -> None:
    """And tell the time at once."""
    leases.begin(key, seconds)
    assert over(leases, leases.now) == []


def renew(leases: Leases, key: tuple[str, str], seconds: float | None = None) -> None:
    leases.renew(key, seconds)
    assert over(leases, leases.now) == []


def test_a_time_is_old_when_it_arrives_so_a_lease_begins_with_the_second_one():
    leases = Leases()
    leases.begin(A, 10)
    assert (told(leases, 100), leases.left(A)) == ([], 10), "it may have been sent before the lease began"
    assert (told(leases, 103), leases.left(A)) == ([], 10)
    leases.renew(A)
    assert (told(leases, 112), told(leases, 113), told(leases, 122.9)) == ([], [], [])
    assert told(leases, 123) == [A]


def test_a_lease_begins_when_the_time_is_told_next():
    leases = Leases(now=100)
    leases.begin(A, 10)
    assert leases.left(A) == 10
    assert over(leases, 1000) == [], "how long ago it was in between is not known"
    assert leases.left(A) == 10
    leases.renew(A)
    assert leases.left(A) == 10
    assert over(leases, 1009) == []
    assert (over(leases, 1018), leases.left(A)) == ([], 1)
    assert over(leases, 1019) == [A]


def test_one_that_ends_before_the_time_is_told_leaves_nothing():
    leases = Leases()
    leases.begin(A, 10)
    leases.end(A)
    assert (over(leases, 100), len(leases), leases._next) == ([], 0, [])


def test_a_lease_is_over_when_its_time_has_come_and_not_before():
    leases = Leases()
    begin(leases, A, 10)
    assert (over(leases, 9.999), leases.left(A), A in leases, len(leases)) == ([], 10 - 9.999, True, 1)
    assert (over(leases, 10.0), A in leases, len(leases)) == ([A], False, 0)
    assert over(leases, 100.0) == []


def test_the_first_to_end_comes_first_and_one_id_of_two_tenants_is_two():
    leases = Leases()
    for key, seconds in [(A, 7), (B, 3), (C, 5)]:
        begin(leases, key, seconds)
    assert over(leases, 6) == [B, C]
    assert over(leases, 7) == [A]


def test_to_renew_begins_it_anew_for_as_long_as_before():
    leases = Leases()
    begin(leases, A, 10)
    assert over(leases, 8) == []
    renew(leases, A)
    assert (over(leases, 17), leases.left(A)) == ([], 1)
    assert over(leases, 18) == [A]


def test_a_renewal_may_lengthen_or_shorten_and_is_remembered():
    leases = Leases()
    begin(leases, A, 10)
    renew(leases, A, 3)
    assert leases.left(A) == 3
    assert over(leases, 2) == []
    renew(leases, A)
    assert leases.left(A) == 3
    renew(leases, A, 50)
    assert over(leases, 51) == []
    assert over(leases, 52) == [A]


def test_a_shortened_lease_does_not_wait_for_its_old_end():
    leases = Leases()
    begin(leases, A, 100)
    renew(leases, A, 1)
    assert over(leases, 1) == [A]


def test_time_never_goes_back():
    leases = Leases(now=100)
    begin(leases, A, 10)
    assert over(leases, 50) == []
    assert (leases.now, leases.left(A)) == (100, 10)
    assert over(leases, 110) == [A]


def test_nothing_is_left_of_a_lease_that_is_over_but_not_ended_yet():
    leases = Leases()
    begin(leases, A, 10)
    begin(leases, B, 90)
    first = next(leases.advance(25))
    assert (first, leases.left(A), leases.left(B)) == (A, 0.0, 65)


def test_a_key_that_ends_and_begins_again_has_its_new_time():
    leases = Leases()
    begin(leases, A, 5)
    begin(leases, B, 100)
    leases.end(A)
    assert over(leases, 2) == []
    begin(leases, A, 20)
    assert over(leases, 21) == []
    assert over(leases, 22) == [A]


def test_what_is_over_is_remembered_no_longer_however_often_it_was_renewed():
    leases = Leases()
    for i in range(2000):
        begin(leases, ("", str(i)), 3600)
        renew(leases, ("", str(i)), 1800)
        renew(leases, ("", str(i)), 900)
        if i >= 10:
            leases.end(("", str(i - 10)))
    assert len(leases) == 10
    assert len(leases._next) < 200


def test_who_renews_for_more_and_less_in_turn_fills_no_memory():
    leases = Leases()
    begin(leases, A, 3600)
    for i in range(3000):
        renew(leases, A, 3600 if i % 2 else 60)
        assert over(leases, i / 10) == []
    assert len(leases._next) < 200


def test_many_leases_that_were_renewed_still_end_at_their_times():
    leases, ends = Leases(), {}
    for i in range(300):
        begin(leases, ("", str(i)), 1000 + (i * 7919) % 300)
    for i in range(300):
        renew(leases, ("", str(i)), 500)
    for i in range(300):
        renew(leases, ("", str(i)), end := 1 + (i * 104729) % 300)
        ends["", str(i)] = end
    for now in range(1, 301):
        assert over(leases, now) == [key for key, end in ends.items() if end == now]
    assert leases._next == []


KEYS = st.sampled_from([A, B, C])
SECONDS = st.integers(1, 12)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), KEYS, SECONDS),
            st.tuples(st.just("renew"), KEYS, st.one_of(st.none(), SECONDS)),
            st.tuples(st.just("end"), KEYS, st.none()),
            st.tuples(st.just("advance"), st.none(), st.integers(0, 6)),
        ),
        max_size=40,
    )
)
def test_any_life_of_leases_ends_when_a_plain_dictionary_says(steps: list[tuple]):
    leases, seconds, ends, now = Leases(), {}, {}, 0
    for verb, key, number in steps:
        if verb == "begin" and key not in seconds:
            leases.begin(key, number)
            seconds[key] = number
        elif verb == "renew" and key in seconds:
            leases.renew(key, number)
            seconds[key] = seconds[key] if number is None else number
            ends.pop(key, None)
        elif verb == "end" and key in seconds:
            leases.end(key)
            del seconds[key]
            ends.pop(key, None)
        elif verb == "advance":
            now += number
            ends = {key: ends.get(key, now + seconds[key]) for key in seconds}
            expected = sorted(key for key, end in ends.items() if end <= now)
            assert sorted(over(leases, now)) == expected
            for gone in expected:
                del seconds[gone], ends[gone]
        left = {key: ends[key] - now if key in ends else seconds[key] for key in seconds}
        assert {key: leases.left(key) for key in (A, B, C) if key in leases} == left
        assert len(leases) == len(seconds)
