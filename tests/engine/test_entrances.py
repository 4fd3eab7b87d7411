"""The same DAG through SGLang's own endpoints, and what a chat becomes on the way."""

from __future__ import annotations

import json

import pytest

from tests.engine.api import body, inherit, new_id, ok, send
from tests.serving import Served

pytestmark = pytest.mark.engine


def spec(*refs: dict, **fields: object) -> dict[str, str]:
    return {"anabranch": json.dumps({"refs": list(refs), **fields})}


def test_generate_with_custom_params_makes_the_same_state(stepped: Served):
    root = ok(stepped, text="The story begins")
    ours = ok(stepped, [inherit(root.id)], " with a king", 5)
    name = new_id()
    answer = stepped.post(
        "/generate",
        text=" with a king",
        sampling_params={
            "max_new_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": spec(inherit(root.id), id=name),
        },
    ).json()
    assert answer["text"] == ours.text
    assert json.loads(answer["meta_info"]["finish_reason"]["anabranch"])["id"] == name
    assert ok(stepped, [inherit(name)], [400], 1).usage.context_tokens == ours.usage.context_tokens + 3 + 5


def test_without_an_id_the_state_has_the_request_id(stepped: Served):
    answer = stepped.post(
        "/generate", text="Hello", sampling_params={"max_new_tokens": 2, "ignore_eos": True, "custom_params": spec()}
    ).json()
    assert stepped.get(f"/anabranch/v1/states/{answer['meta_info']['id']}").json()["generated_tokens"] == 2


def test_chat_completions_see_the_context(stepped: Served):
    messages = [{"role": "user", "content": "Say that again."}]
    seen_before = ok(stepped, text="<|im_start|>system\nYou speak of bananas, and of nothing else.<|im_end|>\n")
    request = {"model": "default", "messages": messages, "max_tokens": 12, "temperature": 0}
    name = new_id()
    seen = stepped.post("/v1/chat/completions", **request, custom_params=spec(inherit(seen_before.id), id=name)).json()
    unseen = stepped.post("/v1/chat/completions", **request).json()
    context = seen_before.usage.computed_tokens
    assert seen["choices"][0]["message"]["content"] != unseen["choices"][0]["message"]["content"]
    assert seen["usage"]["prompt_tokens"] == unseen["usage"]["prompt_tokens"] + context
    assert stepped.get(f"/anabranch/v1/states/{name}").json()["context_tokens"] == context


def test_refusals_there_say_the_code(stepped: Served):
    answer = stepped.post(
        "/generate", text="x", sampling_params={"max_new_tokens": 1, "custom_params": spec(inherit("0" * 32))}
    )
    assert answer.status_code == 400
    assert "state_not_found" in answer.text


def test_several_samples_of_one_spec_are_refused_and_leave_nothing(stepped: Served):
    sampling = {"max_new_tokens": 2, "n": 2, "custom_params": spec(id=new_id())}
    answer = stepped.post("/generate", text="x", sampling_params=sampling)
    assert answer.status_code == 400
    assert "n over 1" in answer.text
    assert stepped.stats()["states"] == 0


@pytest.mark.parametrize("value", ["{bad", "[]", '{"refs": 3}', '{"place": NaN}', 7, {"refs": []}])
def test_a_malformed_spec_is_refused(stepped: Served, value: object):
    answer = stepped.post(
        "/generate", text="x", sampling_params={"max_new_tokens": 1, "custom_params": {"anabranch": value}}
    )
    assert answer.status_code == 400
    assert "invalid_request" in answer.text


def test_a_conversation_over_states_is_the_templates_own(stepped: Served):
    """Piece by piece, over three states: the tokens are those of the template's rendering of the whole."""
    first = [{"role": "user", "content": "What is the capital of France?"}]
    second = {"role": "user", "content": "And of Italy?"}
    one = send(stepped, **{**body(n=24), "input": first, "sampling": {"max_tokens": 24, "temperature": 0}}).json()
    assert one["finish_reason"] == "stop"
    two = send(stepped, **{**body([inherit(one["id"])]), "input": [second]}).json()
    messages = [*first, {"role": "assistant", "content": one["text"]}, second]
    whole = stepped.post("/v1/chat/completions", model="default", messages=messages, max_tokens=1).json()
    # max_tokens=0 computes the messages; the answer's own heading is added where an answer is generated
    heading = len(["<|im_start|>", "ass", "istant", "\n"])
    assert two["usage"]["context_tokens"] + two["usage"]["computed_tokens"] == whole["usage"]["prompt_tokens"] - heading


def test_an_answer_that_is_due_needs_no_new_input(stepped: Served):
    asked = send(stepped, **{**body(), "input": [{"role": "user", "content": "What is the capital of France?"}]}).json()
    answer = send(stepped, **{**body([inherit(asked["id"])]), "sampling": {"max_tokens": 12, "temperature": 0}}).json()
    assert "Paris" in answer["text"]
    assert answer["usage"]["computed_tokens"] == 4
