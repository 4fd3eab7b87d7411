"""Paging: with pages of several slots, a request that makes a state starts a page of its own.

SGLang lets a request continue the last page of its prefix. Ours has a prefix that is others' and ends anywhere in a
page, so SGLang is told the lengths without it: own token `i` then lies in the request's page `i // page_size`. What is
kept and freed by whole pages is `holdings.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anabranch_server.engine.cache import find
from anabranch_server.engine.versions import adapter


def around_alloc_extend(original: Callable[..., torch.Tensor], *args: Any, batch: Any = None, **call: Any) -> Any:
    """Slots for a prefill, or a part of one. The first own token continues nothing."""
    lengths = _context_lengths(batch)
    if any(lengths):
        assert not args, "SGLang names all arguments here"
        cpu, there = _on_both(lengths, call["prefix_lens"])
        call["prefix_lens"], call["prefix_lens_cpu"] = call["prefix_lens"] - there, call["prefix_lens_cpu"] - cpu
        call["seq_lens"], call["seq_lens_cpu"] = call["seq_lens"] - there, call["seq_lens_cpu"] - cpu
        call["last_loc"] = call["last_loc"].masked_fill(call["prefix_lens"] == 0, -1)
    return original(*args, batch=batch, **call)


def around_alloc_decode(original: Callable[..., torch.Tensor], *args: Any, batch: Any = None, **call: Any) -> Any:
    """Slots for one more token of each request; the last one before it is its own."""
    lengths = _context_lengths(batch)
    if any(lengths):
        assert not args, "SGLang names all arguments here"
        cpu, there = _on_both(lengths, call["seq_lens"])
        call["seq_lens"], call["seq_lens_cpu"] = call["seq_lens"] - there, call["seq_lens_cpu"] - cpu
    return original(*args, batch=batch, **call)


def around_new_tokens_required(original: Callable[..., int], batch: Any, selected_indices: Any = None) -> int:
    """How many slots the next decode takes: a page for each request whose last one is full."""
    ours = [(req, length) for req, length in zip(batch.reqs, _context_lengths(batch), strict=True) if length]
    with adapter().without_contexts(ours):
        return original(batch, selected_indices)


def around_uncached_sizes(original: Callable[..., Any], checker: Any) -> Any:
    """How many slots belong to requests in flight, for SGLang's own check of the pool."""
    cache = find(checker.tree_cache)
    reqs: dict[int, Any] = {}
    for batch in (checker.get_last_batch(), checker.get_running_batch()):
        reqs |= {id(req): req for req in batch.reqs} if batch is not None else {}
    lengths = _lengths(cache, list(reqs.values()))
    ours = [(req, length) for req, length in zip(reqs.values(), lengths, strict=True) if length]
    with adapter().without_contexts(ours):
        return original(checker)


def _context_lengths(batch: Any) -> list[int]:
    """Of each request of the batch, how many leading tokens are a state's; with pages of one slot it is all one."""
    cache = find(batch.tree_cache) if batch is not None else None
    return _lengths(cache, batch.reqs if batch is not None else ())


def _lengths(cache: Any, reqs: Sequence[Any]) -> list[int]:
    if cache is None or cache.page_size == 1:
        return [0] * len(reqs)
    return [adapter().context_length(req) if cache.run_of(req) is not None else 0 for req in reqs]


def _on_both(lengths: list[int], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`lengths` [requests] int64, on the host and where `like` is."""
    cpu = torch.tensor(lengths, dtype=torch.int64)
    return cpu, cpu.to(like.device, non_blocking=True)
