"""A server that lets in the keys of a file only: who may do what, what the operator sees, where keys never appear."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.engine.api import PATH, body, error, inherit, ok, send
from tests.life.fleet import KEYS, POOL
from tests.life.living import STATES, Live, noise, until

pytestmark = pytest.mark.engine

PLAIN = {"input_ids": [65], "sampling_params": {"max_new_tokens": 1}}
CHAT = {"model": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture
def alice(walled: Live) -> Live:
    return walled.named(KEYS["alice"])


@pytest.fixture
def bob(walled: Live) -> Live:
    return walled.named(KEYS["bob"])


STRANGERS = {
    "none": {},
    "unknown": {"Authorization": "Bearer nobody-secret-4799"},
    "a name": {"Authorization": "Bearer alice"},
    "no scheme": {"Authorization": KEYS["alice"]},
    "another scheme": {"Authorization": f"Basic {KEYS['alice']}"},
    "longer": {"Authorization": f"Bearer {KEYS['alice']}x"},
    "shorter": {"Authorization": f"Bearer {KEYS['alice'][:-1]}"},
    "empty": {"Authorization": "Bearer"},
    "not ascii": {"Authorization": "Bearer schlüssel".encode()},
}


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_refused_everywhere(walled: Live, headers: dict):
    """Our endpoints and SGLang's; only what tells whether the server lives is open."""
    with httpx.Client(base_url=walled.url, headers=headers, timeout=60) as stranger:
        ours = [
            stranger.post(PATH, json=body(text=[65], n=1)),
            stranger.post(PATH, json={**body(text=[65], n=1), "stream": True}),
            stranger.get(STATES),
            stranger.get(f"{STATES}/{'0' * 32}"),
            stranger.delete(f"{STATES}/{'0' * 32}"),
            stranger.post(f"{STATES}/release", json={"ids": []}),
            stranger.get("/anabranch/v1/stats"),
            stranger.get("/anabranch/v1/health"),
        ]
        theirs = [
            stranger.post("/generate", json=PLAIN),
            stranger.post("/v1/chat/completions", json=CHAT),
            stranger.get("/v1/models"),
            stranger.post("/flush_cache"),
            stranger.post("/abort_request", json={"rid": "", "abort_all": True}),
        ]
        for answer in (*ours, *theirs):
            assert answer.status_code == 401, f"{answer.request.url}: {answer.text}"
            assert error(answer).code == "unauthorized"
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/health_generate").status_code == 200
        assert stranger.get("/metrics/").status_code == 200
    assert walled.rest()["created"] == walled.stats()["freed"]


def test_those_of_the_file_are_let_in(alice: Live, bob: Live):
    mine = ok(alice, text=noise(1, 20), n=3)
    assert alice.post("/generate", **PLAIN).status_code == 200
    assert alice.post("/v1/chat/completions", **CHAT).status_code == 200
    assert alice.get("/v1/models").status_code == 200
    assert ok(alice, [inherit(mine.id)], [65], 1).usage.context_tokens == 23
    assert error(send(bob, **body([inherit(mine.id)], [65], 1))).code == "state_not_found"
    assert (bob.info(mine.id).status_code, bob.delete(f"{STATES}/{mine.id}").status_code) == (404, 404)
    assert alice.listed() >= {mine.id}


CONTROLS = {
    "/flush_cache": {},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/abort_request": {"rid": "", "abort_all": True},
    "/pause_generation": {"mode": "abort"},
    "/release_memory_occupation": {},
}


@pytest.mark.parametrize("path", CONTROLS)
def test_sglangs_controls_need_the_operator(walled: Live, alice: Live, path: str):
    state = ok(alice, text=noise(2, 20)).id
    answer = alice.post(path, **CONTROLS[path])
    assert answer.status_code == 401, f"{path}: {answer.text}"
    assert error(answer).code == "unauthorized"
    assert alice.info(state).json()["resident"]


