"""Position policies: where the visible intervals sit for rotary purposes, and where new tokens begin.

A policy moves intervals; it never decides which tokens are visible (`compile.py`) nor touches a stored key.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch_server.segments import Interval, joined


def shift_to(selection: Sequence[Interval], base: int) -> list[Interval]:
    """Move everything one reference selects, rigidly, so that its lowest effective position lands on `base`."""
    lowest = min((interval.effective for interval in selection if len(interval)), default=base)
    return [interval.moved(base - lowest) for interval in selection]


def lay_end_to_end(intervals: Sequence[Interval]) -> list[Interval]:
    """`concat`: position is the running count of visible tokens, as a flattened prompt would have it."""
    placed: list[Interval] = []
    at = 0
    for interval in intervals:
        placed.append(interval.moved(at - interval.effective))
        at += len(interval)
    return list(joined(placed))


def after_all(intervals: Sequence[Interval]) -> int:
    """One past the largest visible position: where `keep` lets new tokens begin."""
    return max((interval.end for interval in intervals), default=0)
