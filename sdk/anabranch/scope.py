"""A scope: the states that are made inside it are released when it ends.

It does not decide what makes a state, and it never touches states that existed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from anabranch.errors import AnabranchError, APITimeoutError, InvalidRequestError
from anabranch.graph import Node

if TYPE_CHECKING:
    from anabranch.session import Session
    from anabranch.state import State

RELEASE_TIMEOUT = 30.0
"""Seconds that a scope spends on releasing, at most, also when its task is being cancelled."""

_innermost: ContextVar[Scope | None] = ContextVar("anabranch_scope", default=None)


class Scope:
    """From `client.scope()`; use it with `async with`. The innermost scope of a task owns what the task makes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._owned: dict[Node, None] = {}
        self._kept: set[Node] = set()
        self.outer: Scope | None = None
        self._entered = False
        self.open = False

    def keep(self, *states: State) -> None:
        """Exclude states from the release. An enclosing scope, if there is one, owns them from now on; without one,
        they are kept as long as their leases are renewed."""
        for state in states:
            self.session.check_own(state.session)
            self._kept.add(state.node)
            if state.node in self._owned:
                del self._owned[state.node]
                self._hand_out(state.node)

    def own(self, node: Node) -> None:
        """A request that may make `node` is about to be sent."""
        if node not in self._kept:
            self._owned[node] = None
        else:
            self._hand_out(node)

    def disown(self, node: Node) -> None:
        """The request that was to make `node` was refused: there is nothing to release."""
        for scope in _upwards(self, self.session):
            scope._owned.pop(node, None)

    def activate(self) -> None:
        """Become the innermost scope of this context (task or thread)."""
        if self._entered:
            raise InvalidRequestError("a scope can be entered once", hint="client.scope() makes another")
        self._entered = self.open = True
        self.outer = _innermost.get()
        _innermost.set(self)

    def deactivate(self) -> None:
        """Stop being the innermost scope. Tasks that still run inside it fall to the enclosing scope."""
        self.open = False
        _innermost.set(self.outer)

    async def release(self) -> None:
        """Release what the scope owns, shielded from cancellation, within RELEASE_TIMEOUT seconds."""
        nodes = list(self._owned)
        self._owned.clear()
        with anyio.move_on_after(RELEASE_TIMEOUT, shield=True) as limit:
            await self.session.release(*nodes)
        if limit.cancelled_caught:
            raise APITimeoutError(f"the {len(nodes)} states of a scope were not all released in {RELEASE_TIMEOUT:g} s")

    async def __aenter__(self) -> Self:
        self.session.check_open()
        self.activate()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deactivate()
        await self.finish(error)

    async def finish(self, error: BaseException | None) -> None:
        """Release; a failure is raised, unless `error` is already on its way: then it becomes a note on it."""
        try:
            await self.release()
        except AnabranchError as failure:
            if error is None:
                raise
            error.add_note(f"and the scope's states were not all released: {failure}")

    def _hand_out(self, node: Node) -> None:
        for scope in _upwards(self.outer, self.session):
            scope.own(node)
            return


def current(session: Session) -> Scope | None:
    """The innermost open scope of `session` in this context (task or thread)."""
    return next(_upwards(_innermost.get(), session), None)


def _upwards(scope: Scope | None, session: Session) -> Iterator[Scope]:
    while scope is not None:
        if scope.open and scope.session is session:
            yield scope
        scope = scope.outer
