"""What can be asked of the store from outside the scheduler process, and the answers.

How the questions come here is `channel.py`'s business.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.utils import TypeBasedDispatcher

from anabranch import wire
from anabranch_server.compile import ContextPlan, compile_context
from anabranch_server.counting import counts_by_label, counts_of
from anabranch_server.engine.cache import AnabranchCache, find
from anabranch_server.engine.channel import ControlReply, ControlRequest
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal, StateRunning, no_states
from anabranch_server.mappers import check_names, origin
from anabranch_server.states import Waiting

logger = logging.getLogger(__name__)


def serve(scheduler: Any) -> None:
    """Make this scheduler answer control requests."""

    def answer(op: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        try:
            cache = find(scheduler.tree_cache)
            if cache is None:
                raise no_states()
            return True, OPERATIONS[op](scheduler, cache, **arguments)
        except Refusal as refusal:
            return False, refusal.body().model_dump()
        except Exception:  # a question must never end the server
            logger.exception("control request %r failed", op)
            error = wire.ErrorBody(code="internal", message=f"{op} failed; the server's log says why")
            return False, error.model_dump()

    def answer_all(request: ControlRequest) -> ControlReply:
        return ControlReply(body=json.dumps([answer(op, arguments) for op, arguments in json.loads(request.body)]))

    scheduler._request_dispatcher += TypeBasedDispatcher([(ControlRequest, answer_all)])


def _info(scheduler: Any, cache: AnabranchCache, tenant: str, id: str) -> Any:
    return cache.store.info(tenant, id).model_dump(mode="json")


def _list(scheduler: Any, cache: AnabranchCache, tenant: str) -> Any:
    return wire.StateList(states=tuple(cache.store.list(tenant))).model_dump(mode="json")


def _turn(scheduler: Any, cache: AnabranchCache, tenant: str, refs: list[dict[str, Any]]) -> Any:
    return cache.store.turn_after(tenant, [wire.Ref.model_validate(ref) for ref in refs])


def _release(scheduler: Any, cache: AnabranchCache, tenant: str, ids: list[str], strict: bool) -> Any:
    """`strict`: refuse for the first id that is not there."""
    done, unknown = [], []
    for state_id in ids:
        try:
            cache.store.release(tenant, state_id)
            done.append(state_id)
        except Refusal:
            if strict:
                raise
            unknown.append(state_id)
    adapter().unblock_admission(scheduler)
    return wire.Released(released=tuple(done), unknown=tuple(unknown)).model_dump(mode="json")


def _renew(
    scheduler: Any, cache: AnabranchCache, tenant: str, ids: list[str], lease: float | None, strict: bool
) -> Any:
    renewed, lost = [], []
    for state_id in ids:
        try:
            cache.store.renew(tenant, state_id, lease)
            renewed.append(state_id)
        except Refusal:
            if strict:
                raise
            lost.append(state_id)
    return wire.Renewal(renewed=tuple(renewed), lost=tuple(lost)).model_dump(mode="json")


def _cancel(scheduler: Any, cache: AnabranchCache, tenant: str, id: str) -> Any:
    known = cache.store.known(tenant, id)
    if isinstance(known, Waiting):
        scheduler.abort_request(AbortReq(rid=known.request.rid))
    for request_id, run in list(cache.runs.items()):
        if run.running is known:
            scheduler.abort_request(AbortReq(rid=request_id))
    return {}


def _explain(scheduler: Any, cache: AnabranchCache, tenant: str, id: str | None, spec: dict[str, Any] | None) -> Any:
    store = cache.store
    if id is not None:
        known = store.known(tenant, id)
        if isinstance(known, Waiting):
            raise _not_known_yet(known.parent, "id")
        return explanation(known.context).model_dump(mode="json")
    context = wire.ContextSpec.model_validate(spec)
    check_names(context.refs, cache.mappers, "spec.refs")
    try:
        parents = store.parents(tenant, context.refs)
    except StateRunning as running:
        raise _not_known_yet(running.state_id, "spec.refs") from None
    return explanation(compile_context(context, parents, store.derivation())).model_dump(mode="json")


def _not_known_yet(state_id: str, param: str) -> Refusal:
    message = f"state {state_id} is still running, so what will be visible is not known yet"
    return Refusal("invalid_request", message, param=param)


def _ping(scheduler: Any, cache: AnabranchCache) -> Any:
    return {}


def _tick(scheduler: Any, cache: AnabranchCache, now: float, counted: bool) -> Any:
    """It is `now`, for all ranks: leases end here. Answers with the counts if the metrics want them."""
    if cache.store.expire(now):
        adapter().unblock_admission(scheduler)
    return _stats(scheduler, cache, tenant="", everything=True) if counted else {}


def _stats(scheduler: Any, cache: AnabranchCache, tenant: str, everything: bool) -> Any:
    total = scheduler.max_total_num_tokens
    if not everything:
        mine = counts_of(cache.store, tenant)
        return wire.Stats.model_validate({**mine, "total_tokens": total}).model_dump(mode="json")
    by_label = counts_by_label(cache.store)
    sums: Counter[str] = Counter()
    for counts in by_label.values():
        sums.update(counts)
    free = cache.token_to_kv_pool_allocator.available_size()
    evictable = cache.inner.evictable_size()
    pool = {
        "total_tokens": total,
        "free_tokens": free,
        "evictable_tokens": evictable,
        "in_use_tokens": total - free - evictable - cache.store.holdings.held_tokens,
    }
    tenants = [{"tenant": name, **counts} for name, counts in sorted(by_label.items())]
    return wire.Stats.model_validate({**sums, **pool, "tenants": tenants}).model_dump(mode="json")


def explanation(plan: ContextPlan) -> wire.Explanation:
    return wire.Explanation(
        intervals=tuple(
            wire.Interval(
                state=origin(interval.segment)[0],
                mapper=origin(interval.segment)[1],
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


OPERATIONS: dict[str, Callable[..., Any]] = {
    "info": _info,
    "list": _list,
    "turn": _turn,
    "release": _release,
    "renew": _renew,
    "cancel": _cancel,
    "explain": _explain,
    "ping": _ping,
    "tick": _tick,
    "stats": _stats,
}
