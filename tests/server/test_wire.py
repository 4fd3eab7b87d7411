"""The wire contract: what a request may say, what is refused at the border, and that JSON carries all of it.

How a refusal is worded is asked in `test_errors.py`.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from anabranch import wire
from anabranch.wire import (
    ContextSpec,
    Explicit,
    GenerateRequest,
    MessagePiece,
    Ref,
    Sampling,
    TextPiece,
    TokensPiece,
)

ME, A, B = "0" * 32, "a" * 32, "0123456789abcdef" * 2
INHERIT = {"kind": "inherit", "id": A}
ARTIFACT = {"kind": "artifact", "id": B}
ATTEMPTS = {
    "python": GenerateRequest.model_validate,
    "json": lambda body: GenerateRequest.model_validate_json(json.dumps(body)),
}


def accepted(**body: Any) -> GenerateRequest:
    """The request, which means the same as Python data and as JSON."""
    one, other = (attempt({"id": ME, **body}) for attempt in ATTEMPTS.values())
    assert one == other
    return one


def refused(**body: Any) -> None:
    for way, attempt in ATTEMPTS.items():
        with pytest.raises(ValidationError):
            attempt({"id": ME, **body})
            pytest.fail(f"accepted as {way}: {body}")


def refused_ref(**fields: Any) -> None:
    """`fields` of a reference are refused although explicit placement allows a base."""
    refused(refs=[INHERIT, fields], place={})


# ---------------------------------------------------------------- what is accepted


def test_the_least_request_is_an_id():
    request = accepted()
    assert (request.id, request.refs, request.place, request.rules, request.keep) == (ME, (), None, None, True)
    assert (request.input, request.stream, request.sampling) == ((), False, Sampling())
    assert (request.sampling.max_tokens, request.sampling.temperature) == (128, 1.0)


def test_a_piece_is_known_by_its_fields():
    request = accepted(input=[{"text": "a"}, {"role": "user", "content": "b"}, {"tokens": [1, 0, 2]}, {"tokens": []}])
    assert request.input == (
        TextPiece(text="a"),
        MessagePiece(role="user", content="b"),
        TokensPiece(tokens=(1, 0, 2)),
        TokensPiece(tokens=()),
    )


def test_references_keep_their_order_and_may_name_one_state_twice():
    request = accepted(refs=[INHERIT, {**ARTIFACT, "span": [2, 5], "propagate": False}, {**INHERIT, "upto": 0}])
    assert request.refs == (
        Ref(kind="inherit", id=A),
        Ref(kind="artifact", id=B, span=(2, 5), propagate=False),
        Ref(kind="inherit", id=A, upto=0),
    )


def test_a_span_may_be_empty_and_reach_the_largest_index():
    assert accepted(refs=[{**ARTIFACT, "span": [3, 3]}]).refs[0].span == (3, 3)
    assert accepted(refs=[{**ARTIFACT, "span": [0, 2**31 - 1]}]).refs[0].span == (0, 2**31 - 1)


def test_every_placement_is_told_apart():
    assert accepted(place="keep").place == "keep"
    assert accepted(place="concat").place == "concat"
    assert accepted(place={}).place == Explicit()
    assert accepted(place={"start": 7}).place == Explicit(start=7)
    assert accepted(place=None).place is None


def test_a_base_goes_with_explicit_placement():
    assert accepted(refs=[{**INHERIT, "base": 0}, ARTIFACT], place={}).refs[0].base == 0


def test_strict_rules_accept_either_kind_alone():
    assert accepted(refs=[INHERIT, INHERIT], rules="strict").rules == "strict"
    assert accepted(refs=[ARTIFACT], rules="strict").rules == "strict"
    assert accepted(refs=[INHERIT, ARTIFACT]).rules is None


def test_as_many_references_as_the_contract_allows():
    assert len(accepted(refs=[INHERIT] * wire.MAX_REFS).refs) == 1024
    refused(refs=[INHERIT] * (wire.MAX_REFS + 1))


def test_as_many_pieces_as_the_contract_allows():
    assert len(accepted(input=[{"text": "a"}] * wire.MAX_PIECES).input) == 4096
    refused(input=[{"text": "a"}] * (wire.MAX_PIECES + 1))


# ---------------------------------------------------------------- references


def test_a_reversed_span_is_refused():
    refused_ref(**ARTIFACT, span=[3, 2])


def test_a_field_of_the_other_kind_is_refused():
    refused_ref(**INHERIT, span=[0, 1])
    refused_ref(**ARTIFACT, upto=1)


def test_a_base_without_explicit_placement_is_refused():
    for place in (None, "keep", "concat"):
        refused(refs=[{**INHERIT, "base": 0}], place=place)


def test_mixing_the_kinds_under_strict_rules_is_refused():
    refused(refs=[INHERIT, ARTIFACT], rules="strict")
    refused(refs=[ARTIFACT, ARTIFACT, INHERIT], rules="strict")


def test_a_state_cannot_reference_itself():
    refused(refs=[ARTIFACT, {"kind": "inherit", "id": ME}])
    with pytest.raises(ValidationError):
        ContextSpec.model_validate({"id": A, "refs": [INHERIT]})
    assert ContextSpec.model_validate({"refs": [INHERIT]}).id is None


NOT_A_COUNT = [-1, 2**31, 2**63, 10**30, 10**400, True, False, "3", 3.0, 2.5, float("nan"), [3], {}]


@pytest.mark.parametrize("value", [*NOT_A_COUNT, None])
def test_the_ends_of_a_span_are_whole_numbers_in_range(value: Any):
    refused_ref(**ARTIFACT, span=[value, 2**31 - 1])
    refused_ref(**ARTIFACT, span=[0, value])


@pytest.mark.parametrize("value", NOT_A_COUNT)
def test_upto_base_and_start_are_whole_numbers_in_range(value: Any):
    refused_ref(**INHERIT, upto=value)
    refused_ref(**INHERIT, base=value)
    refused(place={"start": value})


@pytest.mark.parametrize("value", [*NOT_A_COUNT, None])
def test_token_ids_and_limits_are_whole_numbers_in_range(value: Any):
    refused(input=[{"tokens": [1, value]}])
    refused(sampling={"max_tokens": value})
    refused(sampling={"min_tokens": value})
    refused(sampling={"stop_token_ids": [value]})


@pytest.mark.parametrize("span", [[], [1], [1, 2, 3], 5, "12", {"0": 1}, {}, True])
def test_a_span_is_two_numbers(span: Any):
    refused_ref(**ARTIFACT, span=span)


@pytest.mark.parametrize("value", [0, 1, "true", "no", None, 1.0, []])
def test_flags_are_booleans(value: Any):
    refused_ref(**INHERIT, propagate=value)
    refused(keep=value)
    refused(stream=value)
    refused(sampling={"ignore_eos": value})
    refused(sampling={"logprobs": value})


@pytest.mark.parametrize("kind", ["Inherit", "clone", "", None, 1])
def test_an_unknown_kind_of_reference_is_refused(kind: Any):
    refused_ref(kind=kind, id=A)
    refused_ref(id=A)


NOT_AN_ID = [
    *("", "a", "a" * 31, "a" * 33, "a" * 64),
    *("A" * 32, "a" * 31 + "F", "a" * 31 + "g", "-" * 32, "0x" + "a" * 30),
    *("a" * 32 + "\n", "\n" + "a" * 32, "a" * 31 + "\n", " " + "a" * 31, "a" * 32 + " ", "a" * 32 + "\x00"),
    *("\u0663" * 32, "\uff11" * 32, "\U0001d7ce" * 32, "\u0430" * 32, "a" * 32 + "\n" + "a" * 32),
    *(5, None, True, ["a" * 32], {"id": "a" * 32}),
]


@pytest.mark.parametrize("value", NOT_AN_ID, ids=ascii)
def test_an_id_is_32_lowercase_hex_digits_and_nothing_else(value: Any):
    refused(id=value)
    refused_ref(kind="inherit", id=value)


# ---------------------------------------------------------------- the rest of a request


@pytest.mark.parametrize("place", ["start", "Keep", "", 0, 3, True, [], ["keep"], {"start": "1"}, {"begin": 1}])
def test_an_unknown_policy_is_refused(place: Any):
    refused(place=place)


@pytest.mark.parametrize("rules", ["lax", "", True, []])
def test_unknown_rules_are_refused(rules: Any):
    refused(rules=rules)


@pytest.mark.parametrize(
    "piece",
    [
        {},
        "text",
        None,
        [],
        {"text": None},
        {"text": 5},
        {"text": "a", "role": "user"},
        {"text": "a", "tokens": []},
        {"role": "user"},
        {"content": "a"},
        {"role": "", "content": "a"},
        {"role": "u" * 65, "content": "a"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "a", "name": "b"},
        {"tokens": "12"},
        {"tokens": 5},
        {"tokens": None},
    ],
)
def test_a_piece_is_text_or_message_or_tokens(piece: Any):
    refused(input=[{"text": "fine"}, piece])


def test_lists_are_lists():
    for body in ({"input": "text"}, {"input": {"text": "a"}}, {"refs": INHERIT}, {"refs": None}, {"input": None}):
        refused(**body)
    refused(sampling={"stop": "\n"})
    refused(sampling={"stop": [""]})
    refused(sampling={"stop": ["a"] * 65})


def test_unknown_fields_are_refused_everywhere():
    refused(temperature=1.0)
    refused(sampling={"max_new_tokens": 5})
    refused_ref(**INHERIT, state=A)
    refused(place={"start": 1, "base": 2})


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
)
def test_sampling_numbers_are_finite_and_in_range(name: str):
    for value in (float("nan"), float("inf"), float("-inf"), 10.0**3, -(10.0**3), None, "warm", []):
        refused(sampling={name: value})


def test_sampling_numbers_are_numbers():
    refused(sampling={"temperature": "0.5"})
    refused(sampling={"temperature": True})


def test_the_ends_of_the_sampling_ranges():
    assert accepted(sampling={"temperature": 0, "top_p": 1, "min_p": 0, "top_k": -1}).sampling.temperature == 0.0
    assert accepted(sampling={"max_tokens": 0, "top_logprobs": 128, "min_p": 1}).sampling.max_tokens == 0
    for name, value in [("top_p", 0), ("top_k", -2), ("top_logprobs", 129), ("repetition_penalty", 0), ("min_p", -0.1)]:
        refused(sampling={name: value})


def test_a_request_cannot_be_changed_after_it_was_checked():
    request = accepted(refs=[INHERIT])
    for thing, name in [(request, "id"), (request.refs[0], "id"), (request.sampling, "max_tokens")]:
        with pytest.raises(ValidationError):
            setattr(thing, name, getattr(thing, name))


def test_explain_wants_a_state_or_a_spec_and_not_both():
    assert wire.ExplainRequest(id=A).spec is None
    assert wire.ExplainRequest(spec=ContextSpec(refs=(Ref(kind="inherit", id=A),))).id is None
    for body in ({}, {"id": A, "spec": {}}, {"id": None, "spec": None}):
        with pytest.raises(ValidationError):
            wire.ExplainRequest.model_validate(body)


# ---------------------------------------------------------------- replies


def test_what_a_newer_server_adds_to_a_reply_is_ignored():
    body = {"code": "rate_limited", "message": "slow down", "retry_after": 3}
    assert wire.ErrorBody.model_validate(body) == wire.ErrorBody(code="rate_limited", message="slow down")


def test_every_error_code_has_its_http_status():
    assert set(wire.HTTP_STATUS) == set(get_args(wire.ErrorCode))
    assert all(400 <= status < 600 for status in wire.HTTP_STATUS.values())


def test_the_delta_of_an_interval_is_effective_minus_native():
    assert wire.Interval(state=A, start=2, stop=5, native=12, effective=3).delta == -9


def test_events_are_told_apart_by_their_type():
    events: TypeAdapter[Any] = TypeAdapter(wire.Event)  # pyright: ignore[reportArgumentType]
    delta = wire.DeltaEvent(text="a", tokens=(1,))
    error = wire.ErrorEvent(error=wire.ErrorBody(code="internal", message="m"))
    for event in (delta, error):
        assert events.validate_json(event.model_dump_json()) == event
    with pytest.raises(ValidationError):
        events.validate_python({"type": "other"})


# ---------------------------------------------------------------- JSON

INDEX = st.integers(0, 2**31 - 1)
IDS = st.sampled_from([A, B])
TEXT = st.text(alphabet='a"\\\n\x00\u00e9\U0001f600', max_size=5)
SOME_TEXT = st.text(alphabet='a"\\\n\x00\u00e9\U0001f600', min_size=1, max_size=5)
SPANS = st.none() | st.tuples(INDEX, INDEX).map(lambda span: (min(span), max(span)))
PIECES = st.one_of(
    st.builds(TextPiece, text=TEXT),
    st.builds(MessagePiece, role=SOME_TEXT, content=TEXT),
    st.builds(TokensPiece, tokens=st.lists(INDEX, max_size=3).map(tuple)),
)
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=INDEX,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    stop=st.lists(SOME_TEXT, max_size=2).map(tuple),
    json_schema=st.none() | TEXT,
    logprobs=st.booleans(),
)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    places: list[Any] = [None, "keep", "concat", Explicit(), Explicit(start=draw(INDEX))]
    place = draw(st.sampled_from(places))
    base = st.none() | INDEX if isinstance(place, Explicit) else st.none()
    kinds = st.one_of(
        st.builds(Ref, kind=st.just("inherit"), id=IDS, upto=st.none() | INDEX, propagate=st.booleans(), base=base),
        st.builds(Ref, kind=st.just("artifact"), id=IDS, span=SPANS, propagate=st.booleans(), base=base),
    )
    return GenerateRequest(
        id=ME,
        refs=tuple(draw(st.lists(kinds, max_size=3))),
        place=place,
        keep=draw(st.booleans()),
        input=tuple(draw(st.lists(PIECES, max_size=3))),
        sampling=draw(SAMPLINGS),
        stream=draw(st.booleans()),
    )


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(requests())
def test_json_carries_a_request_unchanged(request: GenerateRequest):
    text = request.model_dump_json()
    assert GenerateRequest.model_validate_json(text) == request
    assert GenerateRequest.model_validate(json.loads(text)) == request


def test_the_context_of_a_request_travels_alone_as_the_engine_sends_it():
    refs = (Ref(kind="inherit", id=A, upto=3, propagate=False, base=9), Ref(kind="artifact", id=B, span=(0, 2)))
    request = GenerateRequest(id=ME, refs=refs, place=Explicit(start=4), keep=False, input=(TextPiece(text="a"),))
    sent = json.dumps(request.model_dump(mode="json", include={"id", "refs", "place", "rules", "keep"}))
    assert ContextSpec.model_validate_json(sent) == ContextSpec(id=ME, refs=refs, place=Explicit(start=4), keep=False)
