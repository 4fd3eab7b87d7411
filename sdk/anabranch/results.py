"""What comes back to the user: a generation with its new state, and an explanation that prints as a table.

They hold data only: a `Generation` talks to the server through its `state`, an `Explanation` not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from anabranch import wire
from anabranch.errors import InvalidRequestError
from anabranch.wire import FinishReason, Timings, TokenLogprob, Usage

S = TypeVar("S")
T = TypeVar("T")

__all__ = ["Explanation", "FinishReason", "Generation", "Timings", "TokenLogprob", "Usage"]


@dataclass(frozen=True, slots=True, repr=False)
class Generation(Generic[S]):
    """The result of one generate.

    `tokens` are the generated tokens that `state` owns (a matched stop is not among them), `logprobs` natural logs if
    asked for, `timings` seconds. `state` is a new state: it has seen the input, and its output is included.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    state: S

    def with_state(self, state: T) -> Generation[T]:
        """The same result around another view of its state."""
        return Generation(self.text, self.tokens, self.logprobs, self.finish_reason, self.usage, self.timings, state)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:59] + "…"
        used = self.usage
        return (
            f"Generation({text!r}, {self.finish_reason}, {used.generated_tokens} tokens "
            f"after {used.context_tokens} + {used.computed_tokens}, {self.timings.total:.2f} s, {self.state!r})"
        )


def generation(response: wire.GenerateResponse, state: S) -> Generation[S]:
    """The wire's result, with the state that it made."""
    return Generation(
        text=response.text,
        tokens=response.tokens,
        logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        usage=response.usage,
        timings=response.timings,
        state=state,
    )


class Explanation(wire.Explanation):
    """A compiled context. `intervals` are disjoint runs of visible tokens in contract order, `start` is the position
    of the first new token, `context_tokens` the number of visible ones. Prints as a table."""

    def position(self, index: int) -> int:
        """The effective position of the visible token `index`, counted in contract order from 0.

        `index == context_tokens` is the first new token. Raises InvalidRequestError outside of that.
        """
        left = index
        for interval in self.intervals:
            length = interval.stop - interval.start
            if 0 <= left < length:
                return interval.effective + left
            left -= length
        if left != 0 or index < 0:
            raise InvalidRequestError(
                f"there is no visible token {index}: there are {self.context_tokens}", param="index"
            )
        return self.start

    def distance(self, i: int, j: int) -> int:
        """How far the model sees the visible token `j` after the visible token `i` (negative: before)."""
        return self.position(j) - self.position(i)

    def __str__(self) -> str:
        rows = [("state", "tokens", "native", "effective", "delta", "")]
        for one in self.intervals:
            length = one.stop - one.start
            rows.append(
                (
                    one.state[:8],
                    f"[{one.start}:{one.stop}]",
                    _range(one.native, length),
                    _range(one.effective, length),
                    f"{one.delta:+d}" if one.delta else "0",
                    ", ".join(_notes(one)),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{self.context_tokens} visible tokens; new tokens start at position {self.start}"])


def _notes(interval: wire.Interval) -> Iterator[str]:
    if interval.mapper is not None:
        yield f"through {interval.mapper}"
    if not interval.propagate:
        yield "not propagated"


def _range(first: int, length: int) -> str:
    return f"{first}..{first + length - 1}" if length > 1 else str(first)
