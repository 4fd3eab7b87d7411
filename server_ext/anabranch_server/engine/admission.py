"""Admission: from a request as SGLang receives it to a compiled context, or a refusal, before anything runs.

A request whose parents are not sealed yet waits here, and one whose context is not in memory is parked
(`rebuilding.py`). Requests that carry no spec pass untouched.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from anabranch import wire
from anabranch_server.chat import Turn
from anabranch_server.compile import ContextPlan, check_limits, compile_context
from anabranch_server.engine.cache import AnabranchCache, Parked, Run, find
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal, StateRunning, invalid, no_states
from anabranch_server.mappers import check_names
from anabranch_server.segments import Segment
from anabranch_server.states import Running, Waiting

logger = logging.getLogger(__name__)
KEY = "anabranch"
"""Our key in `custom_params`; its value is a JSON string."""
TENANT = "anabranch_tenant"
"""Beside it, whose request this is; `access.py` sets it, whatever the client sent."""


class AdmittedSpec(wire.ContextSpec):
    """A context spec as it reaches the scheduler. `turn` is set by our own route if it rendered messages; else the
    state ends as what it continues."""

    turn: Turn | Literal["inherited"] | None = "inherited"
    generated_tokens: wire.Index = 0
    """How many of the request's last tokens count as generated."""
    again: bool = False


