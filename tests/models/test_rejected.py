"""Every feature that states cannot live with is refused by its name, read from the configurations that have it.

The configurations are transformers' own, tiny. No model is made here but the one that is served.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import transformers

from anabranch_server.models import ARCHITECTURES, FEATURES, REFUSED_ROPES, traits
from tests.models import tiny
from tests.serving import SMALL, Served, serve

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
ENDS: dict[str, Any] = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MROPE = {"text_config": {**SIZES, "rope_parameters": {**tiny.PLAIN, "mrope_section": [2, 1, 1]}}}
DUAL = {"chunk_size": 8192, "local_size": 1024, "original_max_position_embeddings": 32768}


def config(family: str, **more: Any) -> dict[str, Any]:
    """As SGLang hands it over: the text configuration of a model of this family."""
    made = getattr(transformers, f"{family}Config")(**{**SIZES, **ENDS, **more})
    return {"architectures": [f"{family.removesuffix('Text')}ForCausalLM"], **_named(made.get_text_config().to_dict())}


def _named(parts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parts.items() if key != "architectures" or value}


REFUSED = [
    ("Llama", {"rope_parameters": DYNAMIC}, "dynamic NTK RoPE"),
    ("Llama", {"rope_parameters": {**LONG, "original_max_position_embeddings": 64}}, "LongRoPE"),
    ("Phi3", {"rope_scaling": {**LONG, "type": "longrope"}, "original_max_position_embeddings": 64}, "LongRoPE"),
    ("Qwen2VL", MROPE, "M-RoPE"),
    ("Qwen2_5_VL", MROPE, "M-RoPE"),
    ("Qwen3VL", MROPE, "M-RoPE"),
    ("Glm4v", MROPE, "M-RoPE"),
    ("Bloom", {}, "ALiBi"),
    ("Mpt", {}, "ALiBi"),
    ("Falcon", {"alibi": True}, "ALiBi"),
    ("Mistral", {"sliding_window": 4096}, "sliding-window attention"),
    ("Qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, "sliding-window attention"),
    ("Phi3", {"sliding_window": 2047}, "sliding-window attention"),
    ("Gemma2", {}, "sliding-window attention"),
    ("Gemma3Text", {"num_hidden_layers": 6}, "sliding-window attention"),
    ("Cohere2", {}, "sliding-window attention"),
    ("Llama4Text", {}, "chunked attention"),
    ("Qwen2", {"dual_chunk_attention_config": DUAL}, "dual-chunk attention"),
    ("GptOss", {}, "attention sinks"),
    ("DeepseekV2", {}, "multi-head latent attention (MLA)"),
    ("DeepseekV3", {}, "multi-head latent attention (MLA)"),
    ("Mamba", {}, "recurrent or linear-attention layers"),
    ("Mamba2", {"num_heads": 1}, "recurrent or linear-attention layers"),
    ("Jamba", {}, "recurrent or linear-attention layers"),
    ("FalconH1", {}, "recurrent or linear-attention layers"),
    ("Lfm2", {}, "recurrent or linear-attention layers"),
    ("Qwen3Next", {}, "recurrent or linear-attention layers"),
    ("T5", {}, "encoder-decoder attention"),
    ("Bart", {}, "encoder-decoder attention"),
    ("Whisper", {}, "encoder-decoder attention"),
    ("GPT2", {}, "learned positions instead of RoPE"),
    ("OPT", {}, "learned positions instead of RoPE"),
    ("SmolLM3", {}, "layers without RoPE"),
    ("Ministral3", {}, "attention that is scaled by position"),
    ("Llama", {"attn_logit_softcapping": 50.0}, "soft-capped attention scores"),
    ("Llama", {"use_bidirectional_attention": True}, "bidirectional attention"),
    ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "use_fope": True}}, "Fourier"),
    ("Llama", {"architectures": ["LlamaModel"]}, "does not generate"),
    ("Llama", {"architectures": ["LlamaForSequenceClassification"]}, "does not generate"),
    ("Qwen2", {"architectures": ["Qwen2ForRewardModel"]}, "does not generate"),
    ("Bert", {"architectures": ["BertModel"]}, "does not generate"),
    ("GPTNeoX", {}, "the architecture GPTNeoXForCausalLM"),
    ("Gemma", {}, "the architecture GemmaForCausalLM"),
]


@pytest.mark.parametrize(("family", "more", "name"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_a_model_is_refused_by_the_name_of_its_feature(family: str, more: dict[str, Any], name: str):
    assert name in (traits(config(family, **more)).unsupported or "it is supported")


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_llama_cpp_19928_m_rope_cannot_be_shifted_and_is_refused_by_name(family: str):
    """A position is three numbers there, and one shift would move all of them."""
    assert "M-RoPE" in (traits(config(family, **MROPE)).unsupported or "it is supported")


def test_scaled_rope_is_refused_where_sglang_ignores_it():
    scaled = {"rope_parameters": {**tiny.PLAIN, "rope_type": "linear", "factor": 2.0}}
    found = traits(config("StableLm") | scaled)
    assert found.unsupported == "scaled RoPE, which SGLang does not apply there (StableLmForCausalLM)"


def test_each_refusal_names_the_architecture_too():
    assert traits(config("GptOss")).unsupported == "attention sinks (GptOssForCausalLM)"


def test_ropes_that_differ_between_layers_are_refused_even_if_all_layers_see_everything():
    ropes = {"full_attention": dict(tiny.PLAIN), "other": {**tiny.PLAIN, "rope_theta": 1e6}}
    found = traits(config("Llama") | {"rope_parameters": ropes})
    assert found.unsupported == "rotary embeddings that differ between layers (LlamaForCausalLM)"


def test_a_kind_of_rope_that_nobody_knows_is_refused_by_its_name():
    found = traits(config("Llama") | {"rope_parameters": {"rope_type": "spiral"}})
    assert found.unsupported == "RoPE of the unknown type 'spiral' (LlamaForCausalLM)"


def test_a_supported_language_model_inside_a_larger_one_is_refused_as_the_larger_one():
    whole = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**SIZES, **ENDS))
    found = traits(whole.get_text_config().to_dict(), ["LlavaForConditionalGeneration"])
    assert found.unsupported == "the architecture LlavaForConditionalGeneration"
    assert "image" in (traits(whole.to_dict()).unsupported or "")


def test_every_feature_of_the_table_is_met_by_a_model():
    met = " ".join(str(traits(config(family, **more)).unsupported) for family, more, _ in REFUSED)
    elsewhere = {"rotary embeddings that differ between layers", "image, audio or video input"}
    assert [name for name, _ in FEATURES if name not in met and name not in elsewhere] == []


def test_supported_models_are_not_refused():
    for name, (family, more) in tiny.SUPPORTED.items():
        made = getattr(transformers, f"{family}Config")(**{**tiny.SIZES, **more})
        assert traits(made.to_dict() | {"architectures": [f"{family}ForCausalLM"]}).unsupported is None, name


def test_the_documentation_has_the_whole_table():
    page = (Path(__file__).parents[2] / "docs/guides/models.md").read_text()
    named = {*ARCHITECTURES, *REFUSED_ROPES.values(), *(name for name, _ in FEATURES)}
    assert [name for name in sorted(named) if name not in page] == []


# ---------------------------------------------------------------- served


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with dynamic NTK RoPE, which SGLang serves."""
    folder = tiny.write("llama", tmp_path_factory.mktemp("models") / "rejected")
    tiny.model("llama", rope_parameters=DYNAMIC).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served_without_states(rejected: Path, logs: Path) -> Iterator[Served]:
    with serve(rejected, (*SMALL, "--attention-backend", "torch_native"), logs / "rejected.log") as served:
        yield served


@pytest.mark.engine
def test_with_another_attention_plain_requests_work_and_states_are_refused(served_without_states: Served):
    refused = served_without_states.post(
        "/anabranch/v1/generate",
        id=token_hex(16),
        input=[{"text": "The river"}],
        sampling={"max_tokens": 2},
    )
    assert refused.status_code == 422, refused.text
    error = refused.json()["error"]
    assert error["code"] == "unsupported_model_feature", error
    assert "dynamic NTK RoPE (LlamaForCausalLM)" in error["message"]
    plain = served_without_states.post(
        "/generate", text="The river", sampling_params={"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    )
    assert plain.status_code == 200, plain.text
    assert plain.json()["meta_info"]["completion_tokens"] == 4


@pytest.mark.engine
def test_with_our_attention_the_server_does_not_start_and_says_why(rejected: Path):
    words = [sys.executable, "-m", "anabranch.cli", "serve", "--model-path", str(rejected), *SMALL]
    done = subprocess.run(words, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    reason = "anabranch serve: the attention backend 'anabranch' does not support dynamic NTK RoPE (LlamaForCausalLM)"
    assert done.stderr.strip().splitlines()[-1].startswith(reason), done.stderr[-4000:]
