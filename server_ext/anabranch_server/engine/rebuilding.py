"""Bringing states back into memory: what a parked request reads is computed again, then the request starts.

A rebuild is a request of our own that prefills a segment's tokens with the context that they had. It does not decide
what leaves memory (`holdings.py`).
"""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from anabranch_server.compile import ContextPlan
from anabranch_server.engine.admission import refuse
from anabranch_server.engine.cache import AnabranchCache, Parked, Run
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal
from anabranch_server.segments import Interval, Segment
from anabranch_server.states import Running

_number = 0


def advance(scheduler: Any, cache: AnabranchCache) -> None:
    """Once a step: start parked requests that can start, and rebuild for those that cannot yet, first come first."""
    for received in cache.swept:
        refuse(scheduler, received, Refusal("pool_exhausted", "the server's memory was cleared meanwhile"))
    cache.swept.clear()
    for segment in cache.not_rebuilt:
        _give_up_on(scheduler, cache, segment)
    cache.not_rebuilt.clear()
    for request_id, parked in list(cache.parked.items()):
        missing = cache.store.holdings.missing(parked.run.running.context.intervals)
        if not missing:
            del cache.parked[request_id]
            scheduler.handle_generate_request(parked.received)  # it has no spec any more, so it goes straight through
            continue
        parked.started = parked.started or _fits(scheduler, cache, parked)
        if parked.started:
            for segment in missing:
                _rebuild(scheduler, cache, parked, segment)
    if cache.parked and adapter().nothing_runs(scheduler) and not scheduler.waiting_queue:
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


def _give_up(scheduler: Any, cache: AnabranchCache, request_id: str) -> None:
    """What a parked request reads does not fit beside what others hold."""
    parked = cache.parked.pop(request_id)
    cache.drop(request_id)
    cache.store.count(parked.run.running.tenant, "rejected")
    refuse(
        scheduler,
        parked.received,
        Refusal(
            "pool_exhausted",
            "the states that it reads left memory, and there is no room to compute them again",
            hint="release states that are no longer needed, or ask again later",
        ),
    )


def _give_up_on(scheduler: Any, cache: AnabranchCache, segment: Segment) -> None:
    """Its rebuild ended without a result: whoever waits for it is refused."""
    for request_id, parked in list(cache.parked.items()):
        if segment in cache.store.holdings.missing(parked.run.running.context.intervals):
            _give_up(scheduler, cache, request_id)


def _rebuild(scheduler: Any, cache: AnabranchCache, parked: Parked, segment: Segment) -> None:
    """Begin to compute a segment again, unless that is under way or what it needs is not in memory either."""
    global _number
    holdings = cache.store.holdings
    assert segment.context is not None
    if any(run.rebuilds is segment for run in cache.runs.values()) or holdings.missing(segment.context):
        return
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
        new += one.new_tokens
    fixed = cache.store.holdings.unmovable_beside(intervals)
    return fixed + new < scheduler.max_total_num_tokens - scheduler.page_size
