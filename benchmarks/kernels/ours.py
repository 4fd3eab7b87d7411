"""Our kernels by name, each as the function that prepares a step. Which one a server uses is decided elsewhere.

None is imported before it is prepared, so that one that is not there leaves the others alone.
"""

from __future__ import annotations

from torch import Tensor

from anabranch_kernels import segmented_attention
from benchmarks.kernels.steps import CannotDo, Launch, Prepare, Step


def cuda_narrow(step: Step) -> Launch:
    from benchmarks.kernels.cuda import prepare

    return prepare(step)


def cuda_wide(step: Step) -> Launch:
    from benchmarks.kernels.cuda import prepare

    return prepare(step, wide=True)


def tilelang(step: Step) -> Launch:
    from benchmarks.kernels.tilelang import decode

    return decode(step)


def tilelang_wide(step: Step) -> Launch:
    from benchmarks.kernels.tilelang import decode

    return decode(step, wide=True)


def tilelang_prefill(step: Step) -> Launch:
    from benchmarks.kernels.tilelang import prefill

    return prefill(step)


def reference(step: Step) -> Launch:
    """The definition."""
    if step.shape.stored_as:
        raise CannotDo("scales of KV are not its business")
    batch = step.placed.batch_plan(str(step.device))

    def launch() -> tuple[Tensor, Tensor]:
        return segmented_attention(
            step.q, step.k_cache, step.v_cache, batch, scale=step.shape.scale, rotary=step.shape.rotary
        )

    return launch


ALL: dict[str, Prepare] = {
    "cuda-narrow": cuda_narrow,
    "cuda-wide": cuda_wide,
    "tilelang": tilelang,
    "tilelang-wide": tilelang_wide,
    "tilelang-prefill": tilelang_prefill,
    "reference": reference,
}