def test_the_operator_may_use_them(walled: Live, alice: Live):
    state = ok(alice, text=noise(2, 20)).id
    assert walled.flush().status_code == 200
    assert alice.info(state).status_code == 404  # states stay in memory here, so that clearing it loses them


def test_the_operator_sees_all_in_the_counts_and_no_state(walled: Live, alice: Live, bob: Live):
    states = [ok(alice, text=noise(3, 20), n=2).id, ok(alice, text=noise(4, 10), n=2).id]
    states.append(ok(bob, text=noise(5, 30), n=2).id)
    stats = walled.rest()
    by_name = {one["tenant"]: one for one in stats["tenants"]}
    assert (by_name["alice"]["states"], by_name["alice"]["held_tokens"]) == (2, 34)
    assert (by_name["bob"]["states"], by_name["bob"]["held_tokens"]) == (1, 32)
    assert (stats["states"], stats["held_tokens"]) == (3, 66)
    for event in ("created", "freed", "rejected"):
        assert stats[event] == sum(one[event] for one in by_name.values())
    assert walled.listed() == set()
    assert walled.info(states[0]).status_code == 404
    assert alice.stats()["tenants"] == []
    assert alice.stats()["free_tokens"] is None


def test_the_share_of_the_pool_that_states_may_occupy(walled: Live, alice: Live, bob: Live):
    """A quarter here: the rest is left to requests, plain ones too."""
    share = POOL // 4
    held = 0
    for seed in range(10):
        answer = send(alice, **body(text=noise(seed, 200)))
        if answer.status_code != 200:
            break
        held += 200
    else:
        pytest.fail(f"{held} tokens are held, more than {share}")
    assert share - 201 <= held <= share
    assert error(answer).code == "pool_exhausted"
    assert error(send(bob, **body(text=noise(1, 200)))).code == "pool_exhausted"
    plain = {"input_ids": noise(2, POOL - share - 100), "sampling_params": {"max_new_tokens": 5}}
    assert bob.post("/generate", **plain).status_code == 200
    assert walled.rest()["held_tokens"] == held


def test_metrics_by_tenant(walled: Live, alice: Live, bob: Live):
    ok(alice, text=noise(3, 20), n=2)
    send(bob, **body([inherit("0" * 32)], [65], 1))
    until(lambda: _series(walled, "anabranch_tokens", tenant="alice", kind="held") == 22, seconds=20)
    assert _series(walled, "anabranch_states", tenant="alice", condition="resident") == 1
    assert (_series(walled, "anabranch_created_total", tenant="alice") or 0) >= 1
    assert (_series(walled, "anabranch_rejected_total", tenant="bob") or 0) >= 1
    assert _series(walled, "anabranch_pool_tokens", use="total") == POOL
    uses = [_series(walled, "anabranch_pool_tokens", use=use) for use in ("free", "evictable", "held", "in_use")]
    assert sum(use or 0 for use in uses) == POOL


def _series(live: Live, name: str, **labels: str) -> float | None:
    for line in live.get("/metrics/").text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{key}="{label}"' in head for key, label in labels.items()):
            return float(value)
    return None


def test_keys_never_appear(walled: Live, alice: Live, bob: Live):
    """Neither those of the file nor those that were refused: in answers, metrics, or the log."""
    refused = httpx.get(walled.url + STATES, headers={"Authorization": "Bearer nobody-secret-4799"})
    broken = alice.post(PATH, id="x")
    missing = alice.info("0" * 32)
    generated = alice.post("/generate", **PLAIN)
    answers = [refused, broken, missing, generated, alice.get("/anabranch/v1/stats"), walled.get("/anabranch/v1/stats")]
    texts = [f"{answer.headers} {answer.text}" for answer in answers]
    texts += [walled.get("/metrics/").text, walled.log]
    for text in texts:
        assert not re.search(r"secret-47\d\d", text)
