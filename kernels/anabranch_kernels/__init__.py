"""Attention over segmented paged KV: any number of intervals per request, each at its own position shift.

It knows tensors only, neither states nor servers. Every function gives `(out, lse)`; `reference` is the definition.
"""

from anabranch_kernels.plan import BatchPlan, Part, RequestPlan, plan_batch
from anabranch_kernels.reference import segmented_attention
from anabranch_kernels.rotary import Rotary

__all__ = ["BatchPlan", "Part", "RequestPlan", "Rotary", "plan_batch", "segmented_attention"]
