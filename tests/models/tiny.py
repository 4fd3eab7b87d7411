"""Tiny models with random weights, one of each supported architecture and kind of RoPE, as folders that SGLang loads.

Two layers, grouped heads, the byte tokenizer of the soak run. They say nothing sensible, but with sharp distributions
that depend on positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.soak import tiny

POSITIONS = tiny.POSITIONS
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.25,
    "bos_token_id": tiny.BYTES,
    "eos_token_id": tiny.BYTES + 1,
    "pad_token_id": tiny.BYTES + 1,
    "tie_word_embeddings": False,
    "rope_parameters": PLAIN,
    "dtype": "float32",
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**PLAIN, "rope_type": kind, **more}}


PARTIAL = {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5}

SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-linear": ("Llama", {**_rope("linear", factor=4.0), "max_position_embeddings": POSITIONS // 4}),
    "llama-llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512),
    ),
    "llama-yarn": ("Llama", _rope("yarn", factor=8.0, original_max_position_embeddings=POSITIONS // 8)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "phi3": ("Phi3", {}),
    "phi3-partial": ("Phi3", PARTIAL),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True, **PARTIAL}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, **PARTIAL}),
    "cohere": ("Cohere", {"logit_scale": 1.0, "tie_word_embeddings": True}),
}
"""By a name of ours: the name of its configuration class, and what differs from SIZES."""


def model(name: str, **more: Any) -> Any:
    """The model, the same on every call. Biases and norms, which begin at 0 and 1, are random too."""
    family, differences = SUPPORTED[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **differences, **more})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for weight in made.parameters():
                if weight.dim() == 1:
                    weight.add_(torch.randn_like(weight), alpha=0.2)
    return made


def write(name: str, folder: Path) -> Path:
    """Write the model and a tokenizer into `folder`, which is made if it is missing; returns it."""
    tiny.write(folder)
    model(name).save_pretrained(folder)
    return folder
