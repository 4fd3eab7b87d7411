"""One generate, between our contract and SGLang's tokenizer manager.

It renders and tokenises the input, runs the request as a stream, and yields the contract's events. Which context the
request sees is decided in the scheduler process (`admission.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from functools import partial
from secrets import token_hex
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from anabranch import wire
from anabranch_server.chat import render
from anabranch_server.engine.access import RID_PREFIX
from anabranch_server.engine.admission import KEY, TENANT
from anabranch_server.engine.attempts import Attempt, Event, fingerprint
from anabranch_server.engine.channel import ask
from anabranch_server.errors import Refusal

NOTHING: dict[str, Any] = {"meta_info": {"finish_reason": {"type": "abort"}}}
"""What SGLang would say of a request that was cancelled before it began."""
NEVER = 2**30
"""A stream interval no generation reaches: SGLang then sends the first token and the end."""


def attempt(manager: Any, asked: wire.GenerateRequest, tenant: str, arrived: float) -> Attempt:
    """A generation that has not begun."""
    rid = RID_PREFIX + token_hex(16)  # nobody else knows it, so nobody else can abort it
    source = partial(generate, manager, asked, tenant, rid, arrived)
    return Attempt(fingerprint(asked), source, lambda: manager.abort_request(rid))


async def generate(
    manager: Any, asked: wire.GenerateRequest, tenant: str, rid: str, arrived: float, attempt: Attempt
) -> AsyncIterator[Event]:
    """Yield a delta for each piece of text if a stream was asked for, then the final event. Raises Refusal."""
    tokens, turn = await _input(manager, asked, tenant)
    if attempt.ending:  # from here on SGLang knows the request, and can end it
        yield wire.FinalEvent(response=_response(asked, NOTHING, arrived, time.perf_counter()))
        return
    spec = asked.model_dump(mode="json", include=set(wire.ContextSpec.model_fields))
    spec |= {"turn": turn, "generated_tokens": len(asked.generated or ()), "again": asked.again}
    sampling = _sampling(asked)
    sampling["custom_params"] = {KEY: json.dumps(spec), TENANT: tenant}
    order = GenerateReqInput(
        rid=rid,
        input_ids=tokens,
        sampling_params=sampling,
        stream=True,
        return_logprob=asked.sampling.logprobs,
        top_logprobs_num=asked.sampling.top_logprobs,
    )
    text, sent, first_at = "", 0, 0.0
    out = {}
    try:
        async for latest in manager.generate_request(order, None):
            first_at = first_at or time.perf_counter()
            reason = latest["meta_info"]["finish_reason"]
            if reason is not None and reason["type"] == "abort" and len(latest["output_ids"]) < sent:
                # One that is cancelled in the queue, after a retraction, comes without most of what it had.
                latest |= {"text": out["text"], "output_ids": out["output_ids"]}
            out = latest
            if reason is not None:
                _raise_if_refused(reason)
            elif asked.stream and (len(out["text"]) > len(text) or len(out["output_ids"]) > sent):
                yield wire.DeltaEvent(text=out["text"][len(text) :], tokens=tuple(out["output_ids"][sent:]))
                text, sent = out["text"], len(out["output_ids"])
    except ValueError as error:  # SGLang's own checks, before it sends anything to its scheduler
        if not attempt.ending:
            raise Refusal("invalid_request", str(error)) from error
        out = out or NOTHING
    except HTTPException as error:
        code: wire.ErrorCode = "rate_limited" if error.status_code == 503 else "internal"
        raise Refusal(code, str(error.detail)) from error
    final = _response(asked, out, arrived, first_at)
    if asked.stream and (final.text[len(text) :] or final.tokens[sent:]):
        yield wire.DeltaEvent(text=final.text[len(text) :], tokens=final.tokens[sent:])
    yield wire.FinalEvent(response=final)


async def _input(manager: Any, asked: wire.GenerateRequest, tenant: str) -> tuple[list[int], str | None]:
    """The new state's own input tokens, and the turn its conversation is then in."""
    tokenizer, turn = manager.tokenizer, None
    renders = not asked.input or any(isinstance(piece, wire.MessagePiece) for piece in asked.input)
    if renders and asked.refs:
        turn = await ask(manager, "turn", tenant=tenant, refs=[ref.model_dump(mode="json") for ref in asked.refs[-1:]])
    generates = asked.sampling.max_tokens > 0 or asked.generated is not None
    pieces, turn = render(asked.input, tokenizer, turn=turn, root=not asked.refs, generate=generates)
    tokens: list[int] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, str):
            plain_root = i == 0 and not asked.refs and isinstance(asked.input[0], wire.TextPiece)
            tokens += tokenizer.encode(piece, add_special_tokens=plain_root)
        else:
            tokens += piece
    given = len(tokens)
    tokens += asked.generated or ()
    size = manager.model_config.vocab_size
    if wrong := next((token for token in tokens if token >= size), None):
        raise Refusal("invalid_request", f"token {wrong} is not in the vocabulary of {size}", param="input")
    if not given:
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


def _raise_if_refused(reason: dict[str, Any]) -> None:
    """An abort that nobody asked for; one that somebody asked for has no status."""
    status = reason.get("status_code")
    if reason.get("type") != "abort" or status is None:
        return
    precise = json.loads(reason.get(KEY, "{}"))
    if "code" in precise:
        raise Refusal.of(wire.ErrorBody.model_validate(precise))
    message = f"SGLang ended the request: {reason.get('message')}"
    if status == 400:
        raise Refusal("invalid_request", message)
    if status == 503:  # its queue is full, or its time limit is over
        raise Refusal("rate_limited", message, hint="ask again later")
    if "Out of memory" in message:
        raise Refusal("pool_exhausted", message, hint="release states, or ask again later")
    raise Refusal("internal", message)


def _response(
    asked: wire.GenerateRequest, out: dict[str, Any], arrived: float, first_at: float
) -> wire.GenerateResponse:
    meta, now = out["meta_info"], time.perf_counter()
    reason = meta["finish_reason"]
    report = json.loads(reason.get(KEY, "{}"))
    cancelled = reason["type"] == "abort" or report.get("cancelled", False)
    if not report and not cancelled:
        raise Refusal("internal", "the generation ended without a usable state", hint="the server's log says why")
    ids = out.get("output_ids", ())
    had = min(len(ids), asked.sampling.max_tokens)  # SGLang samples one token where none was asked for
    kept = had if cancelled and not report.get("kept") else report["generated_tokens"]
    reused = max(0, meta.get("cached_tokens", 0) - report.get("rebuilt_tokens", 0))
    return wire.GenerateResponse(
        id=asked.id,
        text=out.get("text", "") if asked.sampling.max_tokens else "",
        tokens=asked.generated or tuple(ids[:kept]),
        logprobs=_logprobs(meta, kept) if asked.sampling.logprobs else None,
        finish_reason="cancelled" if cancelled else reason["type"],
        usage=wire.Usage(
            context_tokens=report.get("context_tokens", 0),
            reused_tokens=reused,
            computed_tokens=max(0, meta.get("prompt_tokens", 0) - meta.get("cached_tokens", 0))
            + report.get("rebuilt_tokens", 0),
            generated_tokens=kept,
        ),
        timings=wire.Timings(
            queue=report.get("queue", 0.0),
            compile=report.get("compile", 0.0),
            kv_prepare=report.get("kv_prepare", 0.0),
            first_token=first_at - arrived,
            decode=now - first_at,
            total=now - arrived,
        ),
        kept=report.get("kept", False),
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
        for i, (logprob, token, *_) in enumerate((meta.get("output_token_logprobs") or [])[:kept])
    )
