"""The control channel: what is asked of the store from outside the scheduler process, and answered between steps.

One request type and one reply type, both carrying JSON, so that either of SGLang's IPC formats takes them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import BaseReq
from sglang.utils import TypeBasedDispatcher

from anabranch import wire
from anabranch_server.compile import ContextPlan, compile_context
from anabranch_server.engine.cache import AnabranchCache, find
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal, StateRunning, no_states

logger = logging.getLogger(__name__)
NAME = "anabranch_control"


class ControlRequest(BaseReq, kw_only=True):
    op: str
    body: str = "{}"


class ControlReply(BaseReq, kw_only=True):
    ok: bool
    body: str = "{}"
    """JSON: the answer, or an ErrorBody."""


async def ask(tokenizer_manager: Any, op: str, **arguments: Any) -> Any:
    """Ask the scheduler; returns the decoded answer, or raises Refusal."""
    tokenizer_manager.auto_create_handle_loop()
    channel = getattr(tokenizer_manager, f"{NAME}_communicator")
    reply = (await channel(ControlRequest(op=op, body=json.dumps(arguments))))[0]
    answer = json.loads(reply.body)
    if not reply.ok:
        raise Refusal(answer["code"], answer["message"], hint=answer["hint"], param=answer["param"])
    return answer


def serve(scheduler: Any) -> None:
    """Make this scheduler answer control requests."""

    def answer(request: ControlRequest) -> ControlReply:
        try:
            cache = find(scheduler.tree_cache)
            if cache is None:
                raise no_states()
            return ControlReply(ok=True, body=OPERATIONS[request.op](scheduler, cache, **json.loads(request.body)))
        except Refusal as refusal:
            return ControlReply(ok=False, body=refusal.body().model_dump_json())
        except Exception:  # a question must never end the server
            logger.exception("control request %r failed", request.op)
            error = wire.ErrorBody(code="internal", message=f"{request.op} failed; the server's log says why")
            return ControlReply(ok=False, body=error.model_dump_json())

    scheduler._request_dispatcher += TypeBasedDispatcher([(ControlRequest, answer)])


def _info(scheduler: Any, cache: AnabranchCache, id: str) -> str:
    return cache.store.info(id).model_dump_json()


def _list(scheduler: Any, cache: AnabranchCache) -> str:
    store = cache.store
    known = (*store.states.values(), *store.running.values(), *store.waiting.values())
    states = [item.info() for item in known]
    return wire.StateList(states=tuple(states)).model_dump_json()


def _turn(scheduler: Any, cache: AnabranchCache, refs: list[dict[str, Any]]) -> str:
    return json.dumps(cache.store.turn_after([wire.Ref.model_validate(ref) for ref in refs]))


def _release(scheduler: Any, cache: AnabranchCache, id: str) -> str:
    cache.store.release(id)
    adapter().unblock_admission(scheduler)
    return "{}"


def _explain(scheduler: Any, cache: AnabranchCache, id: str | None, spec: dict[str, Any] | None) -> str:
    store = cache.store
    if id is not None:
        return explanation((store.running.get(id) or store.state(id)).context).model_dump_json()
    context = wire.ContextSpec.model_validate(spec)
    try:
        parents = store.parents(context.refs)
    except StateRunning as running:
        raise Refusal(
            "invalid_request",
            f"state {running.state_id} is still running, so what will be visible is not known yet",
            param="spec.refs",
        ) from None
    return explanation(compile_context(context, parents)).model_dump_json()


def _stats(scheduler: Any, cache: AnabranchCache) -> str:
    store = cache.store
    total = scheduler.max_total_num_tokens
    free = cache.token_to_kv_pool_allocator.available_size()
    evictable = cache.evictable_size()
    return wire.Stats(
        states=len(store.states),
        running=len(store.running),
        waiting=len(store.waiting),
        total_tokens=total,
        free_tokens=free,
        evictable_tokens=evictable,
        held_tokens=store.held_tokens,
        in_use_tokens=total - free - evictable - store.held_tokens,
        created=store.counts["created"],
        freed=store.counts["freed"],
        failed=store.counts["failed"],
        rejected=store.counts["rejected"],
    ).model_dump_json()


def explanation(plan: ContextPlan) -> wire.Explanation:
    return wire.Explanation(
        intervals=tuple(
            wire.Interval(
                state=interval.segment.id,
                start=interval.start,
                stop=interval.stop,
                native=interval.native,
                effective=interval.effective,
                propagate=interval.propagate,
            )
            for interval in plan.intervals
        ),
        start=plan.start,
        context_tokens=len(plan),
    )


OPERATIONS: dict[str, Callable[..., str]] = {
    "info": _info,
    "list": _list,
    "turn": _turn,
    "release": _release,
    "explain": _explain,
    "stats": _stats,
}
