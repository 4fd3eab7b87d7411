"""A plain Llama forward in which who sees whom, and at which position, are explicit inputs.

It knows nothing of states, references or policies, and keeps no KV cache: every token is computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True, slots=True)
class Sight:
    """Who attends to whom and where: token i sees key j if `mask[i, j]`, at position `rows[row_of[i], j]`.

    mask: [n, n] bool; rows: [r, n] int64; row_of: [n] int64. `P[i, j] = rows[row_of[i], j]` is the per-consumer
    position matrix; tokens of one state share a row, so that keys are rotated r times and not n times.
    `P[i, i]` is the position of token i as a query.
    """

    mask: Tensor
    rows: Tensor
    row_of: Tensor

    @property
    def positions(self) -> Tensor:
        """The whole matrix P: [n, n] int64."""
        return self.rows[self.row_of]


@dataclass(frozen=True, slots=True)
class Llama:
    """Weights by their Hugging Face names, and the few numbers of the configuration that the forward needs."""

    weights: dict[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float

    @classmethod
    def load(cls, model_dir: str | Path, dtype: torch.dtype = torch.float32) -> Llama:
        """Read a model folder; transformers is used as a reader of files only."""
        from transformers import AutoModelForCausalLM

        return cls.of(AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype))

    @classmethod
    def of(cls, model: Any) -> Llama:
        """Take the weights of a loaded transformers Llama."""
        config = model.config
        rope = config.rope_parameters
        assert config.model_type == "llama" and config.hidden_act == "silu" and rope["rope_type"] == "default", config
        assert not config.attention_bias and not config.mlp_bias, "biases are not written here"
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        return cls(
            weights,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
            rope["rope_theta"],
        )

    @torch.inference_mode()
    def logprobs(self, tokens: Tensor, sight: Sight) -> Tensor:
        """tokens: [n] int64. Returns [n, vocab]: natural log probabilities of what follows each token."""
        w, n = self.weights, len(tokens)
        x = w["model.embed_tokens.weight"][tokens]
        angles = self._angles(sight.rows, x.dtype)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            h = self._norm(x, w[at + "input_layernorm.weight"])
            q = linear(h, w[at + "self_attn.q_proj.weight"]).view(n, self.heads, self.head_dim)
            k = linear(h, w[at + "self_attn.k_proj.weight"]).view(n, self.kv_heads, self.head_dim)
            v = linear(h, w[at + "self_attn.v_proj.weight"]).view(n, self.kv_heads, self.head_dim)
            seen = self._attend(q, k, v, sight, angles)
            x = x + linear(seen.reshape(n, -1), w[at + "self_attn.o_proj.weight"])
            h = self._norm(x, w[at + "post_attention_layernorm.weight"])
            gate, up = linear(h, w[at + "mlp.gate_proj.weight"]), linear(h, w[at + "mlp.up_proj.weight"])
            x = x + linear(silu(gate) * up, w[at + "mlp.down_proj.weight"])
        x = self._norm(x, w["model.norm.weight"])
        return linear(x, w["lm_head.weight"]).log_softmax(-1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, angles: tuple[Tensor, Tensor]) -> Tensor:
        """q: [n, heads, d]; k, v: [n, kv_heads, d], none of them rotated yet. Returns [n, heads, d]."""
        share = self.heads // self.kv_heads
        out = torch.empty_like(q)
        for row in range(len(sight.rows)):
            consumers = (sight.row_of == row).nonzero()[:, 0]
            cos, sin = angles[0][row], angles[1][row]
            keys = _rotate(k, cos, sin).repeat_interleave(share, dim=1)
            queries = _rotate(q[consumers], cos[consumers], sin[consumers])
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.head_dim**-0.5
            scores = scores.masked_fill(~sight.mask[consumers], float("-inf"))
            weight = scores.double().softmax(-1).to(v.dtype)
            out[consumers] = torch.einsum("hqk,khd->qhd", weight, v.repeat_interleave(share, dim=1))
        return out

    def _angles(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [r, n, 1, d / 2], computed in fp64: rounding of angles is then nobody's excuse."""
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angle = rows.double()[..., None, None] * self.theta**-half
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [n, heads, d], rotated in the planes (i, i + d / 2); cos, sin: [n, 1, d / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
