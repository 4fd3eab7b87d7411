"""One generate, between our contract and SGLang's tokenizer manager.

It renders and tokenises the input, runs the request as a stream, and yields the contract's events. Which context the
request sees is decided in the scheduler process (`admission.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import HTTPException, Request
from sglang.srt.managers.io_struct import GenerateReqInput

from anabranch import wire
from anabranch_server.chat import render
from anabranch_server.engine.admission import KEY
from anabranch_server.engine.control import ask
from anabranch_server.errors import Refusal

NEVER = 2**30
"""A stream interval no generation reaches: SGLang then sends the first token and the end."""


async def generate(
    manager: Any, asked: wire.GenerateRequest, request: Request, arrived: float
) -> AsyncIterator[wire.DeltaEvent | wire.FinalEvent]:
    """Yield a delta for each piece of text if a stream was asked for, then the final event. Raises Refusal."""
    tokens, turn = await _input(manager, asked)
    spec = asked.model_dump(mode="json", include={"id", "refs", "place", "rules", "keep"})
    sampling = _sampling(asked)
    sampling["custom_params"] = {KEY: json.dumps({**spec, "turn": turn})}
    order = GenerateReqInput(
        rid=asked.id,
        input_ids=tokens,
        sampling_params=sampling,
        stream=True,
        return_logprob=asked.sampling.logprobs,
        top_logprobs_num=asked.sampling.top_logprobs,
    )
    if asked.id in manager.rid_to_state:
        raise Refusal("invalid_request", f"the id {asked.id} is already in use", param="id")
    over, text, sent, first_at, out = False, "", 0, 0.0, {}
    try:
        async for out in manager.generate_request(order, request):
            first_at = first_at or time.perf_counter()
            reason = out["meta_info"]["finish_reason"]
            over = reason is not None
            if over:
                _raise_if_aborted(reason)
            elif asked.stream and (len(out["text"]) > len(text) or len(out["output_ids"]) > sent):
                yield wire.DeltaEvent(text=out["text"][len(text) :], tokens=tuple(out["output_ids"][sent:]))
                text, sent = out["text"], len(out["output_ids"])
    except ValueError as error:  # SGLang's own checks, before it sends anything to its scheduler
        over = True
        raise Refusal("invalid_request", str(error)) from error
    except HTTPException as error:
        over = True
        code: wire.ErrorCode = "pool_exhausted" if error.status_code == 503 else "internal"
        raise Refusal(code, str(error.detail)) from error
    finally:
        if not over:  # the client went away, or something broke: nobody wants the rest
            manager.abort_request(asked.id)
    final = _response(asked, out, arrived, first_at)
    if asked.stream and (final.text[len(text) :] or final.tokens[sent:]):
        yield wire.DeltaEvent(text=final.text[len(text) :], tokens=final.tokens[sent:])
    yield wire.FinalEvent(response=final)


async def _input(manager: Any, asked: wire.GenerateRequest) -> tuple[list[int], str | None]:
    """The new state's own input tokens, and the turn its conversation is then in."""
    tokenizer, turn = manager.tokenizer, None
    renders = not asked.input or any(isinstance(piece, wire.MessagePiece) for piece in asked.input)
    if renders and asked.refs:
        turn = await ask(manager, "turn", refs=[ref.model_dump(mode="json") for ref in asked.refs[-1:]])
    pieces, turn = render(
        asked.input, tokenizer, turn=turn, root=not asked.refs, generate=asked.sampling.max_tokens > 0
    )
    tokens: list[int] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, str):
            plain_root = i == 0 and not asked.refs and isinstance(asked.input[0], wire.TextPiece)
            tokens += tokenizer.encode(piece, add_special_tokens=plain_root)
        else:
            tokens += piece
    size = manager.model_config.vocab_size
    if wrong := next((token for token in tokens if token >= size), None):
        raise Refusal("invalid_request", f"token {wrong} is not in the vocabulary of {size}", param="input")
    if not tokens:
        raise Refusal(
            "invalid_request",
            "the input is empty: a state has at least one token of its own",
            hint="append text, messages or tokens",
            param="input",
        )
    new, limit = len(tokens) + asked.sampling.max_tokens, manager.context_len
    if new >= limit:  # said here in our words; the whole context is checked where it is known
        raise Refusal(
            "context_too_long",
            f"{len(tokens)} input and {asked.sampling.max_tokens} new tokens exceed the context of {limit} tokens",
            hint="ask for fewer tokens, or serve with a larger --context-length",
            param="sampling.max_tokens",
        )
    return tokens, turn if renders else "inherited"


def _sampling(asked: wire.GenerateRequest) -> dict[str, Any]:
    own = asked.sampling.model_dump(exclude={"max_tokens", "min_tokens", "logprobs", "top_logprobs"})
    own["stop"], own["stop_token_ids"] = list(own["stop"]), list(own["stop_token_ids"])
    return {
        **own,
        "max_new_tokens": asked.sampling.max_tokens,
        "min_new_tokens": asked.sampling.min_tokens,
        "stream_interval": 1 if asked.stream else NEVER,
    }


def _raise_if_aborted(reason: dict[str, Any]) -> None:
    if reason.get("type") != "abort":
        return
    if KEY in reason:
        body = wire.ErrorBody.model_validate_json(reason[KEY])
        raise Refusal(body.code, body.message, hint=body.hint, param=body.param)
    status = reason.get("status_code")
    code: wire.ErrorCode = "invalid_request" if status == 400 else "pool_exhausted" if status == 503 else "internal"
    raise Refusal(code, f"the request was aborted: {reason.get('message')}")


def _response(
    asked: wire.GenerateRequest, out: dict[str, Any], arrived: float, first_at: float
) -> wire.GenerateResponse:
    meta = out["meta_info"]
    if KEY not in meta["finish_reason"]:
        raise Refusal("internal", "the generation ended without a usable state", hint="the server's log says why")
    report = json.loads(meta["finish_reason"][KEY])
    kept, now = report["generated_tokens"], time.perf_counter()
    return wire.GenerateResponse(
        id=asked.id,
        text=out["text"],
        tokens=tuple(out["output_ids"][:kept]),
        logprobs=_logprobs(meta, kept) if asked.sampling.logprobs else None,
        finish_reason=meta["finish_reason"]["type"],
        usage=wire.Usage(
            context_tokens=report["context_tokens"],
            reused_tokens=meta["cached_tokens"],
            computed_tokens=meta["prompt_tokens"] - meta["cached_tokens"],
            generated_tokens=kept,
        ),
        timings=wire.Timings(
            queue=report["queue"],
            compile=report["compile"],
            kv_prepare=report["kv_prepare"],
            first_token=first_at - arrived,
            decode=now - first_at,
            total=now - arrived,
        ),
        kept=report["kept"],
    )


def _logprobs(meta: dict[str, Any], kept: int) -> tuple[wire.TokenLogprob, ...]:
    """SGLang gives (logprob, token, text) triples."""
    tops = meta.get("output_top_logprobs") or []
    return tuple(
        wire.TokenLogprob(
            token=token,
            logprob=logprob,
            top=tuple((other, value) for value, other, *_ in tops[i] or ()) if i < len(tops) else (),
        )
        for i, (logprob, token, *_) in enumerate(meta["output_token_logprobs"][:kept])
    )