def around_handle_generate_request(original: Callable[..., Any], scheduler: Any, received: Any) -> Any:
    custom = received.sampling_params.custom_params
    if not isinstance(custom, dict) or KEY not in custom:
        return original(scheduler, received)
    cache = find(scheduler.tree_cache)
    if cache is None:
        refuse(scheduler, received, no_states())
        return None
    tenant = custom.get(TENANT, "")
    try:
        run = _admit(scheduler, cache, received, custom[KEY], tenant)
    except Refusal as refusal:
        cache.store.count(tenant, "rejected")
        refuse(scheduler, received, refusal)
        return None
    except StateRunning:
        return None
    except Exception:  # one request fails, the server goes on; what was opened is swept in this step
        logger.exception("admission of request %s failed", received.rid)
        refuse(scheduler, received, Refusal("internal", "admission failed; the server's log says why"))
        return None
    if cache.store.holdings.missing(run.running.context.intervals):
        new = run.own_input + min(received.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        del custom[KEY]  # it is admitted
        cache.parked[received.rid] = Parked(received, run, new)
        return None
    return original(scheduler, received)


def wake(scheduler: Any, cache: AnabranchCache) -> None:
    """Admit again those whose parents are sealed or gone by now."""
    while (waiting := cache.store.next_ready()) is not None:
        custom = waiting.request.sampling_params.custom_params
        if not waiting.keep:  # released while it waited
            custom[KEY] = json.dumps({**json.loads(custom[KEY]), "keep": False})
        scheduler.handle_generate_request(waiting.request)


def around_abort_request(original: Callable[..., Any], scheduler: Any, aborted: Any) -> Any:
    """SGLang does not know the requests that wait here."""
    cache = find(scheduler.tree_cache)
    if cache is None:
        return original(scheduler, aborted)

    def meant(request_id: str) -> bool:
        return aborted.abort_all or request_id.startswith(aborted.rid)

    for req in scheduler.waiting_queue:
        if meant(req.rid):
            cache.queue.leave(req.rid)
    for run in [run for request_id, run in cache.runs.items() if meant(request_id)]:
        run.cancelled = True
    for tenant, space in list(cache.store.spaces.items()):
        for waiting in [one for one in space.waiting.values() if meant(one.request.rid)]:
            cache.store.stop_waiting(tenant, waiting.id)
            cache.store.count(tenant, "cancelled")
            adapter().send_abort(scheduler, waiting.request, None)
    for request_id in [request_id for request_id in cache.parked if meant(request_id)]:
        adapter().send_abort(scheduler, cache.parked.pop(request_id).received, None)
        cache.drop(request_id)
    return original(scheduler, aborted)


def _admit(scheduler: Any, cache: AnabranchCache, received: Any, text: Any, tenant: str) -> Run:
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
    check_names(spec.refs, cache.mappers)
    store.check_new(tenant, spec.id, again=spec.again)
    name = adapter().lora_name(scheduler, received.lora_id)
    stamp = replace(model.stamp, adapter=received.lora_id, adapter_name=name)
    turn = store.turn_after(tenant, spec.refs) if spec.turn == "inherited" else spec.turn
    try:
        parents = store.parents(tenant, spec.refs, stamp)
    except StateRunning as running:
        store.wait(Waiting(spec.id, running.state_id, received, spec.refs, turn, spec.keep, tenant))
        raise
    plan = compile_context(spec, parents, store.derivation())
    if plan.shifted and model.can_shift is not None:
        shifted = next(interval for interval in plan.intervals if interval.delta)
        raise Refusal(
            "unsupported_model_feature",
            f"state {shifted.segment.id} would be read at shifted positions, which {model.can_shift} cannot do",
            hint='place it with "keep"',
            param="place",
        )
    _check_can_come_back(scheduler, cache, plan)
    own = _own_tokens(scheduler, received, len(plan))
    room = min(model.max_context - len(plan), model.traits.max_positions - plan.start) - len(own)
    sampling = received.sampling_params
    if sampling.max_new_tokens is None:
        sampling.max_new_tokens = max(room, 0)
    check_limits(plan, len(own) + sampling.max_new_tokens, model.traits.max_positions, model.max_context)
    store.check_remade(tenant, spec.id, plan, own if sampling.max_new_tokens == 0 else (), stamp)
    held = store.holdings.in_pages(len(own) + sampling.max_new_tokens) if spec.keep else 0
    if held := held + store.derived_tokens(spec.refs, plan):
        store.check_tokens(tenant, held)
    room = int(scheduler.max_total_num_tokens * store.limits.pinned_share)
    check_pool(cache, plan, len(own) + min(sampling.max_new_tokens, CLIP_MAX_NEW_TOKENS), room - scheduler.page_size)
    running = Running(
        id=spec.id,
        context=plan,
        input_tokens=len(own) - min(spec.generated_tokens, len(own) - 1),
        stamp=stamp,
        refs=spec.refs,
        turn=turn,
        keep=spec.keep,
        keep_partial=spec.keep_partial and spec.keep,
        lease=spec.lease,
        tenant=tenant,
    )
    store.open(running, again=spec.again)
    cache.runs[received.rid] = run = Run(running, len(own), compile_seconds=time.perf_counter() - began)
    received.input_ids = array("q", plan.tokens()) + own
    if received.return_logprob and received.logprob_start_len >= 0:
        received.logprob_start_len += len(plan)  # clients count from their own input
    return run


def _check_can_come_back(scheduler: Any, cache: AnabranchCache, plan: ContextPlan) -> None:
    """What left memory is computed again under its own adapter; a declared reader may outlive that."""
    if not cache.store.limits.adapter_reads:
        return
    for segment in cache.store.holdings.missing(plan.intervals):
        if not adapter().has_lora(scheduler, segment.stamp.adapter):
            raise adapter_is_gone(segment)


def adapter_is_gone(segment: Segment) -> Refusal:
    return Refusal(
        "state_incompatible",
        f"state {segment.state} left memory, and its adapter {segment.stamp.adapter_name}, which would have to compute "
        "it again, was unloaded",
        hint="compute it anew",
        param="refs",
    )


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


def check_pool(cache: AnabranchCache, plan: ContextPlan, needed: int, room: int) -> None:
    """Refuse what could only ever run after states are released; SGLang's queue would wait for it for ever.

    `needed` new tokens have to fit into `room`, the pool without the page that SGLang keeps back for a request's last
    one, beside everything that cannot be evicted while `plan` is read.
    """
    store = cache.store
    again = store.holdings.missing(plan.intervals)
    fixed = store.holdings.unmovable_beside([*plan.intervals, *(one for s in again for one in s.context or ())])
    if fixed + needed >= room:
        raise Refusal(
            "pool_exhausted",
            f"{needed} new tokens do not fit: states hold {fixed} of the {room} tokens that they may hold",
            hint="release states that are no longer needed, or serve with a larger --max-total-tokens",
        )


def refuse(scheduler: Any, received: Any, refusal: Refusal) -> None:
    """SGLang knows two kinds of refusal, 400 and 503; the precise one rides along for our own routes."""
    hint = f" ({refusal.hint})" if refusal.hint else ""
    reason = {
        "type": "abort",
        "message": f"{refusal.code}: {refusal.message}{hint}",
        "status_code": 503 if refusal.status in (429, 503) else 400,
        "err_type": "BadRequestError",
        KEY: refusal.body(received.rid).model_dump_json(),
    }
    adapter().send_abort(scheduler, received, reason)
