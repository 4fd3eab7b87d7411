"""What we do once a scheduler step, when its messages are read: hold back, sweep, wake, rebuild, take turns.

Only the order of these is decided here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from anabranch_server.compile import ContextPlan
from anabranch_server.engine import rebuilding
from anabranch_server.engine.admission import check_pool, refuse, wake
from anabranch_server.engine.cache import AnabranchCache, find
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal

DEBUG = os.environ.get("ANABRANCH_DEBUG") == "1"
"""Check the conservation laws in every step; a violation ends the server."""
DIGESTS = os.environ.get("ANABRANCH_DIGESTS")
"""A folder: with DEBUG, each rank notes there what its store comes to, so that ranks can be compared."""
_steps = 0


def around_process_input_requests(original: Callable[..., None], scheduler: Any, received: list[Any]) -> None:
    cache = find(scheduler.tree_cache)
    if cache is None:
        return original(scheduler, received)
    original(scheduler, _without_held_back(scheduler, cache, received))
    if DEBUG:
        cache.check()
        _note_digest(scheduler, cache)
    _refuse_what_never_fits(scheduler, cache)
    _sweep(scheduler, cache)
    wake(scheduler, cache)
    rebuilding.advance(scheduler, cache)
    _take_turns(scheduler, cache)
    return None


def _without_held_back(scheduler: Any, cache: AnabranchCache, received: list[Any]) -> list[Any]:
    """Messages whose time has come: those that need an idle scheduler wait for the end of rebuilds."""
    received, cache.held_back = [*cache.held_back, *received], []
    if not any(run.rebuilds is not None for run in cache.runs.values()):
        return received
    now = []
    for message in received:
        (cache.held_back if adapter().needs_idle(message, scheduler) else now).append(message)
    return now


def _note_digest(scheduler: Any, cache: AnabranchCache) -> None:
    global _steps
    _steps += 1
    if DIGESTS and _steps % 50 == 0:
        with open(os.path.join(DIGESTS, f"rank-{scheduler.ps.tp_rank}"), "a") as notes:
            notes.write(f"{_steps} {cache.digest()}\n")


def _sweep(scheduler: Any, cache: AnabranchCache) -> None:
    """Close what SGLang dropped without telling its cache."""
    if not cache.runs:
        return
    live = {*adapter().live_ids(scheduler), *cache.parked}
    for request_id in [request_id for request_id in cache.runs if request_id not in live]:
        cache.drop(request_id)
        adapter().unblock_admission(scheduler)


def _refuse_what_never_fits(scheduler: Any, cache: AnabranchCache) -> None:
    """Nothing runs, and the first in the queue does not fit beside what states hold by now: it and all behind it
    would wait for ever. Plain requests too."""
    room = scheduler.max_total_num_tokens - scheduler.page_size
    while scheduler.waiting_queue and adapter().nothing_runs(scheduler):
        req = scheduler.waiting_queue[0]
        run = cache.run_of(req)
        plan = run.running.context if run is not None else ContextPlan()
        sampled = len(req.output_ids)
        new = min(req.sampling_params.max_new_tokens - sampled, CLIP_MAX_NEW_TOKENS)
        try:
            check_pool(cache, plan, len(req.origin_input_ids) - len(plan) + sampled + new, room)
        except Refusal as refusal:
            del scheduler.waiting_queue[0]
            refuse(scheduler, req, refusal)
        else:
            return


def _take_turns(scheduler: Any, cache: AnabranchCache) -> None:
    """Order the waiting queue so that no flow keeps the others from running."""
    queue = scheduler.waiting_queue
    if len(queue) < 2 or not adapter().fair_order_matters(scheduler):
        return
    entries = []
    for req in queue:
        run = cache.run_of(req)
        refs = run.running.refs if run is not None else ()
        flow = (run.running.tenant, refs[0].id) if run is not None and refs else req.rid
        first = bool(req.retraction_count) or (run is not None and run.rebuilds is not None)
        entries.append((req.rid, flow, first))
    queue[:] = [queue[i] for i in cache.queue.order(entries)]
