"""The cache backend `anabranch`: SGLang's own prefix cache, with states beside it.

A plain request goes straight through to the inner cache. A request that makes a state finds its context's KV through
this one, owns its own tokens until it ends, and then leaves them to the store. A joined context never enters the
inner cache: its KV was computed under another mask and other positions than the same text as a plain prompt.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)

from anabranch_server.engine.mapping import Mapper
from anabranch_server.engine.rows import RowTable
from anabranch_server.engine.versions import adapter
from anabranch_server.errors import Refusal
from anabranch_server.fairness import FairQueue
from anabranch_server.limits import Limits
from anabranch_server.models import ModelStamp, ModelTraits
from anabranch_server.segments import Segment
from anabranch_server.states import Running
from anabranch_server.store import StateStore


class ContextNode:
    """What SGLang locks in place of a tree node. Locking does nothing: the store retains a context's segments."""

    backuped = False


NODE = ContextNode()


@dataclass(slots=True)
class Run:
    """A request in flight that makes a state, or makes one again (`rebuilds`): the store's side and SGLang's side."""

    running: Running
    own_input: int
    """Tokens that it prefills after its context."""
    rebuilds: Segment | None = None
    cancelled: bool = False
    """Somebody asked for its end."""
    compile_seconds: float = 0.0
    kv_seconds: float = 0.0
    slots: torch.Tensor | None = None
    """[visible] int64, made when first matched."""
    rebuilt_tokens: int = 0
    """Computed again so that this could run."""
    kept_output: int = 0
    """Generated tokens that the state will own; known when the request finishes."""
    hidden_finish: tuple[Any, int] | None = None
    """(reason, output length) of a request that has finished but runs one more step to seal its last token."""


@dataclass(slots=True)
class Parked:
    """An admitted request that waits until everything it reads is in memory. `received` is SGLang's."""

    received: Any
    run: Run
    new_tokens: int
    started: bool = False


@dataclass(slots=True)
class Model:
    """What the server runs. `stamp` changes with every weight update; a request's adapter is added to it."""

    traits: ModelTraits
    stamp: ModelStamp
    can_shift: str | None
    """None if the attention backend reads shifted positions, else why it cannot."""
    max_context: int
    """Most tokens, visible and new, that one request may have."""


