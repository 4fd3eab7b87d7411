"""Admission: from a request as SGLang receives it to a compiled context, or a refusal, before anything runs.

A request whose parents are not sealed yet waits here. Requests that carry no spec pass untouched. It decides nothing
about scheduling: an admitted request queues like any other.
"""

from __future__ import annotations

import json
import logging
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from anabranch import wire
from anabranch_server.chat import Turn
from anabranch_server.compile import check_limits, compile_context
from anabranch_server.engine.cache import AnabranchCache, Run, find
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal, StateRunning, invalid, no_states
from anabranch_server.store import Running, Waiting

logger = logging.getLogger(__name__)
DEBUG = os.environ.get("ANABRANCH_DEBUG") == "1"
"""Check the store's conservation laws in every step; a violation ends the server."""
KEY = "anabranch"
"""Our key in `custom_params`; its value is a JSON string."""


class AdmittedSpec(wire.ContextSpec):
    """A context spec as it reaches the scheduler. `turn` is set by our own route if it rendered messages; else the
    state ends as what it continues."""

    turn: Turn | Literal["inherited"] | None = "inherited"


def around_handle_generate_request(original: Callable[..., Any], scheduler: Any, received: Any) -> Any:
    custom = received.sampling_params.custom_params
    if not isinstance(custom, dict) or KEY not in custom:
        return original(scheduler, received)
    cache = find(scheduler.tree_cache)
    if cache is None:
        _refuse(scheduler, received, no_states())
        return None
    try:
        _admit(scheduler, cache, received, custom[KEY])
    except Refusal as refusal:
        cache.store.counts["rejected"] += 1
        _refuse(scheduler, received, refusal)
        return None
    except StateRunning:
        return None
    except Exception:  # nothing was opened yet: one request fails, the server goes on
        logger.exception("admission of request %s failed", received.rid)
        _refuse(scheduler, received, Refusal("internal", "admission failed; the server's log says why"))
        return None
    return original(scheduler, received)


def after_process_input_requests(result: Any, scheduler: Any, received: Any) -> None:
    """Once a scheduler step: close what SGLang dropped without telling its cache, then wake who waited."""
    cache = find(scheduler.tree_cache)
    if cache is None:
        return
    if DEBUG:
        cache.store.check()
    _refuse_what_never_fits(scheduler, cache)
    if cache.runs:
        live = set(adapter().live_ids(scheduler))
        for request_id in [request_id for request_id in cache.runs if request_id not in live]:
            cache.drop(request_id)
            adapter().unblock_admission(scheduler)
    while (waiting := cache.store.next_ready()) is not None:
        custom = waiting.request.sampling_params.custom_params
        if not waiting.keep:  # released while it waited
            custom[KEY] = json.dumps({**json.loads(custom[KEY]), "keep": False})
        scheduler.handle_generate_request(waiting.request)


def around_abort_request(original: Callable[..., Any], scheduler: Any, aborted: Any) -> Any:
    """SGLang does not know the requests that wait here."""
    cache = find(scheduler.tree_cache)
    all_waiting = cache.store.waiting if cache is not None else {}
    for state_id, waiting in list(all_waiting.items()):
        request = waiting.request
        if aborted.abort_all or request.rid.startswith(aborted.rid):
            del all_waiting[state_id]
            message = AbortReq(rid=request.rid, abort_message="aborted while it waited for a parent state")
            scheduler.ipc_channels.send_to_tokenizer.send_output(message, request)
    return original(scheduler, aborted)


def _admit(scheduler: Any, cache: AnabranchCache, received: Any, text: Any) -> None:
    """Compile the request's context, open it in the store, and put the context's tokens before its own.

    Raises Refusal; StateRunning if it was put among the waiting.
    """
    began = time.perf_counter()
    _check_features(received)
    spec = parse_spec(text, received.rid)
    assert spec.id is not None
    store, model = cache.store, cache.model
    if model.traits.unsupported is not None:
        raise Refusal("unsupported_model_feature", f"states do not work with {model.traits.unsupported} yet")
    store.check_new(spec.id)
    stamp = replace(model.stamp, adapter=received.lora_id)
    turn = store.turn_after(spec.refs) if spec.turn == "inherited" else spec.turn
    try:
        parents = store.parents(spec.refs, stamp)
    except StateRunning as running:
        store.waiting[spec.id] = Waiting(spec.id, running.state_id, received, spec.refs, turn, spec.keep)
        raise
    plan = compile_context(spec, parents)
    if plan.shifted and model.can_shift is not None:
        shifted = next(interval for interval in plan.intervals if interval.delta)
        raise Refusal(
            "unsupported_model_feature",
            f"state {shifted.segment.id} would be read at shifted positions, which {model.can_shift} cannot do",
            hint='place it with "keep"',
            param="place",
        )
    own = _own_tokens(scheduler, received, len(plan))
    room = min(model.max_context - len(plan), model.traits.max_positions - plan.start) - len(own)
    sampling = received.sampling_params
    if sampling.max_new_tokens is None:
        sampling.max_new_tokens = max(room, 0)
    check_limits(plan, len(own) + sampling.max_new_tokens, model.traits.max_positions, model.max_context)
    _check_pool(scheduler, cache, len(own) + min(sampling.max_new_tokens, CLIP_MAX_NEW_TOKENS))
    running = Running(
        id=spec.id,
        context=plan,
        input_tokens=len(own),
        stamp=stamp,
        refs=spec.refs,
        turn=turn,
        keep=spec.keep,
    )
    store.open(running)
    cache.runs[received.rid] = Run(running, compile_seconds=time.perf_counter() - began)
    received.input_ids = array("q", plan.tokens()) + own
    if received.return_logprob and received.logprob_start_len >= 0:
        received.logprob_start_len += len(plan)  # clients count from their own input


