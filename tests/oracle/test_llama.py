"""The oracle's forward against transformers' where keys stay put, and against naive loops where they move.

The naive version is written pair by pair, so that sharing rotated keys among a state's tokens is what is tested.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anabranch.wire import Explicit

from . import tiny
from .brute import Node, look_all, sight
from .dags import plan
from .llama import Llama, Sight
from .test_brute import artifact, inherit, node


def filled(nodes: list[Node]) -> list[Node]:
    """The same DAG with varied tokens."""
    dice = torch.Generator().manual_seed(3)
    return [
        Node(n.id, n.refs, n.place, tuple(torch.randint(0, 256, (len(n.own),), generator=dice).tolist()), name=n.name)
        for n in nodes
    ]


def undisturbed() -> list[Node]:
    """Joins, spans, rewinds and barriers, every token seen at its native position."""
    return filled(
        [
            node("a", 5),
            node("b", 6, inherit("a")),
            node("c", 3, inherit("a", 2), artifact("b", 1, 4)),
            node("d", 40, place=Explicit(start=30)),
            node("v", 4, inherit("b", propagate=False), inherit("c"), artifact("d", 7, 31)),
            node("w", 3, inherit("v"), inherit("a", 1), place=Explicit(start=4)),
        ]
    )


def moved() -> list[Node]:
    """Keys seen at other positions than their own, by both signs, differently by different states."""
    return filled(
        [
            node("a", 4),
            node("b", 3, inherit("a", base=9), place=Explicit()),
            node("c", 3, artifact("b", 1, 3), inherit("a", 2), place="concat"),
            node("v", 2, inherit("c", base=40), artifact("a", 0, 4, base=3), place=Explicit(start=20)),
            node("w", 3, inherit("v"), inherit("b", propagate=False)),
        ]
    )


def theirs(hf: Any, tokens: Tensor, what: Sight) -> Tensor:
    """transformers' forward: one position per token, so only for a DAG in which nothing is moved."""
    own = what.positions.diagonal()
    mask = torch.where(what.mask, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        out = hf(input_ids=tokens[None], attention_mask=mask, position_ids=own[None], use_cache=False)
    return out.logits[0].log_softmax(-1)


def pair_by_pair(model: Llama, tokens: Tensor, what: Sight) -> Tensor:
    """The definition in fp64 loops: consumer i rotates each key j that it sees to P[i, j], and only then reads it."""
    w = {name: tensor.double() for name, tensor in model.weights.items()}
    places, n, d = what.positions.tolist(), len(tokens), model.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + model.eps).sqrt() * weight

    def turn(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for plane in range(d // 2):
            angle = position / model.theta ** (2 * plane / d)
            one, two = x[plane], x[plane + d // 2]
            out[plane] = one * math.cos(angle) - two * math.sin(angle)
            out[plane + d // 2] = two * math.cos(angle) + one * math.sin(angle)
        return out

    x = [w["model.embed_tokens.weight"][token] for token in tokens.tolist()]
    for layer in range(model.layers):
        here = {name.split(f"layers.{layer}.")[1]: t for name, t in w.items() if f"layers.{layer}." in name}
        h = [norm(one, here["input_layernorm.weight"]) for one in x]
        q, k, v = ([here[f"self_attn.{part}_proj.weight"] @ one for one in h] for part in "qkv")
        for i in range(n):
            heads = []
            for head in range(model.heads):
                kv = head * model.kv_heads // model.heads
                seen = [j for j in range(n) if what.mask[i, j]]
                query = turn(q[i][head * d : head * d + d], places[i][i])
                keys = [turn(k[j][kv * d : kv * d + d], places[i][j]) for j in seen]
                weight = torch.stack([query @ key / d**0.5 for key in keys]).softmax(0)
                heads.append(sum(a * v[j][kv * d : kv * d + d] for a, j in zip(weight, seen, strict=True)))
            x[i] = x[i] + here["self_attn.o_proj.weight"] @ torch.cat(heads)
            h_i = norm(x[i], here["post_attention_layernorm.weight"])
            gate, up = here["mlp.gate_proj.weight"] @ h_i, here["mlp.up_proj.weight"] @ h_i
            x[i] = x[i] + here["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
    out = torch.stack([w["lm_head.weight"] @ norm(one, w["model.norm.weight"]) for one in x])
    return out.log_softmax(-1)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def test_agrees_with_transformers_where_nothing_is_moved():
    tokens, what = sight(undisturbed())
    native = what.positions.diagonal()
    assert (what.positions == native)[what.mask].all(), "this DAG was meant to move nothing"
    got = tiny.llama().logprobs(tokens, what)
    assert gap(got, theirs(tiny.model(), tokens, what)) < 1e-4
    assert gap(got, theirs(tiny.model(), tokens, Sight(what.mask, what.rows * 2, what.row_of))) > 0.1
    everything = Sight(torch.ones_like(what.mask).tril(), what.rows, what.row_of)
    assert gap(got, theirs(tiny.model(), tokens, everything)) > 0.1


def test_agrees_with_pair_by_pair_where_keys_move():
    tokens, what = sight(moved())
    native = what.positions.diagonal()
    by = (what.positions - native)[what.mask]
    assert by.min() < 0 < by.max(), "this DAG was meant to move keys both ways"
    slow = pair_by_pair(tiny.llama(), tokens, what)
    assert gap(tiny.llama().logprobs(tokens, what).double(), slow) < 1e-4
    unmoved = Sight(what.mask, native.expand_as(what.rows), what.row_of)
    assert gap(tiny.llama().logprobs(tokens, unmoved).double(), slow) > 0.1


def test_a_chain_of_inherits_is_the_unsplit_text():
    nodes = filled([node("a", 5), node("b", 1, inherit("a")), node("c", 6, inherit("b"))])
    (whole,) = filled([node("a", 12)])
    tokens, what = sight(nodes)
    assert tokens.tolist() == list(whole.own)
    assert gap(tiny.llama().logprobs(tokens, what), tiny.llama().logprobs(*sight([whole]))) < 1e-4


def test_a_random_plan_agrees_with_pair_by_pair():
    nodes = [planned.node for planned in plan(60, lambda text: tiny.tokenize(text)[:150]).states]
    tokens, what = sight(filled(nodes))
    few = len(look_all(nodes)), len(tokens)
    assert few[1] < 120, f"pick a smaller seed: {few}"
    assert gap(tiny.llama().logprobs(tokens, what).double(), pair_by_pair(tiny.llama(), tokens, what)) < 2e-4
