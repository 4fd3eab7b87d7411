"""What SGLang 0.5.17 lets into its scheduler though it would end it there: wrong types, tokens outside the vocabulary.

It refuses in the HTTP process, for plain requests as for ours. What is merely wrong is left to SGLang's own checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

import msgspec
from sglang.srt.sampling.sampling_params import SamplingParams

INTERNAL = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
"""Fields of SGLang's that it fills in itself, and takes from clients too."""
LARGEST = 1e6
"""Of a logit bias; more than this is infinity beside other penalties."""
LEAST_PENALTY = 1e-3
"""Logits are divided by it, and what is infinite then cannot be sampled from."""
MOST_SAMPLES = 1024


def screen(order: Any, vocabulary: int) -> None:
    """`order` is SGLang's request, as the client filled it in; raises ValueError."""
    tokens, sampling = getattr(order, "input_ids", None), getattr(order, "sampling_params", None)
    if isinstance(getattr(order, "text", None), str) or isinstance((tokens or [None])[0], int):
        for name in ("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path"):
            if isinstance(getattr(order, name, None), list):
                raise ValueError(f"{name} is a list, but there is one prompt")
    for one in tokens if tokens and isinstance(tokens[0], list) else [tokens or ()]:
        if one and (min(one) < 0 or max(one) >= vocabulary):
            raise ValueError(f"input_ids has a token that is not in the vocabulary of {vocabulary}")
    for count in _each(getattr(order, "top_logprobs_num", None)):
        if isinstance(count, int) and not 0 <= count <= vocabulary:
            raise ValueError(f"top_logprobs_num is {count}; it must be in [0, {vocabulary}]")
    for start in _each(getattr(order, "logprob_start_len", None)):
        if isinstance(start, int) and start < -1:
            raise ValueError(f"logprob_start_len is {start}; it must be at least -1")
    for one in _each(sampling):
        for name, value in one.items() if isinstance(one, dict) else ():
            _check_argument(name, value, vocabulary)


def _check_argument(name: str, value: Any, vocabulary: int) -> None:
    """Every sampling argument has the type that SGLang declares for it, and does not check; numbers fit into fp32."""
    expected = None if name in INTERNAL else _types().get(name)
    if expected is None:
        raise ValueError(f"there is no sampling parameter {name!r:.100}")
    if value is None:
        return
    try:
        converted: Any = msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from error
    if name == "stop_token_ids" and not all(0 <= token < vocabulary for token in converted):
        raise ValueError(f"stop_token_ids has a token that is not in the vocabulary of {vocabulary}")
    if name == "logit_bias" and not all(abs(bias) <= LARGEST for bias in converted.values()):
        raise ValueError(f"logit_bias has a value that is not between -{LARGEST:g} and {LARGEST:g}")
    if isinstance(converted, int) and name != "sampling_seed" and not -(2**31) <= converted < 2**31:
        raise ValueError(f"{name} is {converted}, which does not fit into 32 bits")
    if name == "repetition_penalty" and converted < LEAST_PENALTY:
        raise ValueError(f"repetition_penalty is {converted}; it must be at least {LEAST_PENALTY}")
    if name == "n" and not 1 <= converted <= MOST_SAMPLES:
        raise ValueError(f"n is {converted}; it must be in [1, {MOST_SAMPLES}]")
    if name == "stop_regex":
        for pattern in _each(converted):
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"stop_regex: {error}") from error


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(SamplingParams)


def _each(value: Any) -> Iterator[Any]:
    """The value of one prompt, or of each of several."""
    yield from value if isinstance(value, list) else [value]
