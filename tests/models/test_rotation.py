"""What our attention reads off SGLang's rotary layers, against the cosines and sines that those layers really use.

No server and no model: the layers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from anabranch_kernels import Rotary
from anabranch_server.engine.attention import rotary_of
from anabranch_server.engine.versions import UnsupportedSGLang

HEAD = 64
LIMIT = 4096
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
}


@pytest.fixture(autouse=True)
def sglang_has_arguments() -> Iterator[None]:
    """Its layers read the server's arguments when they are made."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    yield
    runtime_context.reset_context()


def layer(rope: dict[str, Any] | None, *, neox: bool = True, part: float = 1.0, base: float = 10000.0) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(
        HEAD, HEAD, LIMIT, int(base), neox, dict(rope) if rope else None, torch.float32, partial_rotary_factor=part
    )


def turned_by_the_table(module: Any, x: torch.Tensor, position: int) -> torch.Tensor:
    """What the layer does to `x` at `position`, without the factor on cosine and sine, from its table alone."""
    cos, sin = module.cos_sin_cache[position].double().chunk(2)
    size = (cos.square() + sin.square()).sqrt()
    cos, sin, planes = cos / size, sin / size, len(cos)
    out = x.double().clone()
    for plane in range(planes):
        one, two = (plane, plane + planes) if module.is_neox_style else (2 * plane, 2 * plane + 1)
        out[..., one] = x[..., one] * cos[plane] - x[..., two] * sin[plane]
        out[..., two] = x[..., two] * cos[plane] + x[..., one] * sin[plane]
    return out.float()


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_turns_as_the_layer_would_have_turned_it(kind: str, neox: bool, part: float):
    module = layer(KINDS[kind], neox=neox, part=part)
    rotary = rotary_of(nn.ModuleList([module]))
    x = torch.randn(3, HEAD)
    for position in (1, 2, 63, 1000):
        expected = turned_by_the_table(module, x, position)
        torch.testing.assert_close(rotary.turned(x, position), expected, atol=3e-4, rtol=0)
        assert (expected - x).abs().max() > 0.1
    assert torch.equal(rotary.turned(x, 5)[..., int(HEAD * part) :], x[..., int(HEAD * part) :])


@pytest.mark.parametrize("kind", ["yarn", "yarn-untruncated"])
def test_yarn_scales_the_table_but_not_our_turn(kind: str):
    module = layer(KINDS[kind])
    assert abs(module.mscale - 1) > 0.01
    x = torch.randn(3, HEAD)
    turned = rotary_of(nn.ModuleList([module])).turned(x, 100)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_scaling_changes_the_frequencies():
    """Else the comparison above could not tell one kind from another."""
    plain = rotary_of(nn.ModuleList([layer(None)])).inv_freq
    for kind in ("linear", "llama3", "yarn"):
        assert not torch.allclose(rotary_of(nn.ModuleList([layer(KINDS[kind])])).inv_freq, plain)


def test_layers_that_share_a_rotation_have_one():
    module = layer(None)
    model = nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([module]), nn.ModuleList([module])])
    assert isinstance(rotary_of(model), Rotary)


def test_layers_that_turn_differently_are_refused():
    with pytest.raises(UnsupportedSGLang, match="differ between layers"):
        rotary_of(nn.ModuleList([layer(None), layer(None, base=1e6)]))


def test_a_model_without_a_rotary_layer_of_sglang_is_refused():
    """As under `--model-impl transformers`, where the library turns the keys, by tables that we do not read."""
    with pytest.raises(UnsupportedSGLang, match="no rotary embedding of SGLang's own"):
        rotary_of(nn.ModuleList([nn.Linear(2, 2)]))


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "DynamicNTKScalingRotaryEmbedding"),
        ({"rope_type": "dynamic", "alpha": 2.0}, "DynamicNTKAlphaRotaryEmbedding"),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "MRotaryEmbedding"),
        ({"rope_type": "proportional"}, "Gemma4RotaryEmbedding"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 32,
                "long_factor": [2.0] * 32,
                "original_max_position_embeddings": 512,
            },
            "Phi3LongRoPEScaledRotaryEmbedding",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_rotary_layer_of_another_kind_is_refused_by_its_name(rope: dict[str, Any], name: str):
    with pytest.raises(UnsupportedSGLang, match=f"does not support {name}"):
        rotary_of(nn.ModuleList([layer(rope)]))
