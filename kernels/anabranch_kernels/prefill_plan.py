"""The prefill plan: for each tile of query rows, the runs of KV that it walks through. Made in numpy, once a step.

Unlike the task plan (`tasks.py`) it shares no reading between requests: with many query rows a block's work is
arithmetic, not memory. The words mean the same where they have the same name.

    tile    {row, count, position, run, blocks, 0, 0, 0}    query rows `row` on, `count` of them, all of one request,
                                                            whose new tokens number `position` on they are
    run     {slot, length, delta, seen}                     new token `j` of the request sees the first
                                                            min(length, seen + j) slots; `seen` >= 1
    copy    {from, to, length, 0}                           fills `slots` from the flat `req_to_token`

A tile walks the runs from word `run` on until it has done `blocks` blocks of `kv_block` tokens; a run takes
ceil(min(length, seen + position + count - 1) / kv_block) of them. Longest tiles come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TILE_WORDS = 8

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Suffix:
    """What one request adds: `new` tokens at the end of `length` visible ones, which row `table_row` lists.

    intervals: [n, 3] {start, stop, delta}: the shifted parts of the list, in order; what they leave out is seen where
    it was computed, as is every new token.
    """

    table_row: int
    length: int
    new: int
    intervals: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPlan:
    """tiles: [n_tiles, 8]. words: [n_runs + n_copies, 4], runs first. n_rows, n_slots: of the step."""

    tiles: Int32s
    words: Int32s
    n_runs: int
    n_rows: int
    n_slots: int

    @property
    def copies(self) -> Int32s:
        return self.words[self.n_runs :]


def prefill_plan(suffixes: Sequence[Suffix], *, table_width: int, tokens_per_tile: int, kv_block: int) -> PrefillPlan:
    """Plan one step; query rows are the new tokens of the requests, in order. table_width: of `req_to_token`.

    Raises ValueError if an interval lies outside of what was there before the new tokens.
    """
    tiles, runs, copies = [], [], []
    n_rows = n_slots = n_runs = 0
    for suffix in suffixes:
        if suffix.new == 0:
            continue
        made, taken = _runs(suffix, n_slots, suffix.table_row * table_width)
        tiles.append(_tiles(suffix, made, n_rows, n_runs, tokens_per_tile, kv_block))
        runs.append(made)
        copies.append(taken)
        n_rows += suffix.new
        n_slots += suffix.length
        n_runs += len(made)
    if not tiles:
        return PrefillPlan(np.zeros((0, TILE_WORDS), np.int32), np.zeros((0, 4), np.int32), 0, 0, 0)
    every = np.concatenate(tiles)
    every = every[np.argsort(-every[:, 4], kind="stable")]
    words = np.concatenate([*runs, *copies])
    assert max(n_slots, len(words)) < 2**31
    return PrefillPlan(every.astype(np.int32), words.astype(np.int32), n_runs, n_rows, n_slots)


def _runs(suffix: Suffix, first_slot: int, table: int) -> tuple[Int64s, Int64s]:
    """One run for each delta, the unshifted last, which ends with the new tokens; and the copies that fill them."""
    parts = _covering(suffix)
    parts = parts[np.lexsort((parts[:, 0], parts[:, 2], parts[:, 2] == 0))]
    lengths = parts[:, 1] - parts[:, 0]
    targets = first_slot + np.cumsum(lengths) - lengths
    copies = np.stack([table + parts[:, 0], targets, lengths, np.zeros_like(lengths)], 1)
    firsts = np.flatnonzero(np.r_[True, np.diff(parts[:, 2]) != 0])
    run_lengths = np.add.reduceat(lengths, firsts)
    seen = run_lengths.copy()
    seen[-1] -= suffix.new - 1
    return np.stack([targets[firsts], run_lengths, parts[firsts, 2], seen], 1), copies


def _covering(suffix: Suffix) -> Int64s:
    """[n, 3] {start, stop, delta}: all that is visible, what no interval names with delta 0."""
    shifted = np.asarray(suffix.intervals, np.int64).reshape(-1, 3)
    shifted = shifted[(shifted[:, 0] < shifted[:, 1]) & (shifted[:, 2] != 0)]
    edges = np.r_[0, shifted[:, :2].reshape(-1), suffix.length - suffix.new]
    if (np.diff(edges) < 0).any():
        raise ValueError(f"intervals {shifted.tolist()} of {suffix.length} tokens, {suffix.new} of them new")
    edges[-1] = suffix.length
    gaps = edges.reshape(-1, 2)
    gaps = np.c_[gaps, np.zeros(len(gaps), np.int64)][gaps[:, 0] < gaps[:, 1]]
    return np.concatenate([gaps, shifted])


def _tiles(suffix: Suffix, runs: Int64s, first_row: int, first_run: int, tokens_per_tile: int, kv_block: int) -> Int64s:
    position = np.arange(0, suffix.new, tokens_per_tile)
    count = np.minimum(suffix.new - position, tokens_per_tile)
    visible = np.minimum(runs[:, 1], runs[:, 3] + (position + count - 1)[:, None])
    tiles = np.zeros((len(position), TILE_WORDS), np.int64)
    tiles[:, 0] = first_row + position
    tiles[:, 1] = count
    tiles[:, 2] = position
    tiles[:, 3] = first_run
    tiles[:, 4] = -(-visible // kv_block).sum(1)
    return tiles
