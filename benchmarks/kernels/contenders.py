"""Who takes part: our kernels and those of others, each with what it can be asked.

Nothing is imported of a kernel before it is prepared, so that one that is not there leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal

import torch

from benchmarks.kernels import ours, peers
from benchmarks.kernels.steps import Launch, Step

Kind = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Contender:
    """label: its column. ways: how it can be used; the fastest counts. shifts: whether it sees what the workload says;
    if not, it is given the same without shifts. packages: whose versions say which kernel it was.
    modules: what takes long to import. patience: seconds without a word after which it is taken for a kernel that never
    ends; some compile when they are first used."""

    label: str
    kinds: tuple[Kind, ...]
    ways: dict[str, Callable[[Step], Callable[[], torch.Tensor]]]
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    shifts: bool = False
    patience: float = 60.0


def _ours(label: str, kind: Kind, prepare: Callable[[Step], Launch], packages: tuple[str, ...] = ()) -> Contender:
    def result(step: Step) -> Callable[[], torch.Tensor]:
        launch = prepare(step)
        return lambda: launch()[0]

    return Contender(
        label, (kind,), {"": result}, packages, packages, shifts=True, patience=120.0 if packages else 60.0
    )


SGL_KERNEL = (("sglang-kernel",), ("sgl_kernel.flash_attn",))
FLASHINFER = (("flashinfer-python",), ("flashinfer",))

CONTENDERS: dict[str, Contender] = {
    "cuda-narrow": _ours("CUDA, 64 rows", "decode", ours.cuda_narrow),
    "tilelang": _ours("TileLang", "decode", ours.tilelang, ("tilelang",)),
    "tilelang-prefill": _ours("TileLang prefill", "prefill", ours.tilelang_prefill, ("tilelang",)),
    "fa3": Contender("FA3", ("decode", "prefill"), {"": peers.flash_attention_3}, *SGL_KERNEL),
    "fa3-contiguous": Contender(
        "FA3, KV in order", ("prefill",), {"": peers.flash_attention_3_contiguous}, *SGL_KERNEL
    ),
    "triton": Contender(
        "Triton (SGLang)",
        ("decode",),
        {f"{splits} splits": partial(peers.triton, splits=splits) for splits in peers.TRITON_SPLITS},
        ("sglang", "triton"),
        ("sglang.kernels.ops.attention.decode_attention",),
    ),
    "flashinfer": Contender("FlashInfer", ("decode",), {"": peers.flashinfer_decode}, *FLASHINFER, patience=300.0),
    "cascade": Contender(
        "FlashInfer cascade",
        ("decode",),
        {backend: partial(peers.flashinfer_cascade, backend=backend) for backend in ("fa2", "auto")},
        *FLASHINFER,
        patience=300.0,
    ),
}
ON_DEMAND: dict[str, Contender] = {
    "cuda-wide": _ours("CUDA, 128 rows", "decode", ours.cuda_wide),
}
"""Only measured if asked for by name."""
OURS = ("cuda-narrow", "tilelang", "tilelang-prefill", *ON_DEMAND)


def versions(contender: Contender) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for package in contender.packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
