"""Hostile specs and sampling arguments through SGLang's own endpoints: they refuse, and the scheduler lives on.

What SGLang 0.5.17 does not check, `engine/screening.py` does.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.hostile import judging
from tests.serving import Served

pytestmark = pytest.mark.engine

GIVEN: dict[str, dict[str, Any]] = {
    "/generate": {"text": "ab", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"model": "m", "prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
}
SPECS: list[Any] = [
    *(
        None,
        7,
        1.5,
        True,
        [],
        ["{}"],
        {},
        {"refs": []},
        "",
        " ",
        "{",
        "null",
        "1",
        "[]",
        '"x"',
        "[" * 100_000,
        "x" * 100_000,
    ),
    *('{"id": 7}', '{"id": ""}', '{"id": "x"}', '{"id": "' + "A" * 32 + '"}', '{"id": null}', '{"id": []}', '{"": 1}'),
    *(
        '{"refs": 3}',
        '{"refs": [{}]}',
        '{"refs": [null]}',
        '{"refs": {"kind": "inherit"}}',
        '{"place": NaN}',
        '{"x": 1}',
    ),
    *('{"refs": [{"kind": "inherit", "id": "' + "a" * 32 + '"}]}', '{"refs": ' + "[" * 5000 + "]" * 5000 + "}"),
    *('{"lease": 0}', '{"lease": -1}', '{"lease": 1e400}', '{"lease": 1e-300, "keep": false}', '{"lease": "1"}'),
    *(
        '{"keep": "no"}',
        '{"turn": {}}',
        '{"turn": "x"}',
        '{"generated_tokens": -5}',
        '{"generated_tokens": 2147483647}',
    ),
    *(
        '{"again": true}',
        '{"again": 3}',
        '{"input": [{"text": "x"}]}',
        '{"sampling": {}}',
        '{"tenant": "x"}',
        "\x00",
        "🦆",
    ),
]
CUSTOM: list[Any] = [
    *(None, 7, "x", [], [1], {}, {"anabranch_tenant": "other"}, {"anabranch": "{}", "anabranch_tenant": "other"}),
    *({"__req__": 1}, {"anabranch": "{}", "__req__": {"rid": "x"}}, {"anabranch": "{}", "deep": {"a": 1}}, {"": ""}),
    *(
        {"x" * 10_000: "y" * 100_000},
        {"anabranch": "{}", "anabranch ": "{}"},
        {"anabranch": "{}", "long": [0] * 9999},
    ),
]
SAMPLING: list[dict[str, Any]] = [
    *({"max_new_tokens": value} for value in (-1, 1.5, "x", True, [1], 2**31, 2**62, 10**30)),
    *({"temperature": value} for value in (-1, "x", 1e-300, 1e300)),
    *({"top_k": value} for value in (0, 2**31, 2**40, 1.5)),
    *(
        {"top_p": 0},
        {"min_p": 2},
        {"frequency_penalty": 99},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-300},
        {"min_new_tokens": 5},
    ),
    *({"n": value} for value in (0, -5, 2, 1025, "x")),
    *({"stop_token_ids": [token], "min_new_tokens": 1} for token in (-1, 320, 10**9, 2**70, "x", None)),
    *({"logit_bias": bias} for bias in ({"x": 1}, {"-1": 1}, {"320": 1}, {"5": 1e308}, {"5": "x"}, [5])),
    *({"stop": value} for value in ("", [""], [7], {}, "\x00", "x" * 100_000)),
    *({"stop_regex": value} for value in ("(", ["("], [7], "(" * 5000)),
    *({"stream_interval": value} for value in (0, -3, "x", 2**40)),
    *({"unknown": 1}, {"is_normalized": True}, {"stop_strs": 7}, {"stop_str_max_len": -1}, {"": 1}, {"self": 1}),
    *({"structural_tag": "{"}, {"regex": "("}, {"regex": 7}, {"regex": "a", "ebnf": "b"}, {"json_schema": {}}),
    *({"sampling_seed": 1}, {"sampling_seed": -1}, {"sampling_seed": 2**80}, {"ignore_eos": "x"}),
]
FIELDS: list[dict[str, Any]] = [
    *({"text": None, "input_ids": ids} for ids in ([], [320], [-1], [2**40], [[1], []], [[1], [320]], ["a"], [1.5])),
    *({"rid": rid} for rid in ("", "x", ["x", "y"], "anabranch-1", "a", "HEALTH_CHECK_1", "\x00", 7)),
    *({"return_logprob": True, "top_logprobs_num": value} for value in (-3, 10**6, "x", [3])),
    *({"return_logprob": True, "logprob_start_len": value} for value in (-5, 10**9)),
    *({"return_logprob": True, "token_ids_logprob": value} for value in ([-1], [10**6], ["x"], [])),
    *({"text": value} for value in ("", [], ["a", ""], ["a", "b"], 7)),
    *({"sampling_params": value} for value in (None, 7, [], [{}], [7], "x")),
    *({"session_params": {"id": "x"}}, {"lora_path": "x"}, {"return_hidden_states": True}, {"priority": 2**70}),
    *({"input_embeds": [[0.0] * 64], "text": None}, {"custom_logit_processor": "x"}, {"data_parallel_rank": 7}),
    *({"image_data": "/etc/passwd"}, {"bootstrap_room": 2**65}, {"stream": "x"}, {"text": None}),
]


def post(served: Served, path: str, **fields: Any) -> httpx.Response:
    answer = httpx.post(served.url + path, json={**GIVEN[path], **fields}, timeout=judging.DEADLINE)
    judging.theirs(answer)
    return answer


def custom(path: str, value: Any) -> dict[str, Any]:
    """The fields by which `value` is `custom_params` at an endpoint."""
    if path == "/generate":
        return {"sampling_params": {**GIVEN[path]["sampling_params"], "custom_params": value}}
    return {"custom_params": value}


@pytest.mark.parametrize("path", [*GIVEN])
def test_specs_that_are_none(besieged: Served, path: str):
    for value in SPECS:
        post(besieged, path, **custom(path, {"anabranch": value}))
    for value in CUSTOM:
        post(besieged, path, **custom(path, value))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*GIVEN])
def test_a_refused_spec_says_its_code(besieged: Served, path: str, stream: bool):
    spec = json.dumps({"refs": [{"kind": "inherit", "id": "a" * 32}]})
    answer = post(besieged, path, stream=stream, **custom(path, {"anabranch": spec}))
    assert "state_not_found" in answer.text


@pytest.mark.parametrize("spec", [None, "{}"], ids=["plain", "state"])
def test_sampling_arguments_that_would_end_the_scheduler(besieged: Served, spec: str | None):
    with_spec = {} if spec is None else {"custom_params": {"anabranch": spec}}
    for given in SAMPLING:
        post(besieged, "/generate", sampling_params={"max_new_tokens": 2, **given, **with_spec})


@pytest.mark.parametrize("spec", [None, "{}"], ids=["plain", "state"])
def test_fields_that_would_end_the_scheduler(besieged: Served, spec: str | None):
    for given in FIELDS:
        post(besieged, "/generate", **(custom("/generate", {"anabranch": spec}) if spec else {}) | given)
