"""Compiling TileLang kernels: for which card, with which passes, and where compiled ones are kept on disk.

It holds no kernel. TileLang's own disk cache is used; it is safe for two processes at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tilelang

from anabranch_kernels import cache

HOPPER: dict[str, str] = {"kind": "cuda", "arch": "sm_90a"}
PASSES: dict[str, Any] = {
    # Indices are clamped by the kernels. With the checks every gather would be wrapped in several branches.
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS.value: True,
    # The kernels say themselves which warps load and which compute.
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED.value: True,
    # The kernels place their barriers themselves. The pass that does it leaves some out, without a word, where threads
    # write to shared memory under conditions on their number.
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC.value: True,
    # exp2, log2 and division as the card has them: errors far below those of 16-bit weights.
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH.value: True,
    # It sees a race wherever a row to write is looked up in a table.
    tilelang.PassConfigKey.TL_DISABLE_DATA_RACE_CHECK.value: True,
}


def cache_directory() -> Path:
    """Where compiled kernels are kept: `TILELANG_CACHE_DIR`, or `tilelang` below our own cache of kernels."""
    return Path(os.environ.get("TILELANG_CACHE_DIR") or cache.directory() / "tilelang")


def compiled(function: Any, target: dict[str, str] | str = HOPPER) -> Any:
    """Compile a `T.prim_func`, or load it from disk. Needs no card. Seconds when nothing is cached."""
    os.environ["TILELANG_CACHE_DIR"] = str(cache_directory())
    passes = PASSES if target is HOPPER else {}
    return tilelang.compile(function, target=target, pass_configs=passes)
