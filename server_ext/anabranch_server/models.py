"""What a model can do, read from its configuration, and the stamp that says what a state was computed under.

It knows Hugging Face configuration names only: no weights, no torch. A model that is not in the table is refused by
name before anything runs. docs/guides/models.md is the same table for readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

Config = Mapping[str, Any]
"""A text configuration, as `config.json` has it."""

ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",  # whole heads turn, halves paired: the layout of GPT-NeoX
        "MistralForCausalLM",
        "Qwen2ForCausalLM",  # with biases
        "Qwen3ForCausalLM",  # queries and keys are normed before they turn
        "Phi3ForCausalLM",  # only the first part of a head turns, if so configured
        "StableLmForCausalLM",  # only the first part of a head turns
        "Glm4ForCausalLM",  # only the first part, and neighbours are paired: the layout of GPT-J
        "CohereForCausalLM",  # whole heads, neighbours paired
    }
)
"""Whose attention is plain causal RoPE over all positions, unless one of FEATURES says otherwise; each is tested."""

ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of RoPE with one frequency per plane at every position: what lets a key be read as if it sat elsewhere."""

REFUSED_ROPES = {
    "dynamic": "dynamic NTK RoPE",
    "longrope": "LongRoPE",
    "su": "LongRoPE",
    "mrope": "M-RoPE",
}

RECURRENT = frozenset({"linear_attention", "mamba", "recurrent", "conv"})
"""Kinds of layers."""
RECURRENT_MODELS = frozenset(
    {
        *("mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba", "zamba", "zamba2", "nemotron_h"),
        *("recurrent_gemma", "rwkv", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "kimi_linear", "minimax"),
        *("granitemoehybrid", "olmo_hybrid", "jet_nemotron", "bailing_moe_linear"),
    }
)
"""Types of models; a configuration does not always list its layers."""
ALIBI_MODELS = frozenset({"bloom", "mpt"})
UNROTATED_MODELS = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "openai-gpt", "ctrl", "xglm", "biogpt"})
UNSCALED = frozenset({"StableLmForCausalLM"})
"""SGLang builds their rotation without the scaling that the configuration names."""
NOT_GENERATING = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "RewardModel", "Model")
"""Ends of architecture names."""


