"""A tiny random Llama and a byte tokenizer for the oracle's own tests.

It is not the served model, and its numbers mean nothing.
"""

from __future__ import annotations

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .llama import Llama


@cache
def model() -> LlamaForCausalLM:
    """Two layers, grouped heads, tied embeddings; weights large enough for sharp, position-dependent attention."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.3,
        tie_word_embeddings=True,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval()


@cache
def llama() -> Llama:
    return Llama.of(model())


def tokenize(text: str) -> list[int]:
    return list(text.encode())
