"""The attention backend `anabranch`: segmented attention inside SGLang's forward.

It turns rows of `req_to_token` and the side tables into a batch plan once a step, and runs the kernels on it. The
attention itself is `anabranch_kernels`'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from anabranch_kernels import BatchPlan, Rotary, plan_batch, segmented_attention
from anabranch_server.engine import rows, startup
from anabranch_server.engine.versions import UnsupportedSGLang

FREQUENCIES: dict[type, Callable[[Any], torch.Tensor]] = {
    RotaryEmbedding: lambda rotary: rotary._compute_inv_freq(rotary.base),
    LinearScalingRotaryEmbedding: lambda rotary: rotary._compute_inv_freq(rotary.base) / rotary.scaling_factors[0],
    Llama3RotaryEmbedding: lambda rotary: rotary._compute_inv_freq(rotary.base),
    YaRNScalingRotaryEmbedding: lambda rotary: rotary._compute_inv_freq(rotary.scaling_factor),
}
"""Radians per position and plane, of each kind of rotary layer that has such a number. Exact types: a subclass, such as
the one for M-RoPE, is another kind."""


class AnabranchAttention(AttentionBackend):
    def __init__(self, model_runner: Any):
        super().__init__()
        startup.refuse_model(model_runner.server_args, model_runner.model_config)
        if model_runner.device != "cpu" and not model_runner.server_args.disable_cuda_graph:
            raise RuntimeError(
                "the attention backend 'anabranch' cannot run in CUDA graphs yet: add --disable-cuda-graph"
            )
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.rotary = rotary_of(model_runner.model)
        self.plan = BatchPlan(())

    def init_forward_metadata(self, forward_batch: Any) -> None:
        table = rows.current()
        row_ids = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        decode = forward_batch.forward_mode.is_decode()
        slots = [self.req_to_token_pool.req_to_token[row, :n] for row, n in zip(row_ids, lengths, strict=True)]
        self.plan = plan_batch(
            slots,
            [1] * len(slots) if decode else forward_batch.extend_seq_lens.tolist(),
            [table.parts.get(row, ()) if table is not None else () for row in row_ids],
        )

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """q: [tokens, q_heads * head_dim]. Returns [tokens, q_heads * v_head_dim]."""
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        out, _ = segmented_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.plan,
            scale=layer.scaling,
            rotary=self.rotary,
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def rotary_of(model: torch.nn.Module) -> Rotary:
    """The rotation that all layers of the model share. Raises UnsupportedSGLang if there is none, or not one only.

    Cosines and sines that are scaled, as YaRN's are, make no difference: keys and queries have that in them already,
    and turning a query further is a pure rotation.
    """
    found = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if len(found) != 1:
        what = "no rotary embedding of SGLang's own" if not found else "rotary embeddings that differ between layers"
        raise UnsupportedSGLang(f"the attention backend 'anabranch' does not support a model with {what}")
    (module,) = found
    frequencies = FREQUENCIES.get(type(module))
    if frequencies is None:
        raise UnsupportedSGLang(f"the attention backend 'anabranch' does not support {type(module).__name__}")
    return Rotary(frequencies(module), interleaved=not module.is_neox_style)
