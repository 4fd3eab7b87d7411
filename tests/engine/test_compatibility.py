"""A state of other weights or of another adapter is readable by nobody: refused before execution, over HTTP and SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anabranch import AsyncClient, StateIncompatibleError
from tests.engine.api import body, error, inherit, ok, send
from tests.serving import SMALL, Served, serve

pytestmark = pytest.mark.engine

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


@pytest.fixture(scope="module")
def adapted(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two adapters, `calm` and `bold`."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "sitecustomize.py").write_text(UNPINNED)
    for seed, name in enumerate(("calm", "bold")):
        make_adapter(folder / name, seed, json.loads((model_dir / "config.json").read_text()))
    flags = (*SMALL, "--disable-overlap-schedule", "--enable-lora", "--lora-backend", "torch_native", "--lora-paths")
    adapters = [f"{name}={folder / name}" for name in ("calm", "bold")]
    with serve(model_dir, (*flags, *adapters), folder / "log", env={"PYTHONPATH": str(folder)}) as served:
        yield served


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


def generate(served: Served, adapter: str | None, *refs: dict) -> tuple[int, dict]:
    custom = {"anabranch": json.dumps({"refs": refs})}
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, "custom_params": custom}
    answer = served.post("/generate", text="Hello there", sampling_params=sampling, lora_path=adapter)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("reader", ["bold", None])
def test_a_state_of_another_adapter_is_refused(adapted: Served, reader: str | None):
    status, made = generate(adapted, "calm")
    assert status == 200, made
    state = made["meta_info"]["id"]
    assert generate(adapted, "calm", inherit(state))[0] == 200
    status, refused = generate(adapted, reader, inherit(state))
    assert status == 400
    assert "state_incompatible" in refused["error"]["message"]


async def test_a_state_of_an_adapter_is_refused_to_the_base_model(adapted: Served):
    state = generate(adapted, "bold")[1]["meta_info"]["id"]
    assert error(send(adapted, **body([inherit(state)], "x", 1))).code == "state_incompatible"


async def test_a_state_of_the_weights_before_an_update_is_refused(stepped: Served):
    async with AsyncClient(stepped.url) as client:
        mine = (await client.root("Hello").generate(max_tokens=1)).state
        before = ok(stepped, text="Hello", n=1)
        update = stepped.post("/update_weights_from_disk", model_path=stepped.model_dir, flush_cache=False)
        assert update.status_code == 200, update.text
        found = error(send(stepped, **body([inherit(before.id)], "x", 1)))
        assert found.code == "state_incompatible"
        assert "weights_version" in found.message
        with pytest.raises(StateIncompatibleError):
            await mine.generate("x")
        after = ok(stepped, text="Hello", n=1)
        assert ok(stepped, [inherit(after.id)], "x", 1).usage.reused_tokens == after.usage.computed_tokens + 1
