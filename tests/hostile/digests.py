"""Compares what the ranks of a server noted of their stores, step by step: a rank that went its own way is named.

With ANABRANCH_DEBUG=1 and ANABRANCH_DIGESTS=<folder>, each rank writes `rank-<n>` there (`engine/stepping.py`). By
hand: `python -m tests.hostile.digests <folder>`.
"""

from __future__ import annotations

import sys
from pathlib import Path


class Differs(AssertionError):
    """Two ranks noted different things of one step."""


def variables(folder: Path) -> dict[str, str]:
    """The environment in which a server's ranks write into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"ANABRANCH_DEBUG": "1", "ANABRANCH_DIGESTS": str(folder)}


def compare(folder: Path, ranks: int, *, least: int = 1) -> int:
    """Raise Differs unless `ranks` ranks noted the same, at least `least` times; returns how often.

    A rank that is killed may have written less, so only steps that all ranks have noted are compared; they must
    begin together.
    """
    notes = {rank: _lines(folder / f"rank-{rank}") for rank in range(ranks)}
    first, *others = notes.values()
    for rank, lines in enumerate(others, 1):
        for at, (one, other) in enumerate(zip(first, lines, strict=False)):
            if one != other:
                raise Differs(f"rank {rank} differs from rank 0 in note {at}: {other!r}, not {one!r}, in {folder}")
    together = min(map(len, notes.values()))
    if together < least:
        raise Differs(
            f"the ranks noted {[*map(len, notes.values())]} steps in {folder}; at least {least} were expected"
        )
    return together


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise Differs(f"there is no {path}: the rank never noted anything")
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()  # what follows the last newline is still being written


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(f"{compare(where, len([*where.glob('rank-*')]))} notes agree")
