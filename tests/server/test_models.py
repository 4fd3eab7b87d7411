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
    assert (found.max_positions, found.unsupported) == (8192, None)
    assert "rope_theta=100000" in found.rope


def test_without_any_rope_entry_the_base_is_the_one_that_llama_began_with():
    bare = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    assert traits(bare) == ModelTraits(2048, "rope_theta=10000.0")


def test_llama3_scaling_is_supported_in_either_spelling():
    today = traits(SMOLLM2 | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "max_position_embeddings": 131072})
    before = traits(OLD | {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "max_position_embeddings": 131072})
    for found in (today, before):
        assert found.max_positions == 131072
        assert found.unsupported is None
        assert "factor=8.0" in found.rope
        assert "rope_theta=500000.0" in found.rope


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dynamic", "dynamic NTK RoPE"),
        ("longrope", "LongRoPE"),
        ("su", "LongRoPE"),
        ("mrope", "M-RoPE"),
        ("spiral", "RoPE of the unknown type 'spiral'"),
    ],
)
def test_a_scaling_whose_frequencies_depend_on_length_is_refused_in_either_spelling(kind: str, name: str, key: str):
    found = traits(OLD | {"rope_scaling": {key: kind, "factor": 2.0}})
    assert found.unsupported == f"{name} (LlamaForCausalLM)"


def test_a_scaling_that_says_default_is_none():
    assert traits(OLD | {"rope_scaling": {"rope_type": "default"}}).unsupported is None
    assert traits(OLD | {"rope_scaling": {"type": "default"}}).unsupported is None


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, 4 * 8192),
        ({"rope_parameters": YARN}, 4 * 8192),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 1024}}, 4 * 1024),
        ({"rope_parameters": YARN, "original_max_position_embeddings": 2048}, 4 * 2048),
        ({"rope_parameters": LLAMA3}, 8192),
    ],
    ids=["linear", "yarn", "yarn from less than is declared", "yarn, original outside", "llama3"],
)
def test_the_position_limit_is_the_length_of_sglangs_table_of_angles(changes: dict[str, Any], positions: int):
    assert traits(SMOLLM2 | changes).max_positions == positions


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


def test_kinds_of_layers_say_whether_a_window_is_in_use():
    window = {"sliding_window": 4096, "use_sliding_window": True}
    assert traits(SMOLLM2 | window | {"layer_types": ["full_attention"] * 2}).unsupported is None
    mixed = traits(SMOLLM2 | {"layer_types": ["full_attention", "sliding_attention"]})
    assert mixed.unsupported == "sliding-window attention (LlamaForCausalLM)"


def test_an_architecture_that_was_not_tested_is_not_supported_and_named():
    for name in ("Qwen9ForCausalLM", "GPTNeoXForCausalLM"):
        assert traits(SMOLLM2 | {"architectures": [name]}).unsupported == f"the architecture {name}"


def test_the_architecture_of_the_whole_counts_and_not_that_of_its_language_model():
    found = traits(SMOLLM2, ["LlavaForConditionalGeneration"])
    assert found.unsupported == "the architecture LlavaForConditionalGeneration"
    assert traits(SMOLLM2 | {"architectures": None}, ["LlamaForCausalLM"]).unsupported is None


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


def test_every_field_of_a_stamp_counts_but_the_name_of_an_adapter():
    assert replace(STAMP, adapter="a", adapter_name="poet") == replace(STAMP, adapter="a", adapter_name="critic")
    for field in fields(ModelStamp):
        if field.name == "adapter_name":
            continue
        other = replace(STAMP, **{field.name: "something else"})
        assert other != STAMP
        mine = getattr(STAMP, field.name) or "none"
        assert STAMP.differences(other) == f"{field.name} {mine}, not something else"


def test_differences_are_told_from_the_states_side_and_all_of_them():
    other = replace(STAMP, weights_version="2", adapter="poet")
    assert STAMP.differences(other) == "weights_version 1, not 2; adapter none, not poet"
    assert other.differences(STAMP) == "weights_version 2, not 1; adapter poet, not none"


def test_adapters_are_told_by_their_names_and_loads_of_one_name_are_told_apart():
    poet, critic = replace(STAMP, adapter="1", adapter_name="poet"), replace(STAMP, adapter="2", adapter_name="critic")
    assert poet.differences(critic) == "adapter poet, not critic"
    assert STAMP.differences(poet) == "adapter none, not poet"
    assert poet.differences(replace(poet, adapter="3")) == "adapter poet, not another load of that name"
