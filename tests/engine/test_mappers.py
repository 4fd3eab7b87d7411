"""Cache mappers on a real server: what a child sees through one, what it costs, and what is left of it.

The model is the tiny one of the soak run: two layers, two KV heads of 16. Bit by bit, without a server, is
`test_mapping.py`'s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from anabranch import wire
from tests.engine.api import artifact, body, error, inherit, ok, send
from tests.life.living import LOGPROBS, TOLERANCE, noise, until
from tests.serving import Served, serve
from tests.soak import tiny

pytestmark = pytest.mark.engine

LAYERS, HEADS, WIDTH, RANK = 2, 2, 16, 3
FLAGS = ("--log-level", "warning", "--max-total-tokens", "600", "--max-running-requests", "8")


def weights(*sides: str, seed: int = 1, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """A random change of low rank to these sides in every layer."""
    dice = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(LAYERS):
        for side in sides:
            made[f"layers.{layer}.{side}.down"] = torch.randn(HEADS, WIDTH, RANK, generator=dice) * scale
            made[f"layers.{layer}.{side}.up"] = torch.randn(HEADS, RANK, WIDTH, generator=dice)
    return made


def no_values() -> dict[str, torch.Tensor]:
    """v + v @ 1 @ -1 = 0."""
    one = torch.eye(WIDTH).expand(HEADS, WIDTH, WIDTH)
    made = {f"layers.{layer}.v.down": one.contiguous() for layer in range(LAYERS)}
    return made | {f"layers.{layer}.v.up": -one.contiguous() for layer in range(LAYERS)}


CHANGED, ZERO = weights("k", "v"), {name: part * 0 for name, part in weights("k", "v").items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mappers")
    tiny.write(folder / "model")
    files = {"zero": ZERO, "changed": CHANGED, "mute": no_values()}
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    named = ",".join(f"{name}=low_rank:{folder / name}.safetensors" for name in ("zero", "changed", "mute"))
    env = {"OMP_WAIT_POLICY": "PASSIVE"}
    with serve(folder / "model", (*FLAGS, "--anabranch-mappers", named), folder / "log", env=env) as served:
        yield served


@pytest.fixture
def mapped(server: Served) -> Iterator[Served]:
    yield server
    assert server.process.poll() is None, server.log[-4000:]
    stats = server.release_all()
    assert stats["held_tokens"] == stats["evicted_tokens"] == 0, stats
    assert stats["free_tokens"] + stats["evictable_tokens"] == stats["total_tokens"], stats


def seen(served: Served, ref: dict, *more: dict) -> list[list[float]]:
    """What is answered through a reference, as logprobs; nothing stays."""
    found = ok(served, [ref, *more], [65, 66], 5, keep=False, sampling=LOGPROBS)
    assert found.logprobs is not None
    return [[value for _, value in sorted(token.top)] for token in found.logprobs]


def same(one: list[list[float]], other: list[list[float]]) -> None:
    assert torch.tensor(one) == pytest.approx(torch.tensor(other), abs=TOLERANCE)


def parent(served: Served, seed: int = 1, size: int = 30) -> wire.GenerateResponse:
    return ok(served, text=noise(seed, size), n=6)


# ---------------------------------------------------------------- what is seen


def test_what_changes_nothing_is_seen_as_without_a_mapper(mapped: Served):
    root = parent(mapped)
    child = ok(mapped, [inherit(root.id)], noise(2, 10), 4)
    for state in (root.id, child.id):
        plain = seen(mapped, inherit(state))
        for name in ("identity", "zero"):
            same(seen(mapped, inherit(state, mapper=name)), plain)
    span = {"span": (3, 20), "propagate": False}
    same(seen(mapped, artifact(root.id, mapper="zero", **span)), seen(mapped, artifact(root.id, **span)))


def test_what_a_mapper_makes_is_what_the_model_would_see_of_such_keys_and_values(mapped: Served, folder: Path):
    """Against the same model in transformers, whose cache is changed by hand."""
    own = noise(3, 40)
    root = ok(mapped, text=own, n=0)
    plain = seen(mapped, inherit(root.id))
    same(plain, by_hand(folder, own, {}))
    for name, tensors in (("changed", CHANGED), ("mute", no_values())):
        through = seen(mapped, inherit(root.id, mapper=name))
        same(through, by_hand(folder, own, tensors))
        assert torch.tensor(through) != pytest.approx(torch.tensor(plain), abs=0.1)


def by_hand(folder: Path, own: list[int], tensors: dict[str, torch.Tensor]) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    answer: list[list[float]] = []
    with torch.no_grad():
        cache = DynamicCache()
        model(torch.tensor([own]), past_key_values=cache)
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(own))[None])
        for layer, kv in enumerate(cache.layers):
            assert isinstance(kv, DynamicLayer)
            assert kv.keys is not None
            assert kv.values is not None
            change = _change(_rotated(kv.keys, cos, -sin), tensors, f"layers.{layer}.k")
            kv.keys = kv.keys + _rotated(change, cos, sin)
            kv.values = kv.values + _change(kv.values, tensors, f"layers.{layer}.v")
        new = [65, 66]
        while len(answer) < 5:
            logits = model(torch.tensor([new]), past_key_values=cache).logits[0, -1]
            logprobs = logits.log_softmax(-1)
            new = [int(logprobs.argmax())]
            top = logprobs.topk(3)
            answer.append([value for _, value in sorted(zip(top.indices.tolist(), top.values.tolist(), strict=True))])
    return answer


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


def _change(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """x: [1, heads, tokens, width]."""
    if f"{name}.down" not in tensors:
        return torch.zeros_like(x)
    return x @ tensors[f"{name}.down"] @ tensors[f"{name}.up"]


def test_a_mapped_reference_hands_on_what_it_made_and_explains_itself(mapped: Served):
    root = parent(mapped)
    through = ok(mapped, [inherit(root.id, mapper="changed")], [65], 3)
    again = mapped.post("/anabranch/v1/explain", id=through.id)
    (one,) = wire.Explanation.model_validate_json(again.content).intervals
    assert (one.state, one.mapper, one.start, one.stop, one.delta) == (root.id, "changed", 0, 36, 0)
    grand = ok(mapped, [inherit(through.id, mapper="identity")], [66], 1)
    found = wire.Explanation.model_validate_json(mapped.post("/anabranch/v1/explain", id=grand.id).content)
    assert [one.mapper for one in found.intervals] == ["changed+identity", "identity"]
    same(seen(mapped, inherit(through.id)), seen(mapped, inherit(through.id, mapper="identity")))


def test_a_state_and_the_same_through_a_mapper_are_seen_side_by_side(mapped: Served):
    root = parent(mapped)
    both = ok(mapped, [inherit(root.id), inherit(root.id, mapper="mute")], [65], 1)
    assert both.usage.context_tokens == 72


# ---------------------------------------------------------------- what it costs


def test_it_is_made_once_and_its_parent_stays_as_it_is(mapped: Served):
    root = parent(mapped)
    before, held = seen(mapped, inherit(root.id)), mapped.stats()["held_tokens"]
    first = ok(mapped, [inherit(root.id, mapper="changed")], [65], 2)
    once = mapped.stats()["held_tokens"]
    assert once == held + 36 + 3
    second = ok(mapped, [inherit(root.id, mapper="changed")], [66], 2)
    assert mapped.stats()["held_tokens"] == once + 3, "only its own tokens"
    ok(mapped, [artifact(root.id, span=(2, 9), mapper="changed")], [66], 2, keep=False)
    assert mapped.stats()["held_tokens"] == once + 3
    same(seen(mapped, inherit(root.id)), before)
    for state in (first.id, second.id):
        mapped.delete(f"/anabranch/v1/states/{state}")
    assert mapped.stats()["held_tokens"] == held, "nobody sees it any more"


def test_it_outlives_its_parent_as_long_as_somebody_sees_it(mapped: Served):
    root = parent(mapped)
    child = ok(mapped, [inherit(root.id, mapper="changed")], [65], 2)
    before = seen(mapped, inherit(child.id))
    mapped.delete(f"/anabranch/v1/states/{root.id}")
    assert mapped.stats()["held_tokens"] == 36 + 3
    same(seen(mapped, inherit(child.id)), before)


def test_what_left_memory_is_derived_again(mapped: Served):
    root = parent(mapped)
    child = ok(mapped, [inherit(root.id, mapper="changed")], [65], 2)
    before = seen(mapped, inherit(child.id))
    until(lambda: mapped.post("/flush_cache").status_code == 200)
    assert mapped.stats()["evicted_tokens"] == 36 + 36 + 3
    same(seen(mapped, inherit(child.id)), before)
    pressed = mapped.stats()["evictions"]
    big = ok(mapped, text=noise(9, 470), n=60, keep=False)
    assert big.usage.generated_tokens == 60
    assert mapped.stats()["evictions"] > pressed, "the pool was too small for both"
    same(seen(mapped, inherit(child.id)), before)


def test_where_there_is_no_room_it_is_refused_and_not_waited_for(mapped: Served):
    root = ok(mapped, text=noise(4, 300), n=0)
    answer = send(mapped, **body([inherit(root.id, mapper="changed")], [65], 2))
    assert error(answer).code == "pool_exhausted"
    assert mapped.stats()["held_tokens"] == 300


def test_what_one_is_made_of_does_not_make_room_for_another(mapped: Served):
    """Both are wanted at once, memory is full, and what was used least recently is the second one's source."""
    second, first = parent(mapped, 1, 114), parent(mapped, 2, 114)
    parent(mapped, 3, 294)
    refs = [inherit(first.id, mapper="zero"), inherit(second.id, mapper="zero")]
    before = mapped.stats()
    found = ok(mapped, refs, [65], 2, keep=False)
    after = mapped.stats()
    assert (found.usage.context_tokens, found.usage.computed_tokens) == (240, 1), "nothing is computed again"
    assert (after["evictions"] - before["evictions"], after["rebuilds"] - before["rebuilds"]) == (1, 2)


