"""Keepers: how many need each token of a segment, held against a plain list of counts.

What follows from the counts is in `test_holdings.py`.
"""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.holdings import Keepers

SIZE = 9
RUNS = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda ends: (min(ends), max(ends)))


def runs_of(counts: list[int]) -> list[tuple[int, int, int]]:
    """The shortest description of a list of counts, without zeros."""
    found, at = [], 0
    for count, group in groupby(counts):
        length = len(list(group))
        if count:
            found.append((at, at + length, count))
        at += length
    return found


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(RUNS, st.booleans()), max_size=25))
def test_runs_say_what_a_list_of_counts_says(steps: list[tuple[tuple[int, int], bool]]):
    keepers, counts = Keepers(SIZE), [0] * SIZE
    for (start, stop), more in steps:
        if more:
            keepers.add(start, stop)
            counts[start:stop] = [count + 1 for count in counts[start:stop]]
        elif all(counts[start:stop]):
            gone = keepers.remove(start, stop)
            counts[start:stop] = [count - 1 for count in counts[start:stop]]
            assert [i for a, b in gone for i in range(a, b)] == [i for i in range(start, stop) if not counts[i]]
            assert all(a < b for a, b in gone)
        assert list(keepers.runs()) == runs_of(counts)
        assert keepers.total == sum(count > 0 for count in counts)
        assert keepers.shared == sum(count > 1 for count in counts)
        assert len(keepers._starts) == len(keepers._counts) == len(list(groupby(counts))), "runs are glued"


def test_to_let_go_too_often_is_seen():
    keepers = Keepers(SIZE)
    keepers.add(2, 5)
    for start, stop in [(1, 3), (4, 6), (0, 1), (0, 9)]:
        with pytest.raises(AssertionError, match="too often"):
            Keepers(SIZE, keepers.total, keepers.shared, keepers._starts[:], keepers._counts[:]).remove(start, stop)


def test_nothing_is_needed_of_an_empty_segment():
    keepers = Keepers(0)
    keepers.add(0, 0)
    assert (keepers.remove(0, 0), list(keepers.runs()), keepers.total) == ([], [], 0)


def test_neighbouring_runs_come_back_as_they_were_cut():
    keepers = Keepers(SIZE)
    keepers.add(0, 9)
    keepers.add(3, 5)
    assert keepers.remove(0, 9) == [(0, 3), (5, 9)]
    assert keepers.remove(3, 5) == [(3, 5)]
