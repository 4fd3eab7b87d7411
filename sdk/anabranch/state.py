"""`State`: an immutable value that names a point of the graph, and the verbs on it.

Building is local and free; it holds no knowledge of the server, which the client's session keeps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Unpack, overload

from pydantic import ValidationError

from anabranch.config import check_timeout
from anabranch.errors import InvalidRequestError, invalid
from anabranch.graph import Node, Reference, Rules, answer_due, check_reference, check_rules, fresh, placement
from anabranch.results import Explanation, Generation, generation
from anabranch.sampling import SamplingArgs, sampling_from
from anabranch.session import Session
from anabranch.stream import Stream
from anabranch.transport import EventStream
from anabranch.wire import GenerateResponse, MessagePiece, Piece, Sampling, StateInfo, TextPiece, TokensPiece


@dataclass(frozen=True, slots=True, repr=False)
class State:
    """A point of the graph: references to earlier states, and own tokens.

    Every method that builds returns a new state and sends nothing. `fork`, `generate`, `stream`, `explain`, `renew` and
    `release` talk to the server; what they need there and is missing is computed first, each state once.
    A released state can no longer be used (StateReleasedError, before anything is sent). One that the server lost
    cannot either (StateNotFoundError), unless the client was told to make lost states again.
    """

    session: Session
    node: Node

    @property
    def id(self) -> str:
        """32 lowercase hex digits, made by the client."""
        return self.node.id

    @property
    def refs(self) -> tuple[Reference, ...]:
        return self.node.refs

    @property
    def standing(self) -> str:
        """`local`, `on server`, `uncertain` (asked for, not answered), `lost` or `released`, as far as the client
        knows."""
        return self.session.record(self.node).standing.value

    def __repr__(self) -> str:
        refs = ", ".join(f"{ref} {ref.target.short_id}" for ref in self.refs)
        return f"State({self.node.short_id}, {self.standing}" + (f", {refs})" if refs else ")")

    # ------------------------------------------------------------ building: local and free

    def inherit(
        self,
        *states: State,
        upto: int | None = None,
        propagate: bool = True,
        base: int | None = None,
        mapper: str | None = None,
    ) -> State:
        """See everything that `states` see, and their own tokens (`upto`: only the first `upto` of them).

        `propagate=False`: only this state sees it, not its descendants. `base`: the position of the lowest token
        (explicit placement). `mapper`: the name of one of the server's cache mappers, through which all of it is seen.
        A state that has generated is inherited first, itself. Raises InvalidRequestError.
        """
        return self._referring(
            Reference("inherit", node, upto=upto, propagate=propagate, base=base, mapper=mapper)
            for node in self._nodes(states)
        )

    def artifact(
        self,
        *states: State,
        span: Sequence[int] | None = None,
        propagate: bool = True,
        base: int | None = None,
        mapper: str | None = None,
    ) -> State:
        """See own tokens of `states` only, `span[0]` to `span[1]` (excluded); without a span, what they generated.

        `propagate`, `base` and `mapper` are those of `inherit`. Raises InvalidRequestError.
        """
        interval = None if span is None else _span(span)
        return self._referring(
            Reference("artifact", node, span=interval, propagate=propagate, base=base, mapper=mapper)
            for node in self._nodes(states)
        )

    def append(self, text: str | None = None, *, role: str | None = None, tokens: Sequence[int] | None = None) -> State:
        """Own more input: text, a chat message (`text` and `role`), or token ids.

        On a state that is on the server already, the new state inherits it and owns only what is appended.
        Raises InvalidRequestError for no input.
        """
        return self._child(piece_from(text, role=role, tokens=tokens))

    def place(self, policy: str | None = None, *, start: int | None = None) -> State:
        """Decide where visible tokens sit: "keep", "concat", "same_start", "right_aligned", or "explicit" (also if only
        `start` is given).

        Explicit: references sit at their `base`, new tokens begin at position `start` (default: after all visible).
        Raises InvalidRequestError for an unknown policy.
        """
        return State(self.session, fresh(self._open_node(), place=placement(policy, start)))

    def rules(self, rules: Rules | None) -> State:
        """`"strict"`: refuse to mix inherit and artifact references in this state. None: allow it (the default)."""
        if rules not in (None, "strict"):
            raise InvalidRequestError(f"there are no rules {rules!r}", param="rules", hint='"strict" or None')
        node = fresh(self._open_node(), rules=rules)
        check_rules(node)
        return State(self.session, node)

    # ------------------------------------------------------------ talking to the server

    @overload
    async def fork(self, n: None = None, *, at: int | None = None) -> State: ...

    @overload
    async def fork(self, n: int, *, at: int | None = None) -> tuple[State, ...]: ...

    async def fork(self, n: int | None = None, *, at: int | None = None) -> State | tuple[State, ...]:
        """Compute this state on the server, unless it is there, and return one child, or `n`, that inherit it.

        `at=k`: the children see only the first `k` own tokens (rewind). A state without own tokens has nothing to
        compute: the children are copies. Raises InvalidRequestError, or what the server answers.
        """
        if n is not None and n < 1:
            raise InvalidRequestError(f"cannot fork into {n}", param="n", hint="give a number of children from 1 on")
        self.session.check_open()
        self.session.check_usable(self.node)
        if self.node.owns_tokens:
            ref = Reference("inherit", self.node, upto=at)
            check_reference(ref)
            await self.session.ensure(self.node)
            template = Node(refs=(ref,))
        elif at is not None:
            raise InvalidRequestError(
                "this state has no tokens of its own to rewind", param="at", hint="fork one that has input or output"
            )
        else:
            template = self.node
        children = tuple(State(self.session, fresh(template)) for _ in range(1 if n is None else n))
        return children[0] if n is None else children

    async def generate(
        self,
        text: str | None = None,
        *,
        role: str | None = None,
        keep: bool = True,
        keep_partial: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingArgs],
    ) -> Generation[State]:
        """Append `text` and generate, into a new state; this one stays as it is.

        If this state is on the server, the new one inherits it. If not, its input is sent along in the same request:
        to generate several times from one long input, `fork` first, so that it is computed once. A fork of a
        conversation that ends with the user's message needs no text: its answer is due.
        `keep=False`: the new state is not kept, its `Generation.state` cannot be used. `timeout`: seconds (600).
        Cancelling the task cancels the generation. If somebody else does, the result's `finish_reason` is "cancelled",
        and its state can be used only with `keep_partial=True`.
        Raises InvalidRequestError for no input or bad arguments, before anything is sent; else what the server says.
        """
        node, wanted = self._run(text, role, sampling, timeout)
        response = await self.session.generate(node, wanted, keep=keep, keep_partial=keep_partial, timeout=timeout)
        return generation(response, State(self.session, node))

    def stream(
        self,
        text: str | None = None,
        *,
        role: str | None = None,
        keep: bool = True,
        keep_partial: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingArgs],
    ) -> Stream[State]:
        """As `generate`, but the output comes while it is made: `async with state.stream(...) as s`.

        `keep_partial=True`: if it is left early or cancelled, `s.final()` gives what was generated so far, in a state.
        `timeout`: seconds to wait for each event. Nothing is sent before the stream is entered.
        """
        node, wanted = self._run(text, role, sampling, timeout)

        def finished(response: GenerateResponse) -> Generation[State]:
            return generation(self.session.accept(node, response), State(self.session, node))

        def start() -> Awaitable[EventStream]:
            return self.session.open_stream(node, wanted, keep=keep, keep_partial=keep_partial, timeout=timeout)

        return Stream(start, finished, lambda: self.session.cancel(node), finish=keep_partial)

    async def explain(self) -> Explanation:
        """Which tokens this state sees, at which native and effective positions, and where new tokens start."""
        return await self.session.explain(self.node)

    async def renew(self, lease: float | None = None) -> StateInfo:
        """Begin this state's lease anew, and with `lease` (seconds), let it be that long from now on.

        The client does so by itself for what it holds, see `AsyncClient`; a long lease outlives the client. A server
        may allow less than was asked for: the answer's `lease` says how long the state will be kept.
        """
        return await self.session.renew(self.node, lease)

    async def release(self) -> None:
        """Give this state up on the server. What its descendants still see stays there for them.

        Releasing twice is fine; a state that was never sent is only marked.
        """
        await self.session.release(self.node)

    # ------------------------------------------------------------ inside

    def _referring(self, refs: Iterable[Reference]) -> State:
        base = self._open_node()
        if base.input:
            raise InvalidRequestError(
                "this state has input already, and references come before input",
                param="refs",
                hint="fork it first and add references to the fork, or add references before append",
            )
        added = tuple(refs)
        for ref in added:
            check_reference(ref)
        node = fresh(base, refs=base.refs + added)
        check_rules(node)
        return State(self.session, node)

    def _open_node(self) -> Node:
        """The node to build on: this one, or, if it has generated and cannot change any more, a child of it."""
        self.session.check_usable(self.node)
        return Node(refs=(Reference("inherit", self.node),)) if self.node.generated else self.node

    def _child(self, piece: Piece, *, generated: bool = False) -> State:
        base = self._open_node()
        # What it sees but does not hand on, a child would not see: then its input is computed again.
        hands_all_on = all(ref.propagate for ref in base.refs)
        if base.input and hands_all_on and self.session.exists(base):
            base = Node(refs=(Reference("inherit", base),))
        return State(self.session, fresh(base, input=(*base.input, piece), generated=generated))

    def _run(
        self, text: str | None, role: str | None, sampling: SamplingArgs, timeout: float | None
    ) -> tuple[Node, Sampling]:
        """The node that a generate makes, and its sampling; everything that can be checked here is."""
        wanted = sampling_from(sampling)
        if timeout is not None:
            check_timeout(timeout)
        if text is not None or role is not None:
            return self._child(piece_from(text, role=role), generated=True).node, wanted
        base = self._open_node()
        if not base.input and not answer_due(base):
            raise InvalidRequestError(
                "there is no input to generate from",
                param="input",
                hint='append text first, or give it here: state.generate("...")',
            )
        return fresh(base, generated=True), wanted

    def _nodes(self, states: tuple[State, ...]) -> list[Node]:
        if not states:
            raise InvalidRequestError("no state to reference was given", param="refs")
        for state in states:
            if not isinstance(state, State):  # pyright: ignore[reportUnnecessaryIsInstance] callers may be untyped
                raise InvalidRequestError(
                    f"a reference needs a State, not {type(state).__name__}",
                    param="refs",
                    hint="a Generation's state is its .state; several states are given as several arguments",
                )
            self.session.check_own(state.session)
            if state.node is self.node:
                raise InvalidRequestError("a state cannot reference itself", param="refs")
            self.session.check_usable(state.node)
        return [state.node for state in states]


def piece_from(text: str | None = None, *, role: str | None = None, tokens: Sequence[int] | None = None) -> Piece:
    """One piece of input; raises InvalidRequestError unless exactly one kind is given and it is not empty."""
    try:
        if tokens is not None and text is None and role is None:
            piece = TokensPiece(tokens=tuple(tokens))
            empty = not piece.tokens
        elif text is not None and tokens is None:
            piece = TextPiece(text=text) if role is None else MessagePiece(role=role, content=text)
            empty = role is None and not text
        else:
            raise InvalidRequestError(
                "input is either text, text with a role, or tokens", param="input", hint='for example append("Go on.")'
            )
    except ValidationError as error:
        raise invalid(error) from None
    if text is not None and not _is_unicode(text):
        raise InvalidRequestError("the text has a lone surrogate, which no encoding can carry", param="input")
    if empty:
        raise InvalidRequestError("the input is empty", param="input", hint="append text, or leave it out")
    return piece


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _span(span: Sequence[int]) -> tuple[int, int]:
    if len(span) != 2:
        raise InvalidRequestError("a span is (first, end)", param="span", hint="end is excluded: (4, 20) is 16 tokens")
    return (span[0], span[1])