# ---------------------------------------------------------------- what is refused


def test_a_name_that_the_server_has_not_is_refused_by_its_place(mapped: Served):
    root = parent(mapped)
    refs = [inherit(root.id), inherit(root.id, mapper="shorter")]
    refused = error(send(mapped, **body(refs, [65], 1)))
    assert (refused.code, refused.param) == ("invalid_request", "refs.1.mapper")
    assert refused.hint == "this server has changed, identity, mute, zero"
    asked = mapped.post("/anabranch/v1/explain", spec={"refs": refs})
    assert error(asked).param == "spec.refs.1.mapper"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("a=low_rank:{folder}/missing.safetensors", "missing.safetensors"),
        ("a=low_rank:{folder}/wide.safetensors", "down is [2, 17, 3]"),
        ("a=unheard_of", "unknown kind 'unheard_of'"),
        ("a", "ANABRANCH_MAPPERS"),
    ],
)
def test_what_cannot_be_built_is_refused_at_start_in_one_line(folder: Path, setting: str, reason: str):
    wide = {"layers.0.v.down": torch.zeros(HEADS, WIDTH + 1, 3), "layers.0.v.up": torch.zeros(HEADS, 3, WIDTH + 1)}
    save_file(wide, folder / "wide.safetensors")
    words = [sys.executable, "-m", "anabranch.cli", "serve", "--model-path", str(folder / "model")]
    words += ["--anabranch-mappers", setting.format(folder=folder)]
    done = subprocess.run(words, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr.strip().splitlines()[-1]
