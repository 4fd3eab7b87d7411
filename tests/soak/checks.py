"""What must hold of answers, of sums, of the log: each a function that raises Violation.

It sends nothing and keeps nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from anabranch.wire import GenerateResponse
from tests.oracle.brute import Node, View
from tests.oracle.run import ROUNDINGS, TOLERANCE

from .calls import Violation

FAULTS = re.compile(r"traceback|error|exception|assert|critical|leak", re.IGNORECASE)
TOLERATED = (
    "Ignore import error",  # models of SGLang that need packages which are not here
    "is larger than numa node number",  # two ranks, one memory: "to avoid the out-of-memory error"
    "DeprecationWarning",  # of starlette, in a file with "exception" in its name
    "multiprocessing/resource_tracker",  # Python, after the end
    "OpenAI Responses API",  # of SGLang, where a package for it is not installed
)
"""What log lines may say though they match FAULTS."""


def shape(node: Node, asked: int, reply: GenerateResponse, *, may_be_cut: bool) -> None:
    """The reply is about this state, ends for a reason that was asked for, and is complete in itself."""
    scores = reply.logprobs
    _require(reply.id == node.id, node, f"the reply is about {reply.id}")
    if reply.finish_reason == "cancelled":
        _require(may_be_cut, node, "cancelled, but nobody asked for that")
        _require(len(reply.tokens) <= asked, node, f"{len(reply.tokens)} tokens, asked for {asked}")
    else:
        _require(reply.finish_reason == "length", node, f"ended by {reply.finish_reason}, which it cannot")
        _require(len(reply.tokens) == asked, node, f"{len(reply.tokens)} tokens, asked for {asked}")
    if scores is not None:
        scored = tuple(one.token for one in scores)
        _require(scored == reply.tokens, node, f"the tokens are {reply.tokens}, but logprobs are of {scored}")


def usage(node: Node, view: View, reply: GenerateResponse, *, nothing_again: bool = False) -> None:
    """Token counts: visible before, computed now (more than the own input only if something may have been evicted, so
    not with `nothing_again`), generated."""
    used, visible = reply.usage, len(view.visible)
    _require(used.context_tokens == visible, node, f"context_tokens {used.context_tokens}, but {visible} are visible")
    _require(used.generated_tokens == len(node.generated), node, f"generated_tokens {used.generated_tokens}")
    least = len(node.input)
    _require(used.computed_tokens >= least, node, f"computed_tokens {used.computed_tokens}, own input is {least}")
    if nothing_again:
        _require(used.computed_tokens == least, node, f"computed_tokens {used.computed_tokens}, own input is {least}")
    _require(0 <= used.reused_tokens <= visible, node, f"reused_tokens {used.reused_tokens} of {visible}")
    together = used.reused_tokens + used.computed_tokens
    _require(together >= visible + least, node, f"reused + computed is {together}, less than {visible} + {least}")


def same(node: Node, first: GenerateResponse, again: GenerateResponse) -> None:
    """A request that was sent twice has one result."""
    one, other = (reply.model_dump(exclude={"timings"}) for reply in (first, again))
    differ = [field for field in one if one[field] != other[field]]
    told = ", ".join(f"{field} {one[field]} and {other[field]}" for field in differ)
    _require(not differ, node, f"sent twice, two results: {told}")


def sums(stats: dict[str, Any]) -> None:
    """Of an idle server: every token of the pool is somewhere, and nothing is in use."""
    kinds = ("free_tokens", "evictable_tokens", "held_tokens", "in_use_tokens")
    if sum(stats[kind] for kind in kinds) != stats["total_tokens"]:
        raise Violation(f"the pool does not add up: {stats}")
    if stats["in_use_tokens"] or stats["running"] or stats["waiting"]:
        raise Violation(f"idle, but something is in use: {stats}")


def baseline(stats: dict[str, Any]) -> None:
    """Everything was released and flushed: the pool is as it was at first."""
    sums(stats)
    if stats["states"] or stats["free_tokens"] != stats["total_tokens"]:
        raise Violation(f"everything was released, but something is left: {stats}")


def answers(nodes: Sequence[Node], exact: dict[str, Tensor], in_fp32: Callable[[], dict[str, Tensor]]) -> float:
    """Every token is the greedy one and every logprob right, as in `tests.oracle.run.compare`; but logprobs need not
    have been asked for, and of two tokens that are equally likely within the tolerance either will do.

    Returns the largest difference of a logprob.
    """
    worst = 0.0
    rough: dict[str, Tensor] = {}
    for node in nodes:
        for index, token in enumerate(node.generated):
            row = len(node.input) + index - 1
            follows, top = exact[node.id][row], node.top[index] if index < len(node.top) else {}
            off = max((abs(got - float(follows[other])) for other, got in top.items()), default=0.0)
            short = float(follows.max() - follows[token])
            allowed = TOLERANCE
            if max(off, short) > allowed:
                rough = rough or in_fp32()
                rounding = (rough[node.id][row] - follows)[[*top, token, int(follows.argmax())]].abs().max()
                allowed = max(TOLERANCE, ROUNDINGS * float(rounding))
            at = f"generated token {index}"
            _require(short <= allowed, node, f"{at} is {token}, but {int(follows.argmax())} is likelier by {short:.2e}")
            _require(off <= allowed, node, f"{at}: a logprob is off by {off:.2e}: {top}")
            if top:
                last = float(follows.topk(len(top)).values[-1])
                _require(min(top.values()) >= last - allowed, node, f"{at}: likelier ones are missing from {top}")
            worst = max(worst, off)
    return worst


def log(text: str) -> None:
    """What a server printed has no trace of a fault."""
    for line in text.splitlines():
        if FAULTS.search(line) and not any(tolerated in line for tolerated in TOLERATED):
            raise Violation(f"the server's log says: {line.strip()[:300]}")


def _require(holds: bool, node: Node, otherwise: str) -> None:
    if not holds:
        raise Violation(f"{node.name} {node.id}: {otherwise}")
