"""Sealing: no request that leaves a state ends before the KV of its last token exists.

SGLang writes a token's KV in the step after the one that sampled it. Where that step is not already launched, the
finish is hidden for one step. What ended the generation (a stop token, a stop string) does not become context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch_server.engine.cache import Run, find
from anabranch_server.engine.versions import adapter
from anabranch_server.stopping import tokens_before

_cache: Any = None


def bind(tree_cache: Any) -> None:
    """Tell this process's requests which cache they end in."""
    global _cache
    _cache = find(tree_cache)


def around_update_finish_state(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    run = _cache.run_of(req) if _cache is not None else None
    if run is None:
        original(req, new_accepted_len)
    elif run.hidden_finish is not None and (not req.to_finish or run.running.keep_partial):
        req.to_finish = None
        req.finished_reason, req.finished_len = run.hidden_finish
    elif run.running.keep_partial and adapter().is_cancelled(req) and not req.finished():
        adapter().end_as_cancelled(req)
        run.cancelled = True
        _finish(req, run)
    else:
        original(req, new_accepted_len)
        if req.finished_reason is not None and not adapter().is_aborted(req):
            adapter().prefer_stop(req)
            _finish(req, run)


def _finish(req: Any, run: Run) -> None:
    length = req.finished_len if req.finished_len is not None else len(req.output_ids)
    run.kept_output = _kept(req, length)
    sealed = adapter().committed_length(req) >= len(req.origin_input_ids) + run.kept_output
    if run.running.keep and not sealed:
        run.hidden_finish = (req.finished_reason, length)
        req.finished_len = length  # what the extra step samples is nobody's
        req.finished_reason = None


def _kept(req: Any, length: int) -> int:
    """How many of the `length` output tokens become part of the state."""
    if adapter().matched_token(req) is not None:
        return length - 1
    stop = adapter().matched_text(req)
    if stop is None or req.tokenizer is None:
        return length
    return tokens_before(req.tokenizer.decode, req.output_ids[:length], stop)