@dataclass(frozen=True, slots=True)
class ModelStamp:
    """Everything that must be equal for one state's KV to mean something to another request."""

    model: str
    weights_version: str
    dtype: str
    kv_dtype: str
    rope: str
    adapter: str | None = None
    adapter_name: str | None = field(default=None, compare=False)
    """What it is called, which is no part of what it is: another version may have the same name."""

    def differences(self, other: ModelStamp) -> str:
        """`model A, not B; ...` for the fields that differ. Adapters by what they are called, if they are."""
        differing = [f.name for f in fields(self) if f.compare and getattr(self, f.name) != getattr(other, f.name)]
        return "; ".join(f"{name} {self._said(name)}, not {other._said(name, beside=self)}" for name in differing)

    def _said(self, name: str, beside: ModelStamp | None = None) -> str:
        if name != "adapter" or not self.adapter_name:
            return getattr(self, name) or "none"
        if beside is not None and beside.adapter_name == self.adapter_name:
            return "another load of that name"
        return self.adapter_name


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the engine may do with a model. `unsupported` names the feature that forbids states."""

    max_positions: int
    rope: str
    unsupported: str | None = None


def traits(config: Config, architectures: Sequence[str] | None = None) -> ModelTraits:
    """Read the traits of a model from its text configuration, and the architectures of the whole if it is a part."""
    rope = _rope(config)
    return ModelTraits(
        max_positions=_positions(config, rope),
        rope=", ".join(f"{key}={rope[key]}" for key in sorted(rope)),
        unsupported=_unsupported(config, architectures or config.get("architectures")),
    )


def _rope(config: Config) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def _kind(rope: Config) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _positions(config: Config, rope: Config) -> int:
    """How many positions SGLang has angles for. Two kinds of scaling stretch a shorter range by their factor."""
    declared = int(config.get("max_position_embeddings") or 0)
    factor = float(rope.get("factor") or 1.0)
    match _kind(rope):
        case "linear":
            return int(declared * factor)
        case "yarn":
            original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            return int((original or declared) * factor)
    return declared


def _unsupported(config: Config, architectures: Sequence[str] | None) -> str | None:
    """The first feature that forbids states, of the model `architectures[0]`."""
    architecture = (architectures or ["an unnamed architecture"])[0]
    if (feature := next((name for name, has in FEATURES if has(config)), None)) is not None:
        return f"{feature} ({architecture})"
    kind = _kind(_rope(config))
    if kind not in ROPES:
        return f"{REFUSED_ROPES.get(kind, f'RoPE of the unknown type {kind!r}')} ({architecture})"
    if kind != "default" and architecture in UNSCALED:
        return f"scaled RoPE, which SGLang does not apply there ({architecture})"
    if architecture.endswith(NOT_GENERATING):
        return f"a model that does not generate, for embedding, reward or classification ({architecture})"
    if architecture not in ARCHITECTURES:
        return f"the architecture {architecture}"
    if not config.get("max_position_embeddings"):
        return f"a position limit that is not declared ({architecture})"
    return None


# ---------------------------------------------------------------- features


def _layers(config: Config) -> frozenset[str]:
    named = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types") or ()
    return frozenset(map(str, named))


def _is_model(kinds: frozenset[str]) -> Callable[[Config], bool]:
    return lambda config: str(config.get("model_type", "")).removesuffix("_text") in kinds


def _has(*keys: str) -> Callable[[Config], bool]:
    return lambda config: any(config.get(key) for key in keys)


def _recurrent(config: Config) -> bool:
    return _is_model(RECURRENT_MODELS)(config) or bool(_layers(config) & RECURRENT)


def _sliding(config: Config) -> bool:
    if layers := _layers(config):
        return "sliding_attention" in layers
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True))


def _chunked(config: Config) -> bool:
    return "chunked_attention" in _layers(config) or bool(config.get("attention_chunk_size"))


def _alibi(config: Config) -> bool:
    nested = config.get("attn_config")
    return (
        _is_model(ALIBI_MODELS)(config)
        or bool(config.get("alibi"))
        or config.get("position_embedding_type") == "alibi"
        or (isinstance(nested, Mapping) and bool(nested.get("alibi")))
    )


def _bidirectional(config: Config) -> bool:
    return config.get("is_causal") is False or bool(config.get("use_bidirectional_attention"))


def _not_everywhere_rotated(config: Config) -> bool:
    """`no_rope_layers` has 0 for a layer without, 1 for one with."""
    return 0 in (config.get("no_rope_layers") or ())


def _scaled_by_position(config: Config) -> bool:
    return _has("attn_temperature_tuning", "llama_4_scaling")(config) or "llama_4_scaling_beta" in _rope(config)


def _several_ropes(config: Config) -> bool:
    return any(isinstance(part, Mapping) for part in _rope(config).values())


FEATURES: tuple[tuple[str, Callable[[Config], bool]], ...] = (
    ("encoder-decoder attention", _has("is_encoder_decoder")),
    ("M-RoPE", lambda config: "mrope_section" in _rope(config)),
    ("multi-head latent attention (MLA)", _has("kv_lora_rank")),
    ("recurrent or linear-attention layers", _recurrent),
    ("dual-chunk attention", _has("dual_chunk_attention_config")),
    ("attention sinks", _is_model(frozenset({"gpt_oss"}))),
    ("chunked attention", _chunked),
    ("sliding-window attention", _sliding),
    ("ALiBi", _alibi),
    ("learned positions instead of RoPE", _is_model(UNROTATED_MODELS)),
    ("layers without RoPE", _not_everywhere_rotated),
    ("rotary embeddings that differ between layers", _several_ropes),
    ("attention that is scaled by position", _scaled_by_position),
    ("soft-capped attention scores", _has("attn_logit_softcapping")),
    ("bidirectional attention", _bidirectional),
    ("Fourier position embedding", lambda config: bool(_rope(config).get("use_fope"))),
    ("image, audio or video input", _has("vision_config", "audio_config", "text_config", "thinker_config")),
)
"""Looked for in this order, so that a model with several is refused by its most telling one."""
