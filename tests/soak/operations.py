"""The random program of a soak run: from a seed, an endless sequence of operations with their own dice.

It knows no server and no state: which states an operation falls upon is decided when it is carried out, from its dice
and what is alive by then. With one worker that is the same every time; with several, as far as timing allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

WEIGHTS: dict[str, float] = {
    # making states
    "root": 8,
    "fork": 10,
    "join": 14,
    "artifact": 8,
    "rewind": 6,
    "once": 6,
    "stream": 6,
    "lease": 3,
    # requests that do not end by themselves
    "stream_drop": 3,
    "request_drop": 3,
    "cancel": 4,
    "abort": 3,
    "abort_all": 0.3,
    "release_running": 3,
    # giving up, keeping
    "release": 14,
    "release_batch": 4,
    "renew": 4,
    # asking again, asking wrongly, looking
    "repeat": 4,
    "other_body": 2,
    "ghost": 3,
    "trespass": 3,
    "explain": 4,
    "look": 2,
    # the rest of the server
    "plain": 9,
    "fill": 0.7,
    "flush": 0.5,
}
"""Kinds of operations, and how often each comes, out of their sum."""
SHAPES = ("root", "fork", "join", "artifact", "rewind", "once")
"""Kinds that say what a new state is made from; other kinds that make one draw one of these."""
TRAITS = ("tenancy", "keep_partial", "cancelled", "evict", "quota", "streamed_logprobs", "oracle")
"""Not operations, but likewise switched off by name: several API keys (tenancy); cancelled generations that leave a
state (keep_partial); aborted requests that end as cancelled and not with an error (cancelled); states that are
evicted and computed again, so that more are kept than fit (evict); tenants that may be refused as too busy (quota);
streams with logprobs, of which SGLang 0.5.17 loses the first after a retraction (streamed_logprobs); brute force,
which bf16 cannot meet (oracle)."""


@dataclass(frozen=True, slots=True)
class Operation:
    seed: int
    index: int
    kind: str

    def dice(self) -> Random:
        return Random(f"{self.seed}/{self.index}")

    def state_id(self, which: int = 0) -> str:
        return blake2b(f"{self.seed}/{self.index}/{which}".encode(), digest_size=16).hexdigest()


def program(seed: int, without: Collection[str] = ()) -> Iterator[Operation]:
    """The operations of one seed, without end. Names in `without` are left out; ValueError if there is no such name."""
    if unknown := set(without) - {*WEIGHTS, *TRAITS}:
        raise ValueError(f"no such operation: {', '.join(sorted(unknown))}; there are {', '.join((*WEIGHTS, *TRAITS))}")
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind not in without}
    if "tenancy" in without:
        weights.pop("trespass", None)
    dice, index = Random(seed), 0
    while True:
        for kind in dice.choices([*weights], [*weights.values()], k=64):
            yield Operation(seed, index, kind)
            index += 1
