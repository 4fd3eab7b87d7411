"""`Client`: the same as `AsyncClient`, without await. A facade: every call runs in one background event loop.

It has no logic of its own, and may be used from several threads.
"""

from __future__ import annotations

import atexit
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

from anabranch import scope as async_scope
from anabranch import state as async_state
from anabranch import stream as async_stream
from anabranch.client import AsyncClient
from anabranch.config import OnLost
from anabranch.errors import ClientClosedError
from anabranch.graph import Reference, Rules
from anabranch.results import Explanation, Generation
from anabranch.sampling import SamplingArgs
from anabranch.stream import StreamEvent
from anabranch.transport import Transport
from anabranch.wire import Health, StateInfo, Stats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loop:
    """The background event loop, as far as the facade needs it."""

    portal: BlockingPortal

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call` there and wait for it; an interrupt of the waiting thread (Ctrl-C) cancels it."""
        try:
            future = self.portal.start_task_soon(call)
        except RuntimeError as error:  # the portal's own message speaks of portals
            raise ClientClosedError("the client is closed") from error
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@dataclass(frozen=True, slots=True, repr=False)
class State:
    """As `anabranch.State`, without await."""

    loop: Loop
    inner: async_state.State

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def refs(self) -> tuple[Reference, ...]:
        return self.inner.refs

    @property
    def standing(self) -> str:
        return self.inner.standing

    def __repr__(self) -> str:
        return repr(self.inner)

    def inherit(
        self,
        *states: State,
        upto: int | None = None,
        propagate: bool = True,
        base: int | None = None,
        mapper: str | None = None,
    ) -> State:
        return self._wrap(self.inner.inherit(*_inner(states), upto=upto, propagate=propagate, base=base, mapper=mapper))

    def artifact(
        self,
        *states: State,
        span: Sequence[int] | None = None,
        propagate: bool = True,
        base: int | None = None,
        mapper: str | None = None,
    ) -> State:
        return self._wrap(
            self.inner.artifact(*_inner(states), span=span, propagate=propagate, base=base, mapper=mapper)
        )

    def append(self, text: str | None = None, *, role: str | None = None, tokens: Sequence[int] | None = None) -> State:
        return self._wrap(self.inner.append(text, role=role, tokens=tokens))

    def place(self, policy: str | None = None, *, start: int | None = None) -> State:
        return self._wrap(self.inner.place(policy, start=start))

    def rules(self, rules: Rules | None) -> State:
        return self._wrap(self.inner.rules(rules))

    @overload
    def fork(self, n: None = None, *, at: int | None = None) -> State: ...

    @overload
    def fork(self, n: int, *, at: int | None = None) -> tuple[State, ...]: ...

    def fork(self, n: int | None = None, *, at: int | None = None) -> State | tuple[State, ...]:
        if n is None:
            return self._wrap(self.loop.run(partial(self.inner.fork, at=at)))
        return tuple(map(self._wrap, self.loop.run(partial(self.inner.fork, n, at=at))))

    def generate(
        self,
        text: str | None = None,
        *,
        role: str | None = None,
        keep: bool = True,
        keep_partial: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingArgs],
    ) -> Generation[State]:
        call = partial(self.inner.generate, text, role=role, keep=keep, keep_partial=keep_partial, timeout=timeout)
        return self._generation(self.loop.run(partial(call, **sampling)))

    def stream(
        self,
        text: str | None = None,
        *,
        role: str | None = None,
        keep: bool = True,
        keep_partial: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingArgs],
    ) -> Stream:
        inner = self.inner.stream(text, role=role, keep=keep, keep_partial=keep_partial, timeout=timeout, **sampling)
        return Stream(self.loop, inner, self._generation)

    def explain(self) -> Explanation:
        return self.loop.run(self.inner.explain)

    def renew(self, lease: float | None = None) -> StateInfo:
        return self.loop.run(partial(self.inner.renew, lease))

    def release(self) -> None:
        self.loop.run(self.inner.release)

    def _wrap(self, inner: async_state.State) -> State:
        return State(self.loop, inner)

    def _generation(self, generation: Generation[async_state.State]) -> Generation[State]:
        return generation.with_state(self._wrap(generation.state))


@dataclass(frozen=True, slots=True, repr=False)
class Stream:
    """As `anabranch.Stream`, without await."""

    loop: Loop
    inner: async_stream.Stream[async_state.State]
    finished: Callable[[Generation[async_state.State]], Generation[State]]

    def __enter__(self) -> Self:
        self.loop.run(self.inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.run(partial(self.inner.__aexit__, kind, error, trace))

    def __iter__(self) -> Iterator[StreamEvent]:
        while (event := self.loop.run(partial(_next, self.inner))) is not None:
            yield event

    def text(self) -> Iterator[str]:
        pieces = self.inner.text()
        while (piece := self.loop.run(partial(_next, pieces))) is not None:
            yield piece

    def final(self) -> Generation[State]:
        return self.finished(self.loop.run(self.inner.final))

    def cancel(self) -> Generation[State]:
        return self.finished(self.loop.run(self.inner.cancel))

    def close(self) -> None:
        self.loop.run(self.inner.aclose)


@dataclass(frozen=True, slots=True, repr=False)
class Scope:
    """As the async scope, without await; it holds for the thread that enters it."""

    loop: Loop
    inner: async_scope.Scope

    def keep(self, *states: State) -> None:
        self.inner.keep(*_inner(states))

    def __enter__(self) -> Self:
        self.inner.session.check_open()
        self.inner.activate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.deactivate()
        self.loop.run(partial(self.inner.finish, error))


class Client:
    """As `AsyncClient`, without await. Close it with `with` or `close()`: its background thread runs until then."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
        lease: float | None = None,
        on_lost: OnLost = "error",
        transport: Transport | None = None,
    ) -> None:
        self.inner = AsyncClient(
            base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            lease=lease,
            on_lost=on_lost,
            transport=transport,
        )
        self._exit = ExitStack()
        self.loop = Loop(self._exit.enter_context(start_blocking_portal("asyncio")))
        # The interpreter must not find the thread running when it tears modules down: it would wait for ever.
        atexit.register(self.close)

    def __repr__(self) -> str:
        return repr(self.inner).removeprefix("Async")

    def __enter__(self) -> Self:
        self.inner.session.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what is under way, close the connections, end the background thread. Closing twice is fine."""
        if not self.inner.session.closed:
            self.loop.run(self.inner.aclose)
        self._exit.close()
        atexit.unregister(self.close)

    def root(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        tokens: Sequence[int] | None = None,
        rules: Rules | None = None,
    ) -> State:
        return State(self.loop, self.inner.root(text, messages=messages, tokens=tokens, rules=rules))

    def state(self, *, rules: Rules | None = None) -> State:
        return State(self.loop, self.inner.state(rules=rules))

    def scope(self) -> Scope:
        return Scope(self.loop, self.inner.scope())

    def release(self, *states: State) -> None:
        self.loop.run(partial(self.inner.release, *_inner(states)))

    def states(self) -> tuple[StateInfo, ...]:
        return self.loop.run(self.inner.states)

    def stats(self) -> Stats:
        return self.loop.run(self.inner.stats)

    def health(self) -> Health:
        return self.loop.run(self.inner.health)


def _inner(states: Sequence[State]) -> list[async_state.State]:
    # What is not a State goes on as it is: the async side says what is wrong with it.
    return [cast("async_state.State", getattr(state, "inner", state)) for state in states]


async def _next(events: Any) -> Any:
    return await anext(events, None)
