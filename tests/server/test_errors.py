"""Refusals: what they say, and that a fault in a request is named by the field a person would look for.

Which requests are refused at all is asked in `test_wire.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from anabranch import wire
from anabranch_server.errors import Refusal, StateRunning, invalid

A, B = "a" * 32, "b" * 32
INHERIT = {"kind": "inherit", "id": B}
ARTIFACT = {"kind": "artifact", "id": B}


def fault(model: type[BaseModel], body: Any, prefix: str = "") -> Refusal:
    with pytest.raises(ValidationError) as error:
        model.model_validate_json(body if isinstance(body, bytes) else json.dumps(body))
    refusal = invalid(error.value, prefix)
    assert (refusal.code, refusal.status) == ("invalid_request", 400)
    return refusal


def generate_fault(**body: Any) -> Refusal:
    return fault(wire.GenerateRequest, {"id": A, **body})


# ---------------------------------------------------------------- refusals


def test_a_refusal_carries_code_next_step_and_field_into_the_body():
    refusal = Refusal("state_released", "state x was released", hint="make it anew", param="refs")
    assert refusal.status == 410
    assert str(refusal) == "state x was released"
    assert refusal.body("r1") == wire.ErrorBody(
        code="state_released", message="state x was released", hint="make it anew", param="refs", request_id="r1"
    )


def test_hint_field_and_request_may_be_missing():
    body = Refusal("internal", "m").body()
    assert (body.hint, body.param, body.request_id) == (None, None, None)


@pytest.mark.parametrize(("code", "status"), wire.HTTP_STATUS.items())
def test_the_status_follows_from_the_code(code: wire.ErrorCode, status: int):
    assert Refusal(code, "m").status == status


def test_a_running_state_is_named():
    assert StateRunning(A).state_id == A
    assert not isinstance(StateRunning(A), Refusal)


# ---------------------------------------------------------------- faults that pydantic found


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"id": "A"}, "id"),
        ({"refs": [INHERIT, {**ARTIFACT, "span": [0, -1]}]}, "refs.1.span.1"),
        ({"refs": [{**ARTIFACT, "span": ["0", 1]}]}, "refs.0.span.0"),
        ({"refs": [{**ARTIFACT, "span": [0]}]}, "refs.0.span.1"),
        ({"refs": [{**ARTIFACT, "span": 5}]}, "refs.0.span"),
        ({"refs": [{**INHERIT, "upto": True}]}, "refs.0.upto"),
        ({"refs": [{**INHERIT, "id": B + "\n"}]}, "refs.0.id"),
        ({"refs": [{**INHERIT, "kind": "clone"}]}, "refs.0.kind"),
        ({"refs": [INHERIT] * 1025}, "refs"),
        ({"refs": INHERIT}, "refs"),
        ({"rules": "lax"}, "rules"),
        ({"keep": 1}, "keep"),
        ({"colour": "red"}, "colour"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"sampling": {"max_tokens": 1.5}}, "sampling.max_tokens"),
        ({"sampling": {"stop": ["a", ""]}}, "sampling.stop.1"),
        ({"sampling": {"max_new_tokens": 5}}, "sampling.max_new_tokens"),
        ({"input": "hello"}, "input"),
    ],
)
def test_a_fault_is_named_by_the_path_to_its_field(body: dict[str, Any], param: str):
    refusal = generate_fault(**body)
    assert refusal.param == param
    assert refusal.message.startswith(f"{param}: ")


@pytest.mark.parametrize("place", ["mean", 3, []])
def test_a_wrong_policy_names_place_and_the_policies(place: Any):
    refusal = generate_fault(place=place)
    assert refusal.param == "place"
    assert "'keep', 'concat', 'same_start' or 'right_aligned'" in refusal.message


@pytest.mark.parametrize(
    ("place", "param"), [({"start": -1}, "place.start"), ({"start": "1"}, "place.start"), ({"begin": 1}, "place.begin")]
)
def test_a_fault_inside_explicit_placement_is_named_there(place: Any, param: str):
    assert generate_fault(place=place).param == param


@pytest.mark.parametrize(
    ("piece", "param"),
    [
        ({"text": 5}, "input.1.text"),
        ({"role": "user"}, "input.1.content"),
        ({"role": "user", "content": None}, "input.1.content"),
        ({"role": "", "content": "a"}, "input.1.role"),
        ({"tokens": [1, -1]}, "input.1.tokens.1"),
        ({"tokens": "12"}, "input.1.tokens"),
    ],
)
def test_a_fault_in_a_piece_is_named_by_the_field_that_the_caller_wrote(piece: Any, param: str):
    refusal = generate_fault(input=[{"text": "fine"}, piece])
    assert refusal.param == param


@pytest.mark.parametrize("piece", [{}, "text", None, {"txt": "a"}, {"text": "a", "role": "user"}])
def test_a_piece_of_no_kind_is_named_without_the_servers_class_names(piece: Any):
    refusal = generate_fault(input=[{"text": "fine"}, piece])
    assert (refusal.param or "").startswith("input.1")
    assert "Piece" not in refusal.message


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"refs": [INHERIT, {**ARTIFACT, "span": [3, 1]}]}, "refs.1", "span is reversed: 3 > 1"),
        ({"refs": [{**INHERIT, "span": [0, 1]}]}, "refs.0", "span belongs to an artifact"),
        ({"refs": [{**ARTIFACT, "upto": 1}]}, "refs.0", "upto belongs to an inherit"),
        ({"refs": [{**INHERIT, "base": 1}]}, "", "base needs explicit placement"),
        ({"refs": [INHERIT, ARTIFACT], "rules": "strict"}, "", "may not mix inherit and artifact"),
        ({"refs": [{**INHERIT, "id": A}]}, "", "cannot reference itself"),
    ],
)
def test_a_fault_between_fields_says_which_and_leads_as_near_as_it_can(body: dict[str, Any], param: str, words: str):
    refusal = generate_fault(**body)
    assert (refusal.param or "").startswith(param)
    assert words in refusal.message
    assert "Value error" not in refusal.message


def test_a_prefix_leads_to_where_the_request_was_carried():
    body = {"refs": [{**INHERIT, "upto": -1}]}
    assert fault(wire.ContextSpec, body, "custom_params.anabranch").param == "custom_params.anabranch.refs.0.upto"
    reversed_span = {"spec": {"refs": [{**ARTIFACT, "span": [3, 1]}]}}
    assert fault(wire.ExplainRequest, reversed_span).param == "spec.refs.0"
    assert fault(wire.ContextSpec, b"{", "custom_params.anabranch").param == "custom_params.anabranch"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"id":' * 2000, b'{"id": "\\ud800"}'])
def test_what_is_no_json_is_refused_as_such(body: bytes):
    refusal = fault(wire.GenerateRequest, body)
    assert refusal.param is None
    assert refusal.message.startswith("Invalid JSON")


@pytest.mark.parametrize("body", [b"[]", b"null", b"5"])
def test_json_that_is_no_object_names_no_field(body: bytes):
    assert fault(wire.GenerateRequest, body).param is None


def test_of_several_faults_the_first_is_named():
    refusal = generate_fault(refs=[{**INHERIT, "upto": -1}], keep="no", colour="red")
    assert refusal.param == "refs.0.upto"


def test_the_callers_data_is_not_repeated_in_the_answer():
    secret = "correct horse battery staple"
    assert secret not in generate_fault(input=[{"text": [secret]}]).message
    assert secret not in generate_fault(sampling={"max_tokens": secret}).message
