"""Bringing states back into memory: what a parked request reads is computed again, then the request starts.

A rebuild is a request of our own that prefills a segment's tokens with the context that they had. It does not decide
what leaves memory (`holdings.py`).
"""

from __future__ import annotations

import logging
import time
from array import array
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from anabranch_server.compile import ContextPlan
from anabranch_server.engine import mapping
from anabranch_server.engine.admission import adapter_is_gone, refuse
from anabranch_server.engine.cache import AnabranchCache, Parked, Run
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal
from anabranch_server.segments import Interval, Segment
from anabranch_server.states import Running

logger = logging.getLogger(__name__)
_number = 0


def advance(scheduler: Any, cache: AnabranchCache) -> None:
    """Once a step: start parked requests that can start, and rebuild for those that cannot yet, first come first."""
    for received in cache.swept:
        refuse(scheduler, received, Refusal("pool_exhausted", "the server's memory was cleared meanwhile"))
    cache.swept.clear()
    for segment, why in cache.not_rebuilt:
        _give_up_on(scheduler, cache, segment, why)
    cache.not_rebuilt.clear()
    moved = False
    for request_id, parked in list(cache.parked.items()):
        context = parked.run.running.context.intervals
        missing = cache.store.holdings.missing(context)
        parked.started = parked.started or not missing or _fits(scheduler, cache, parked)
        if missing and parked.started:
            before = len(missing)
            _bring_all_back(scheduler, cache, parked, missing)
            missing = cache.store.holdings.missing(context)  # what a mapper makes is there at once
            moved |= len(missing) < before
        if not missing:
            del cache.parked[request_id]
            scheduler.handle_generate_request(parked.received)  # it has no spec any more, so it goes straight through
    if cache.parked and not moved and adapter().nothing_runs(scheduler) and not scheduler.waiting_queue:
        _give_up(scheduler, cache, list(cache.parked)[-1])
    _end_left_over(scheduler, cache)


def _end_left_over(scheduler: Any, cache: AnabranchCache) -> None:
    """End the rebuilds that nobody waits for any more."""
    rebuilds = [(rid, run) for rid, run in cache.runs.items() if run.rebuilds is not None and not run.cancelled]
    if not rebuilds:
        return
    parked = [interval for one in cache.parked.values() for interval in one.run.running.context.intervals]
    awaited = cache.store.holdings.missing(parked)
    for request_id, run in rebuilds:
        if run.rebuilds not in awaited:
            scheduler.abort_request(AbortReq(rid=request_id))


NO_ROOM = Refusal(
    "pool_exhausted",
    "the states that it reads left memory, and there is no room to compute them again",
    hint="release states that are no longer needed, or ask again later",
)


def _give_up(scheduler: Any, cache: AnabranchCache, request_id: str, why: Refusal = NO_ROOM) -> None:
    """What a parked request reads does not come back."""
    parked = cache.parked.pop(request_id)
    cache.drop(request_id)
    cache.store.count(parked.run.running.tenant, "rejected")
    refuse(scheduler, parked.received, why)


def _give_up_on(scheduler: Any, cache: AnabranchCache, segment: Segment, why: Refusal | None) -> None:
    """Its rebuild ended without a result: whoever waits for it is refused."""
    for request_id, parked in list(cache.parked.items()):
        if segment in cache.store.holdings.missing(parked.run.running.context.intervals):
            _give_up(scheduler, cache, request_id, why or NO_ROOM)


def _bring_all_back(scheduler: Any, cache: AnabranchCache, parked: Parked, missing: list[Segment]) -> None:
    """What is derived needs room at once: what others of them are made of must not make it."""
    sources = [part for segment in missing if segment.mapper is not None for part in segment.context or ()]
    cache.store.read(sources)
    for segment in missing:
        _bring_back(scheduler, cache, parked, segment)
    cache.store.done_reading(sources)


def _bring_back(scheduler: Any, cache: AnabranchCache, parked: Parked, segment: Segment) -> None:
    """Derive a segment, or begin to compute it again, unless that is under way or what it needs is not in memory."""
    assert segment.context is not None
    if any(run.rebuilds is segment for run in cache.runs.values()) or cache.store.holdings.missing(segment.context):
        return
    if segment.mapper is not None:
        _derive(scheduler, cache, parked, segment)
    elif not adapter().has_lora(scheduler, segment.stamp.adapter):
        cache.not_rebuilt.append((segment, adapter_is_gone(segment)))  # another may read what it computed
    else:
        _rebuild(scheduler, cache, parked, segment)


def _derive(scheduler: Any, cache: AnabranchCache, parked: Parked, segment: Segment) -> None:
    began = time.perf_counter()
    try:
        mapping.derive(scheduler, cache, segment)  # if there is no room now, there may be in the next step
    except Exception:  # anything that another package may raise
        logger.exception("the mapper %s failed", segment.mapper)
        failed = Refusal("internal", f"the mapper {segment.mapper} failed; the server's log says why")
        cache.not_rebuilt.append((segment, failed))
    parked.run.kv_seconds += time.perf_counter() - began


def _rebuild(scheduler: Any, cache: AnabranchCache, parked: Parked, segment: Segment) -> None:
    """Begin to compute a segment again."""
    global _number
    holdings = cache.store.holdings
    assert segment.context is not None
    length = holdings.needed_of(segment)
    context = ContextPlan(segment.context, segment.start)
    tokens = array("q", context.tokens()) + array("q", segment.tokens[:length])
    _number += 1
    again = adapter().rebuild_request(parked.received, _number, tokens, segment.stamp.adapter)
    running = Running(segment.id, context, length, segment.stamp, tenant=segment.owner)
    cache.store.read(segment.context)
    cache.runs[again.rid] = Run(running, length, rebuilds=segment)
    parked.run.rebuilt_tokens += length
    scheduler.handle_generate_request(again)


def _fits(scheduler: Any, cache: AnabranchCache, parked: Parked) -> bool:
    """Whether all that it needs fits, beside what those that were started before it need."""
    intervals: list[Interval] = []
    new = 0
    for one in (*(other for other in cache.parked.values() if other.started), parked):
        context = one.run.running.context.intervals
        intervals += context
        intervals += [part for segment in cache.store.holdings.missing(context) for part in segment.context or ()]
        new += cache.store.holdings.in_pages(one.new_tokens)
    fixed = cache.store.holdings.unmovable_beside(intervals)
    return fixed + new < scheduler.max_total_num_tokens - scheduler.page_size
