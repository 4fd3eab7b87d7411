"""Position policies: where the visible intervals sit for rotary purposes, and where new tokens begin.

A policy moves rows; it never decides which tokens are visible (`union.py`) nor touches a stored key. Each one returns
the position of the first new token. All positions are effective ones, as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anabranch_server.trunk import DELTA, NATIVE, START, STOP
from anabranch_server.union import Ints, Selection, Union


def keep(union: Union) -> int:
    """Everything stays where it arrives; new tokens follow the largest position."""
    return int(_ends(union).max(initial=0))


def concat(union: Union) -> int:
    """Position is the running count of visible tokens, as a flattened prompt would have it."""
    ends = np.cumsum(_lengths(union))
    union.move(ends - _ends(union))
    return int(ends[-1]) if len(ends) else 0


def same_start(union: Union) -> int:
    """What only one reference selects begins after what several select, each reference's part at the same place."""
    private, after, lowest, _ = _private_parts(union)
    union.move(np.where(private, after - lowest[union.selection], 0))
    return keep(union)


def right_aligned(union: Union) -> int:
    """What only one reference selects ends just before the new tokens, each reference's part at the same place."""
    private, after, lowest, end = _private_parts(union)
    start = after + int((end - lowest)[union.selection[private]].max(initial=0))
    union.move(np.where(private, start - end[union.selection], 0))
    return start


def explicit(union: Union, selections: Sequence[Selection], bases: Sequence[int | None], start: int | None) -> int:
    """All that one reference selects moves rigidly, so that its lowest position, counted before what others select
    too was dropped, lands on its base."""
    by = [
        0 if base is None or not view.rows else base - view.summary.lowest
        for (view, _), base in zip(selections, bases, strict=True)
    ]
    if any(by):
        union.move(np.array(by, np.int64)[union.selection])
    return keep(union) if start is None else start


def _private_parts(union: Union) -> tuple[np.ndarray, int, Ints, Ints]:
    """Which rows only one reference selects, [rows] bool; one past the largest position of the others; and the bounds
    of each selection's private part, [selections] each."""
    assert union.shared is not None, "unite with count=True"
    private = ~union.shared
    places, ends = _ends(union) - _lengths(union), _ends(union)
    lowest = np.full(int(union.selection.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    end = np.full(len(lowest), np.iinfo(np.int64).min)
    np.minimum.at(lowest, union.selection[private], places[private])
    np.maximum.at(end, union.selection[private], ends[private])
    return private, int(ends[union.shared].max(initial=0)), lowest, end


def _lengths(union: Union) -> Ints:
    return union.columns[STOP] - union.columns[START]


def _ends(union: Union) -> Ints:
    return union.columns[NATIVE] + union.columns[DELTA] + _lengths(union)
