"""Small real LoRA adapters with random weights, and what lets SGLang serve them on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

# SGLang's LoRA pins host memory, which a machine without a GPU cannot; ordinary memory serves as well there.
UNPINNED = """
import importlib.abc, sys

class Unpin(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "sglang.srt.lora":
            import torch
            def unpinned(make):
                return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)
            for make in ("tensor", "empty", "zeros", "arange", "ones"):
                setattr(torch, make, unpinned(getattr(torch, make)))
            torch.Tensor.pin_memory = lambda self, *args: self
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Unpin())
"""


def make_adapter(folder: Path, seed: int, config: dict) -> None:
    """A real adapter of rank 4 on the attention output, with random weights."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    width = config["hidden_size"]
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(4, width, generator=random) * 0.1
        weights[f"{name}.lora_B.weight"] = torch.randn(width, 4, generator=random) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
