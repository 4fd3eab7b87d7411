"""What a configuration says a model can do, and what a stamp says of two states that do not fit.

Configurations are written out as Hugging Face files have them; transformers is not imported.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from anabranch_server.models import ModelStamp, ModelTraits, traits

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "transformers_version": "5.12.1",
    "use_cache": True,
    "vocab_size": 49152,
}
"""As transformers 5 writes it."""

OLD: dict[str, Any] = {key: value for key, value in SMOLLM2.items() if key != "rope_parameters"} | {
    "rope_scaling": None,
    "rope_theta": 100000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
}
"""As transformers 4 wrote it."""

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_a_llama_of_today_can_do_everything():
    assert traits(SMOLLM2) == ModelTraits(8192, "rope_theta=100000.0, rope_type=default")


def test_a_llama_of_yesterday_can_too():
    found = traits(OLD)
    assert (found.max_positions, found.unsupported, found.unshiftable) == (8192, None, None)
    assert "rope_theta=100000" in found.rope


def test_without_any_rope_entry_the_base_is_the_one_that_llama_began_with():
    bare = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    assert traits(bare) == ModelTraits(2048, "rope_theta=10000.0")


def test_llama3_scaling_is_usable_but_not_shifted():
    today = traits(SMOLLM2 | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "max_position_embeddings": 131072})
    before = traits(OLD | {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "max_position_embeddings": 131072})
    for found in (today, before):
        assert found.max_positions == 131072
        assert found.unsupported is None
        assert found.unshiftable == "RoPE scaling of type 'llama3'"
        assert "factor=8.0" in found.rope
        assert "rope_theta=500000.0" in found.rope


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_every_kind_of_scaling_is_named_in_either_spelling(kind: str, key: str):
    found = traits(OLD | {"rope_scaling": {key: kind, "factor": 2.0}})
    assert found.unshiftable == f"RoPE scaling of type {kind!r}"


def test_a_scaling_that_says_default_is_none():
    assert traits(OLD | {"rope_scaling": {"rope_type": "default"}}).unshiftable is None
    assert traits(OLD | {"rope_scaling": {"type": "default"}}).unshiftable is None


def test_two_ropes_that_differ_in_anything_have_different_names():
    ropes = [
        traits(SMOLLM2).rope,
        traits(SMOLLM2 | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}).rope,
        traits(SMOLLM2 | {"rope_parameters": LLAMA3 | {"rope_theta": 100000.0}}).rope,
        traits(SMOLLM2 | {"rope_parameters": LLAMA3 | {"rope_theta": 100000.0, "factor": 32.0}}).rope,
    ]
    assert len(set(ropes)) == 4


def test_the_name_of_a_rope_does_not_depend_on_the_order_of_its_entries():
    turned = dict(reversed(SMOLLM2["rope_parameters"].items()))
    assert traits(SMOLLM2 | {"rope_parameters": turned}).rope == traits(SMOLLM2).rope


def test_sliding_windows_are_not_supported_and_named():
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 32768}
    assert traits(mistral).unsupported == "sliding-window attention (MistralForCausalLM)"
    assert traits(SMOLLM2 | {"sliding_window": 4096}).unsupported == "sliding-window attention (LlamaForCausalLM)"


def test_a_window_that_is_off_is_no_window():
    for off in ({"sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False}):
        assert traits(SMOLLM2 | off).unsupported is None


def test_an_architecture_that_was_not_tested_is_not_supported_and_named():
    for name in ("Qwen2ForCausalLM", "MambaForCausalLM", "LlamaForSequenceClassification"):
        assert traits(SMOLLM2 | {"architectures": [name]}).unsupported == f"the architecture {name}"


@pytest.mark.parametrize("architectures", [None, []])
def test_a_model_without_a_name_is_not_supported(architectures: list[str] | None):
    assert "unnamed" in (traits(SMOLLM2 | {"architectures": architectures}).unsupported or "")
    assert "unnamed" in (traits({}).unsupported or "")


@pytest.mark.parametrize("declared", [None, 0])
def test_a_model_without_a_position_limit_is_not_supported(declared: int | None):
    found = traits(SMOLLM2 | {"max_position_embeddings": declared})
    assert found.max_positions == 0
    assert found.unsupported == "a position limit that is not declared (LlamaForCausalLM)"


def test_reading_a_configuration_does_not_change_it():
    config = OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    traits(config)
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0}


# ---------------------------------------------------------------- stamps

STAMP = ModelStamp("SmolLM2", "1", "bfloat16", "auto", "rope_theta=100000.0")


def test_equal_stamps_do_not_differ():
    twin = replace(STAMP)
    assert twin == STAMP
    assert STAMP.differences(twin) == ""


def test_every_field_of_a_stamp_counts():
    for field in fields(ModelStamp):
        other = replace(STAMP, **{field.name: "something else"})
        assert other != STAMP
        mine = getattr(STAMP, field.name) or "none"
        assert STAMP.differences(other) == f"{field.name} {mine}, not something else"


def test_differences_are_told_from_the_states_side_and_all_of_them():
    other = replace(STAMP, weights_version="2", adapter="poet")
    assert STAMP.differences(other) == "weights_version 1, not 2; adapter none, not poet"
    assert other.differences(STAMP) == "weights_version 2, not 1; adapter poet, not none"