class AnabranchCache(BasePrefixCache):
    """Wraps `inner`; every member of the cache contract that is not defined here is the inner cache's."""

    def __init__(self, inner: BasePrefixCache, model: Model, limits: Limits):
        self.inner = inner
        self.model = model
        self.store = StateStore(lambda slots, start, stop: self._free(slots[start:stop]), limits, inner.page_size)
        self.runs: dict[str, Run] = {}
        """By SGLang's request id. A parked request is among them, though SGLang does not have it yet."""
        self.parked: dict[str, Parked] = {}
        self.mappers: dict[str, Mapper] = {}
        """By the names that references give; `startup.py` builds them."""
        self.not_rebuilt: list[tuple[Segment, Refusal | None]] = []
        """Whose rebuild ended without a result, and why; whoever waits for them is still to be told."""
        self.swept: list[Any] = []
        """Requests that were parked when the pool was cleared; they are still to be answered."""
        self.held_back: list[Any] = []
        """Messages that need an idle scheduler, while rebuilds run that SGLang's HTTP process knows nothing of."""
        self.queue = FairQueue()
        table = inner.req_to_token_pool.req_to_token
        self.rows = RowTable(torch.zeros(table.shape[0], dtype=torch.int64, device=table.device))

        self.req_to_token_pool = inner.req_to_token_pool
        self.token_to_kv_pool_allocator = inner.token_to_kv_pool_allocator
        self.page_size = inner.page_size
        self.disable = inner.disable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run_of(self, req: Any) -> Run | None:
        return self.runs.get(req.rid) if req is not None else None

    # ------------------------------------------------------------ a request's way through

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Idempotent: SGLang asks several times, and again after a retraction."""
        run = self.run_of(params.req)
        if run is None:
            return self.inner.match_prefix(params)
        if run.slots is None:
            began = time.perf_counter()
            run.slots = self._slots(run)
            run.kv_seconds += time.perf_counter() - began
        if adapter().is_stub(params.req, len(run.slots)):
            return adapter().match_result(run.slots[:0], NODE)
        assert len(params.key) >= len(run.slots), "something cut into the context"
        return adapter().match_result(run.slots, NODE)

    def cache_unfinished_req(self, req: Any, **kwargs: Any) -> None:
        """Between two chunks of a prefill: own tokens stay the request's."""
        if self.run_of(req) is None:
            self.inner.cache_unfinished_req(req, **kwargs)
            return
        row = self.req_to_token_pool.req_to_token[adapter().row(req), : adapter().prefilled_length(req)]
        req.prefix_indices = row.to(torch.int64, copy=True)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any) -> None:
        """The request gives its KV up: because it ended, or because it was retracted and will be back."""
        run = self.run_of(req)
        if run is None:
            self.inner.cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=kv_len_to_handle, **kwargs)
            return
        context = adapter().context_length(req)
        row = self.req_to_token_pool.req_to_token[adapter().row(req), context:kv_len_to_handle]
        slots = row.to(torch.int64, copy=True)
        if not req.finished():
            self._free(slots)
        elif adapter().is_aborted(req) or not is_insert:
            self._free(slots)
            run.cancelled = run.cancelled or adapter().is_cancelled(req)
            run.kept_output = 0
            attach(req.finished_reason, self._report(req, run, kept=False))
            self.drop(req.rid)
        else:
            self._end(req, run, context, slots)

    def _end(self, req: Any, run: Run, context: int, slots: torch.Tensor) -> None:
        running, length = run.running, run.own_input + run.kept_output
        assert not running.keep or len(slots) >= length, f"{length - len(slots)} tokens of {running.id} are not sealed"
        attach(req.finished_reason, self._report(req, run, kept=running.keep))
        del self.runs[req.rid]
        if run.rebuilds is not None:
            self._restore(run.rebuilds, slots, length)
            self.store.done_reading(running.context.intervals)
        elif running.keep:
            tokens = (req.origin_input_ids + req.output_ids)[context : context + length]
            self._free(slots[self.store.holdings.in_pages(length) :])
            self.store.seal(running, tokens, slots[:length])
        else:
            self._free(slots)
            self.store.close(running, "done")

    def _restore(self, segment: Segment, slots: torch.Tensor, length: int) -> None:
        if segment in self.store.holdings and segment.slots is None:
            self._free(slots[self.store.holdings.in_pages(length) :])
            self.store.holdings.restore(segment, slots[:length])
        else:
            self._free(slots)  # nobody needs it any more

    def _report(self, req: Any, run: Run, *, kept: bool) -> dict[str, Any]:
        """What the client is told of the request beside SGLang's own account."""
        return {
            "id": run.running.id,
            "context_tokens": len(run.running.context),
            "input_tokens": run.own_input,
            "generated_tokens": run.kept_output,
            "rebuilt_tokens": run.rebuilt_tokens,
            "kept": kept,
            "cancelled": run.cancelled,
            "queue": adapter().queue_seconds(req),
            "compile": run.compile_seconds,
            "kv_prepare": run.kv_seconds,
        }

    def drop(self, request_id: str) -> None:
        """A request is gone and leaves no state; its own KV is already freed."""
        run = self.runs.pop(request_id)
        if run.rebuilds is not None:
            self.store.done_reading(run.running.context.intervals)
            if not run.cancelled:
                self.not_rebuilt.append((run.rebuilds, None))
        else:
            self.store.close(run.running, "cancelled" if run.cancelled else "failed")

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        rebuilding = [run.running.context.intervals for run in self.runs.values() if run.rebuilds is not None]
        self.store.check(rebuilding)
        opened = sum(len(space.running) for space in self.store.spaces.values())
        assert opened == len(self.runs) - len(rebuilding), "a request in flight that nobody knows"
        assert self.parked.keys() <= self.runs.keys()

    def digest(self) -> str:
        """Equal on all ranks of a server, at the same step: what exists, who keeps it, in which slots, until when."""
        free = self.token_to_kv_pool_allocator.available_size()
        parts: list[Any] = [free, sorted(self.runs), sorted(self.parked), self.store.leases.now]
        for tenant, space in sorted(self.store.spaces.items()):
            parts.append((tenant, sorted(space.states), sorted(space.running), sorted(space.waiting)))
        for segment, holding in self.store.holdings.items():
            slots = None if segment.slots is None else segment.slots.tolist()
            parts.append((segment.id, slots, list(holding.keepers.runs()), holding.pins, segment.context is None))
        return blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def _slots(self, run: Run) -> torch.Tensor:
        parts = [i.segment.slots[i.start : i.stop] for i in run.running.context.intervals]
        empty = torch.empty(0, dtype=torch.int64, device=self.rows.position_offset.device)
        return torch.cat([empty, *parts]).contiguous()

    def _free(self, slots: torch.Tensor) -> None:
        if len(slots):
            self.token_to_kv_pool_allocator.free(slots)

    # ------------------------------------------------------------ locks and accounting

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult(delta=0) if node is NODE else self.inner.inc_lock_ref(node)

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        return DecLockRefResult(delta=0) if node is NODE else self.inner.dec_lock_ref(node, params)

    def is_backuped(self, node: Any) -> bool:
        return False if node is NODE else self.inner.is_backuped(node)

    def is_root(self, node: Any) -> bool:
        return False if node is NODE else self.inner.is_root(node)

    def protected_size(self) -> int:
        return self.inner.protected_size() + self._unmovable

    def full_protected_size(self) -> int:
        return self.inner.full_protected_size() + self._unmovable

    def evictable_size(self) -> int:
        return self.inner.evictable_size() + self.store.holdings.reclaimable_tokens

    def full_evictable_size(self) -> int:
        return self.inner.full_evictable_size() + self.store.holdings.reclaimable_tokens

    @property
    def _unmovable(self) -> int:
        holdings = self.store.holdings
        return holdings.held_tokens - holdings.reclaimable_tokens

    def evict(self, params: Any) -> Any:
        """SGLang's own prefix cache goes first, then states that can be computed again."""
        result = self.inner.evict(params)
        missing = params.num_tokens - result.num_tokens_evicted
        if missing > 0:
            result.num_tokens_evicted += self.store.holdings.evict(missing)
        return result

    def reset(self) -> None:
        """SGLang clears the whole pool, when nothing runs: states that can be computed again stay known."""
        for request_id in list(self.runs):
            self.drop(request_id)
        self.swept += [parked.received for parked in self.parked.values()]
        self.parked.clear()
        self.store.reset()
        self.rows.clear()
        self.inner.reset()


def _forward_the_rest() -> None:
    """Give the wrapper every member of the contract that it does not define, as the inner cache's."""

    def method(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)

    for name, member in vars(BasePrefixCache).items():
        if name.startswith("_") or name in vars(AnabranchCache):
            continue
        if callable(member):
            setattr(AnabranchCache, name, method(name))
        else:
            setattr(AnabranchCache, name, property(lambda self, name=name: getattr(self.inner, name)))


_forward_the_rest()


def attach(reason: Any, report: dict[str, Any]) -> None:
    """Let a finish reason carry our report to the client, as a JSON string beside its own fields."""
    fields = reason.to_json()
    reason.to_json = lambda: {**fields, "anabranch": json.dumps(report)}


def find(tree_cache: Any) -> AnabranchCache | None:
    """The wrapper in a stack of caches; None if the server was started without it."""
    while tree_cache is not None and not isinstance(tree_cache, AnabranchCache):
        tree_cache = getattr(tree_cache, "inner", None)
    return tree_cache
