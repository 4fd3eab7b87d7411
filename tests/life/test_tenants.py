"""Whose states they are: one key can do nothing to, and learn nothing of, another's. On a server that lets all keys in.

Keys of a file, the operator, and SGLang's own endpoints are in test_keys.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count

import httpx
import pytest

from tests.engine.api import PATH, artifact, body, error, inherit, new_id, ok, send
from tests.life.living import STATES, Live, asked_of, begun, decoding, noise, parsed, same

pytestmark = pytest.mark.engine

Ask = Callable[[Live, str], httpx.Response]
QUESTIONS: dict[str, Ask] = {
    "look at": lambda live, state: live.info(state),
    "inherit": lambda live, state: send(live, **{**body([inherit(state)], [65], 1), "id": "1" * 32}),
    "inherit a part": lambda live, state: send(live, **{**body([inherit(state, upto=1)], [65], 1), "id": "1" * 32}),
    "take from": lambda live, state: send(live, **{**body([artifact(state, span=[0, 2])], [65], 1), "id": "1" * 32}),
    "continue the chat of": lambda live, state: send(
        live, **{**body([inherit(state)], n=1), "id": "1" * 32, "input": [{"role": "user", "content": "x"}]}
    ),
    "explain": lambda live, state: live.post("/anabranch/v1/explain", id=state),
    "explain a child of": lambda live, state: live.post("/anabranch/v1/explain", spec={"refs": [inherit(state)]}),
    "renew": lambda live, state: live.post(f"{STATES}/{state}/renew", lease=5.0),
    "renew among others": lambda live, state: live.post(f"{STATES}/renew", ids=[state], lease=5.0),
    "release": lambda live, state: live.delete(f"{STATES}/{state}"),
    "release among others": lambda live, state: live.post(f"{STATES}/release", ids=[state]),
    "cancel": lambda live, state: live.post(f"{STATES}/{state}/cancel"),
    "continue over /generate": lambda live, state: live.post(
        "/generate",
        rid="2" * 32,
        input_ids=[65],
        sampling_params={"max_new_tokens": 1, "custom_params": _spec({"refs": [inherit(state)]})},
    ),
    "list": lambda live, state: live.get(STATES),
    "count": lambda live, state: live.get("/anabranch/v1/stats"),
}


_victims = count()


def _spec(fields: dict, **beside: object) -> dict:
    return {"anabranch": json.dumps(fields), **beside}


@pytest.fixture(params=["sealed", "running", "waiting", "released"])
def alices(request: pytest.FixtureRequest, lively: Live) -> Iterator[str]:
    """A state of Alice's in any condition."""
    alice = lively.named("alice-key")
    if request.param in ("sealed", "released"):
        state = ok(alice, text=noise(1, 20), n=5).id
        if request.param == "released":
            alice.release(state)
        yield state
        return
    running = body(text=noise(1, 20), n=1500)
    with decoding(alice, running):
        if request.param == "running":
            yield running["id"]
        else:
            waiting = body([inherit(running["id"])], [65], 2)
            answer = begun(alice, waiting, "waiting")
            yield waiting["id"]
            assert not answer.done()


def test_anothers_state_is_as_one_that_never_existed(lively: Live, alices: str):
    """Every answer to Bob is, byte for byte, the one about an id that nobody ever used; and nothing happened to it."""
    alice, bob = lively.named("alice-key"), lively.named("bob-key")
    before = (alice.info(alices).json().get("status"), alice.listed())
    never = new_id()
    for what, ask in QUESTIONS.items():
        of_hers, of_none = ask(bob, alices), ask(bob, never)
        texts = [answer.text.replace(alices, "ID").replace(never, "ID") for answer in (of_hers, of_none)]
        if what == "count":
            texts = [_without_own_events(text) for text in texts]
        assert texts[0] == texts[1], what
        assert of_hers.status_code == of_none.status_code, what
        assert of_hers.headers.keys() == of_none.headers.keys(), what
    assert (alice.info(alices).json().get("status"), alice.listed()) == before


def _without_own_events(text: str) -> str:
    """Bob's own refused requests are counted, which is his business."""
    return json.dumps({**json.loads(text), "rejected": None})


def test_nobodys_list_or_counts_show_anothers(lively: Live):
    alice, bob = lively.named("alice-key"), lively.named("bob-key")
    state = ok(alice, text=noise(2, 20), n=5)
    assert alice.listed() == {state.id}
    assert bob.listed() == lively.listed() == set()
    mine, his = alice.stats(), bob.stats()
    assert (mine["states"], mine["held_tokens"]) == (1, 25)
    assert (his["states"], his["held_tokens"], his["created"]) == (0, 0, 0)
    for pool in ("free_tokens", "evictable_tokens", "in_use_tokens"):
        assert mine[pool] is None, "what is left tells what others hold"


