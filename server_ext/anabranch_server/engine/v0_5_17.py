"""What is peculiar to SGLang 0.5.17: the KV record of a request, the cache contract's results, who is alive.

No decisions here. A second version is a second module with the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import (
    AbortReq,
    ReleaseMemoryOccupationReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    Req,
)
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

NAN_REASON = "NaN happened"  # how SGLang reports a token that no model could have sampled


def row(req: Req) -> int:
    """The request's row in `req_to_token`."""
    assert req.req_pool_idx is not None, "a request has a row from its first prefill on"
    return req.req_pool_idx


def context_length(req: Req) -> int:
    """Number of leading entries of the row that belong to others (states)."""
    return req.cache_protected_len


def committed_length(req: Req) -> int:
    """Number of tokens whose KV is written, or will be by a forward that is already launched."""
    return req.kv_committed_len


@contextmanager
def without_contexts(requests: Iterable[tuple[Req, int]]) -> Iterator[None]:
    """Meanwhile each of these requests is as long as if its context, whose length is given, did not exist."""
    requests = [(req, length) for req, length in requests if req.kv is not None]
    _lengthen(requests, -1)
    try:
        yield
    finally:
        _lengthen(requests, +1)


def _lengthen(requests: Iterable[tuple[Req, int]], by: int) -> None:
    for req, length in requests:
        assert req.kv is not None
        req.kv_committed_len += by * length
        req.kv.kv_allocated_len += by * length
        req.cache_protected_len += by * length


def prefilled_length(req: Req) -> int:
    """Number of tokens that the current prefill chunk reaches."""
    assert req.extend_range is not None, "only a request in prefill is asked"
    return req.extend_range.end


def match_result(slots: torch.Tensor, node: Any) -> MatchResult:
    """`slots` [n] int64: the KV that the request finds in place, none of it its own."""
    return MatchResult(
        device_indices=slots,
        last_device_node=node,
        last_host_node=node,
        best_match_node=node,
        cache_protected_len=len(slots),
    )


def is_aborted(req: Req) -> bool:
    """Whether the request ended, or is about to end, without a usable result."""
    reason = req.finished_reason
    nan = isinstance(reason, FINISH_MATCHED_STR) and reason.matched == NAN_REASON
    return isinstance(reason, FINISH_ABORT) or isinstance(req.to_finish, FINISH_ABORT) or nan


def is_cancelled(req: Req) -> bool:
    """Whether somebody asked for the request's end, now or before."""
    for reason in (req.finished_reason, req.to_finish):
        if isinstance(reason, FINISH_ABORT):
            return reason.status_code is None
    return False


def end_as_cancelled(req: Req) -> None:
    """Let a request that is to be aborted end well instead, with what it has."""
    length = len(req.output_ids)
    req.to_finish, req.finished_reason, req.finished_len = None, FINISH_LENGTH(length=length), length


def is_stub(req: Req, context: int) -> bool:
    """Whether SGLang replaced the prompt by one token, because it refused the request after we admitted it."""
    return req.to_finish is not None and len(req.full_untruncated_fill_ids) <= context


def prefer_stop(req: Req) -> None:
    """Make a stop that falls on the last allowed token a stop. SGLang looks at the limit first, and then no further."""
    reason, length = req.finished_reason, req.finished_len
    if not isinstance(reason, FINISH_LENGTH) or length != len(req.output_ids):
        return
    req.finished_reason = None
    if not (req._check_str_based_finish() or req._check_token_based_finish(list(req.output_ids[-1:]))):
        req.finished_reason, req.finished_len = reason, length


def matched_token(req: Any) -> int | None:
    """The stop token that ended the request; None if something else ended it."""
    reason = req.finished_reason
    if not isinstance(reason, FINISH_MATCHED_TOKEN):
        return None
    stop_ids: set[int] = set(req.sampling_params.stop_token_ids or ())
    stop_ids |= set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stop_ids |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return reason.matched if reason.matched in stop_ids else None


def matched_text(req: Req) -> str | None:
    """The stop string that ended the request; None if something else ended it."""
    reason = req.finished_reason
    return reason.matched if isinstance(reason, FINISH_MATCHED_STR) else None


def queue_seconds(req: Req) -> float:
    """Seconds between entering the waiting queue and the first forward."""
    stats = req.time_stats
    return max(0.0, stats.forward_entry_time - stats.wait_queue_entry_time)


def live_ids(scheduler: Any) -> Iterator[str]:
    """Ids of all requests that SGLang still knows. A request that is in none of these places is gone."""
    batches = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug]
    batches += [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    for batch in batches:
        yield from (req.rid for req in batch.reqs) if batch is not None else ()
    yield from (req.rid for req in scheduler.waiting_queue)
    yield from (req.rid for req in scheduler.grammar_manager.grammar_queue)
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req.rid


def nothing_runs(scheduler: Any) -> bool:
    """Whether only the waiting queue has requests, so that no memory will come free by itself."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    idle = all(batch is None or batch.is_empty() for batch in batches)
    return idle and scheduler.chunked_req is None and not getattr(scheduler, "result_queue", ())


def send_abort(scheduler: Any, received: Any, reason: dict[str, Any] | None) -> None:
    """Tell the client that a request, which never reached the queue, ended with `reason` (none: it was cancelled)."""
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=received.rid, finished_reason=reason), received)


def rebuild_request(received: Any, number: int, tokens: Any, adapter_id: str | None) -> Any:
    """A request that prefills `tokens`, generates nothing and answers nobody, on behalf of `received`.

    SGLang lets the output of ids with this prefix fall silently.
    """
    again = copy(received)
    again.rid = f"{HEALTH_CHECK_RID_PREFIX}_anabranch_{number}."  # the end: SGLang aborts by prefix
    again.input_text, again.input_ids, again.lora_id = "", tokens, adapter_id
    again.return_logprob, again.logprob_start_len, again.top_logprobs_num = False, -1, 0
    again.token_ids_logprob, again.stream = None, False
    again.sampling_params = SamplingParams(max_new_tokens=0, temperature=0)
    again.sampling_params.normalize(None)
    return again


def lora_name(scheduler: Any, lora_id: str | None) -> str | None:
    """The name under which an adapter was loaded; ids are unique to each load."""
    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    ref = manager.lora_refs.get(lora_id) if manager is not None else None
    return ref.lora_name if ref is not None else None


def has_lora(scheduler: Any, lora_id: str | None) -> bool:
    """Whether requests can run under this adapter; None is the model itself."""
    return lora_id is None or lora_id in scheduler.tp_worker.model_runner.lora_manager.lora_refs


def needs_idle(message: Any, scheduler: Any) -> bool:
    """Whether SGLang takes for granted that nothing runs when this message comes, and ends the server if not."""
    if isinstance(message, UnloadLoRAAdapterReqInput):  # it counts clients' requests, not our rebuilds
        return True
    updates = (UpdateWeightFromDiskReqInput, UpdateWeightsFromDistributedReqInput, UpdateWeightsFromTensorReqInput)
    kinds = (*updates, UpdateWeightsFromIPCReqInput, ReleaseMemoryOccupationReqInput)
    return isinstance(message, kinds) and not scheduler._engine_paused


def fair_order_matters(scheduler: Any) -> bool:
    """Whether the waiting queue is served in its own order, so that we may decide it."""
    return scheduler.policy.policy == CacheAgnosticPolicy.FCFS and not scheduler.enable_priority_scheduling


def unblock_admission(scheduler: Any) -> None:
    """Let the scheduler try its queue again after we freed memory; else only a finishing request would do it."""
    scheduler.running_batch.batch_is_full = False
