"""The oracle's forward for any architecture: the transformers library's, with the attention written out here.

It trusts that library for everything but attention, and SGLang and our kernels for nothing. `llama.py` is written
without the library, and the two are held against each other.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .llama import Sight

NAME = "anabranch_oracle"
INTERLEAVED = frozenset({"glm4", "cohere"})
"""Model types that pair neighbours, (0, 1), (2, 3), ...; all others pair the halves of what turns, (0, d / 2), ..."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The rotation by a number of positions. inv_freq: [planes], radians per position."""

    inv_freq: Tensor
    interleaved: bool

    def by(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., n, d], token j turned by `positions[j]`; entries beyond the planes stay. Complex numbers, fp64."""
        planes = len(self.inv_freq)
        head, rest = x[..., : 2 * planes].double(), x[..., 2 * planes :]
        pairs = head.unflatten(-1, (planes, 2) if self.interleaved else (2, planes))
        across = -1 if self.interleaved else -2
        z = torch.complex(*pairs.unbind(across)) * torch.polar(
            torch.ones(len(positions), planes, dtype=torch.float64), positions.double()[:, None] * self.inv_freq
        )
        turned = torch.stack((z.real, z.imag), across).flatten(-2).to(x.dtype)
        return torch.cat((turned, rest), -1)


_CURRENT: ContextVar[tuple[Sight, Turn]] = ContextVar("what attention is to do; not every model passes arguments on")


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model of the transformers library in which who sees whom, and at which position, are explicit inputs."""

    model: Any
    turn: Turn

    @classmethod
    def load(cls, model_dir: str | Path, dtype: torch.dtype = torch.float64) -> LibraryModel:
        from transformers import AutoModelForCausalLM

        return cls.of(AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype))

    @classmethod
    def of(cls, model: Any) -> LibraryModel:
        """Take over a loaded model: its attention is ours from now on."""
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, _attend)
        model.eval().set_attn_implementation(NAME)
        turn = Turn(model.base_model.rotary_emb.inv_freq.double(), model.config.model_type in INTERLEAVED)
        return cls(model, turn)

    @torch.inference_mode()
    def logprobs(self, tokens: Tensor, sight: Sight) -> Tensor:
        """tokens: [n] int64. Returns [n, vocab]: natural log probabilities of what follows each token.

        Every key is turned to its own position by the library, and from there by our attention to where each consumer
        has it.
        """
        native = sight.positions.diagonal()
        token = _CURRENT.set((sight, self.turn))
        try:
            out = self.model(input_ids=tokens[None], position_ids=native[None], use_cache=False)
        finally:
            _CURRENT.reset(token)
        return out.logits[0].log_softmax(-1)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """The library's interface. query: [1, heads, n, d]; key, value: [1, kv_heads, n, d]. Returns [1, n, heads, d]."""
    sight, turn = _CURRENT.get()
    native = sight.positions.diagonal()
    q, k, v = query[0], key[0], value[0]
    share = len(q) // len(k)
    out = torch.empty(q.shape[:-1] + v.shape[-1:], dtype=v.dtype)
    for row, positions in enumerate(sight.rows):
        consumers = (sight.row_of == row).nonzero()[:, 0]
        keys = turn.by(k, positions - native).repeat_interleave(share, dim=0)
        scores = q[:, consumers] @ keys.transpose(1, 2) * scaling
        scores = scores.masked_fill(~sight.mask[consumers], float("-inf"))
        weights = scores.double().softmax(-1).to(v.dtype)
        out[:, consumers] = weights @ v.repeat_interleave(share, dim=0)
    return out.transpose(0, 1)[None], None
