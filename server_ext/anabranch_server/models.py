"""What a model can do, read from its configuration, and the stamp that says what a state was computed under.

It knows Hugging Face configuration names only: no weights, no torch. A model that is not in the table is refused by
name before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

PLAIN_ROPE = frozenset({"LlamaForCausalLM"})
"""Architectures whose attention is plain causal RoPE over all positions, and that are tested."""


@dataclass(frozen=True, slots=True)
class ModelStamp:
    """Everything that must be equal for one state's KV to mean something to another request."""

    model: str
    weights_version: str
    dtype: str
    kv_dtype: str
    rope: str
    adapter: str | None = None

    def differences(self, other: ModelStamp) -> str:
        """`model A, not B; ...` for the fields that differ."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return "; ".join(
            f"{name} {mine or 'none'}, not {theirs or 'none'}" for name, mine, theirs in pairs if mine != theirs
        )


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the engine may do with a model. `unsupported` and `unshiftable` name the feature that forbids it."""

    max_positions: int
    rope: str
    unsupported: str | None = None
    unshiftable: str | None = None


def traits(config: Mapping[str, Any]) -> ModelTraits:
    """Read the traits of a model from its (text) configuration, as `config.json` has it."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return ModelTraits(
        max_positions=int(config.get("max_position_embeddings") or 0),
        rope=", ".join(f"{key}={rope[key]}" for key in sorted(rope)),
        unsupported=_unsupported(config),
        unshiftable=None if kind == "default" else f"RoPE scaling of type {kind!r}",
    )


def _unsupported(config: Mapping[str, Any]) -> str | None:
    architecture = (config.get("architectures") or ["an unnamed architecture"])[0]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return f"sliding-window attention ({architecture})"
    if architecture not in PLAIN_ROPE:
        return f"the architecture {architecture}"
    if not config.get("max_position_embeddings"):
        return f"a position limit that is not declared ({architecture})"
    return None