def parse_spec(text: Any, request_id: str) -> AdmittedSpec:
    """The spec of `custom_params`; its state gets the request's id if it names none. Raises Refusal."""
    param = f"custom_params.{KEY}"
    if not isinstance(text, str):
        raise Refusal("invalid_request", f"{param} is a JSON string, not {type(text).__name__}", param=param)
    try:
        given = from_json(text)
    except ValueError as error:
        raise Refusal("invalid_request", f"{param} is not JSON: {error}", param=param) from error
    try:
        named = {**given, "id": given.get("id") or request_id} if isinstance(given, dict) else given
        return AdmittedSpec.model_validate(named)
    except ValidationError as error:
        raise invalid(error, prefix=param) from error


def _check_features(received: Any) -> None:
    asked = {
        "input_embeds": received.input_embeds is not None,
        "mm_inputs": received.mm_inputs is not None,
        "session_params": received.session_params is not None,
        "sampling_seed": received.sampling_params.sampling_seed is not None,
        "n over 1 (ask once for each state)": (received.sampling_params.n or 1) > 1,
    }
    for name, present in asked.items():
        if present:
            raise Refusal("invalid_request", f"a state cannot be made with {name}", param=name.split()[0])


def _own_tokens(scheduler: Any, received: Any, visible: int) -> array:
    own = received.input_ids
    tokenizer = scheduler.tokenizer
    if visible and received.input_text and tokenizer is not None:
        start = tokenizer("").input_ids  # what the tokenizer puts before a text belongs at a root only
        own = own[len(start) :] if list(own[: len(start)]) == start else own
    if not len(own):
        raise Refusal(
            "invalid_request",
            "the input is empty: a state has at least one token of its own",
            hint="append text, messages or tokens",
            param="input",
        )
    return own


def _refuse_what_never_fits(scheduler: Any, cache: AnabranchCache) -> None:
    """Nothing runs, and the first in the queue does not fit beside what states hold by now: it and all behind it
    would wait for ever. Plain requests too."""
    while scheduler.waiting_queue and adapter().nothing_runs(scheduler):
        req = scheduler.waiting_queue[0]
        run = cache.run_of(req)
        context = len(run.running.context) if run is not None else 0
        sampled = len(req.output_ids)
        new = min(req.sampling_params.max_new_tokens - sampled, CLIP_MAX_NEW_TOKENS)
        try:
            _check_pool(scheduler, cache, len(req.origin_input_ids) - context + sampled + new)
        except Refusal as refusal:
            del scheduler.waiting_queue[0]
            _refuse(scheduler, req, refusal)
        else:
            return


def _check_pool(scheduler: Any, cache: AnabranchCache, needed: int) -> None:
    """Refuse what could only ever run after states are released; SGLang's queue would wait for it for ever."""
    left = scheduler.max_total_num_tokens - cache.store.held_tokens - scheduler.page_size
    if needed >= left:
        raise Refusal(
            "pool_exhausted",
            f"{needed} new tokens do not fit: states hold {cache.store.held_tokens} of the pool's "
            f"{scheduler.max_total_num_tokens} tokens",
            hint="release states that are no longer needed, or serve with a larger --max-total-tokens",
        )


def _refuse(scheduler: Any, received: Any, refusal: Refusal) -> None:
    """SGLang knows two kinds of refusal, 400 and 503; the precise one rides along for our own routes."""
    hint = f" ({refusal.hint})" if refusal.hint else ""
    reason = {
        "type": "abort",
        "message": f"{refusal.code}: {refusal.message}{hint}",
        "status_code": 503 if refusal.code == "pool_exhausted" else 400,
        "err_type": "BadRequestError",
        KEY: refusal.body(received.rid).model_dump_json(),
    }
    adapter().send_abort(scheduler, received, reason)
