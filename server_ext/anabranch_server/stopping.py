"""What ended a generation is not context: how many of the sampled tokens a state keeps.

It knows texts and tokens only; which stop string matched is the engine's to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def tokens_before(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], stop: str) -> int:
    """Number of leading tokens that lie wholly before the first `stop` in their text; all of them if there is none."""
    at = decode(tokens).find(stop)
    length = len(tokens)
    while at >= 0 and length and len(decode(tokens[:length])) > at:
        length -= 1
    return length
