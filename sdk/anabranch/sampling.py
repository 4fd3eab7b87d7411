"""Sampling arguments as keyword arguments: their names and types for editors, and their way to the wire.

Meanings, ranges and defaults are those of `wire.Sampling`; nothing is decided here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypedDict, cast

from pydantic import ValidationError

from anabranch.errors import InvalidRequestError, invalid
from anabranch.wire import Sampling


class SamplingArgs(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. The defaults are in parentheses."""

    max_tokens: int
    """Generate at most so many tokens (128); 0 computes the state and generates nothing."""
    temperature: float
    """0 is greedy (1.0)."""
    top_p: float
    top_k: int
    """Sample among the k likeliest tokens (-1: all)."""
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_tokens: int
    stop: str | Sequence[str]
    """Stop before any of these strings."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    regex: str | None
    json_schema: str | Mapping[str, Any] | None
    """A JSON schema, as a string or as a mapping, that the output obeys."""
    ebnf: str | None
    logprobs: bool
    """Return the log probability of every generated token (False)."""
    top_logprobs: int
    """And so many of the likeliest alternatives (0)."""


def sampling_from(args: SamplingArgs) -> Sampling:
    """The wire form of keyword arguments; raises InvalidRequestError for unknown names and bad values."""
    fields: dict[str, object] = {**args}
    for name in fields:
        if name not in Sampling.model_fields:
            close = get_close_matches(name, Sampling.model_fields, 1)
            raise InvalidRequestError(
                f"there is no sampling argument {name!r}",
                param=name,
                hint=f"did you mean {close[0]}?" if close else None,
            )
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if isinstance(fields.get("json_schema"), Mapping):
        fields["json_schema"] = json.dumps(cast("Mapping[str, Any]", fields["json_schema"]))
    try:
        return Sampling.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None