def test_one_id_of_two_keys_is_two_states(lively: Live):
    alice, bob = lively.named("alice-key"), lively.named("bob-key")
    name = new_id()
    for live, seed in ((alice, 3), (bob, 4)):
        assert send(live, **{**body(text=noise(seed, 20), n=4), "id": name}).status_code == 200
    answers = [asked_of(live, name) for live in (alice, bob)]
    expected = []
    for seed in (3, 4):
        whole = ok(lively, text=noise(seed, 20), n=4)
        expected.append(asked_of(lively, whole.id))
    for answer, other in zip(answers, expected, strict=True):
        same(answer, other)
    alice.release(name)
    assert bob.listed() == {name}
    same(asked_of(bob, name), answers[1])
    lively.flush()
    same(asked_of(bob, name), answers[1])


def test_one_request_of_two_keys_is_two_generations(lively: Live):
    """The same id and body: nobody is attached to another's, nor given the remembered answer."""
    request = body(text=noise(5, 20), n=60, sampling={"temperature": 1.0})
    alice, bob = lively.named("alice-key"), lively.named("bob-key")
    hers = begun(alice, request)
    his = parsed(send(bob, **request))
    assert parsed(hers.result()).tokens != his.tokens
    assert (alice.stats()["states"], bob.stats()["states"]) == (1, 1)


@pytest.mark.parametrize("key", ["bob-key", None])
def test_a_tenant_that_a_client_names_is_overwritten(lively: Live, key: str | None):
    """`custom_params["anabranch_tenant"]` is ours: whatever a client writes there, it stays who it is."""
    alice = lively.named("alice-key")
    state = ok(alice, text=noise(6, 20)).id
    name = _name_of(alice, state)
    bob = lively.named(key)
    custom = _spec({"refs": [inherit(state)]}, anabranch_tenant=name)
    sampling = {"max_new_tokens": 1, "custom_params": custom}
    refused = bob.post("/generate", input_ids=[65], sampling_params=sampling)
    assert refused.status_code == 400
    assert "state_not_found" in refused.text
    chat = {"model": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "custom_params": custom}
    assert "state_not_found" in bob.post("/v1/chat/completions", **chat).text
    batch = bob.post("/generate", input_ids=[[65], [66]], sampling_params=[sampling, sampling])
    assert "state_not_found" in batch.text
    assert alice.post("/generate", input_ids=[65], sampling_params=sampling).status_code == 200


def _name_of(alice: Live, state: str) -> str:
    from anabranch_server.tenancy import Keyring

    assert alice.listed() == {state}
    return Keyring().caller(f"Bearer {alice.key}").tenant


@pytest.mark.parametrize("rid", ["anabranch-1", "anabranch-", "a", "HEALTH_CHECK_x", "HEALTH", ""])
def test_request_ids_of_our_own_are_refused(lively: Live, rid: str):
    """SGLang aborts by prefix of the id, and lets the output of some ids fall."""
    sampling = {"max_new_tokens": 1}
    answer = lively.post("/generate", rid=rid, input_ids=[65], sampling_params=sampling)
    assert answer.status_code == 400, answer.text
    assert lively.post("/generate", rid=[rid, "b"], input_ids=[[65], [66]], sampling_params=sampling).status_code == 400


@pytest.mark.parametrize(
    "state",
    [
        *(
            "",
            "a",
            "0" * 31,
            "0" * 33,
            "A" * 32,
            "0" * 31 + "\n",
            "0" * 31 + "\0",
            "../" * 10 + "ab",
            '"' * 32,
            "é" * 32,
        ),
        *('"' * 32, "é" * 32, "anabranch-" + "0" * 22, "HEALTH_CHECK_" + "0" * 19, "٠" * 32, "0" * 100_000),
    ],
    ids=lambda state: repr(state[:12]),
)
def test_sglang_24638_hostile_ids(lively: Live, state: str):
    """A crafted id collided with an internal namespace. Only 32 hexadecimal digits are an id, everywhere; nothing is
    made of any other, and none stands for a state that there is."""
    mine = lively.named(f"victim-{next(_victims)}")
    victim = {**body(text=noise(7, 20), n=3), "id": "0" * 32}
    before = asked_of(mine, parsed(send(mine, **victim)).id)
    requests = [
        {**body(text=[65], n=1), "id": state},
        body([inherit(state)], [65], 1),
        body([inherit(victim["id"]), artifact(state)], [65], 1),
    ]
    for request in requests:
        assert error(mine.http.post(PATH, json=request)).code == "invalid_request"
    for path, field in (("renew", [state]), ("release", [state])):
        assert error(mine.post(f"{STATES}/{path}", ids=field)).code == "invalid_request"
    assert error(mine.post("/anabranch/v1/explain", id=state)).code == "invalid_request"
    spec = _spec({"id": state or "/", "refs": []})
    answer = mine.post("/generate", input_ids=[65], sampling_params={"max_new_tokens": 1, "custom_params": spec})
    assert answer.status_code == 400
    assert mine.listed() == {victim["id"]}
    same(asked_of(mine, victim["id"]), before)
