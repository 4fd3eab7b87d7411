"""What a client knows to exist on its server, and the requests that change it; each state is made at most once.

It builds no states (`state.py`), moves no bytes (`transport.py`), and leaves to `rebuild.py` what is made again. One
event loop runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError

from anabranch import wire
from anabranch.config import OnLost, check_lease
from anabranch.errors import (
    NOT_ANABRANCH,
    AnabranchError,
    APIConnectionError,
    APIStatusError,
    ClientClosedError,
    InternalError,
    InvalidRequestError,
    StateNotFoundError,
    StateReleasedError,
    invalid,
)
from anabranch.graph import Context, Node, context
from anabranch.lease import Heartbeat, renew_held
from anabranch.rebuild import rebuild
from anabranch.results import Explanation
from anabranch.scope import current
from anabranch.standing import Record, Standing
from anabranch.transport import Body, EventStream, Transport

API = "/anabranch/v1"
GENERATE = f"{API}/generate"

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Session:
    """One client's view of one server. States that nobody can name any more are forgotten, and not renewed."""

    def __init__(self, transport: Transport, *, lease: float, on_lost: OnLost = "error") -> None:
        self._transport = transport
        self._lease = lease
        self._on_lost = on_lost
        self._heartbeat = Heartbeat(partial(renew_held, self), lease)
        self.rebuilding = asyncio.Lock()
        # Weak: what nobody can name any more need not be remembered.
        self._records: WeakKeyDictionary[Node, Record] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    # ------------------------------------------------------------ what is known

    def record(self, node: Node) -> Record:
        return self._records.setdefault(node, Record())

    def exists(self, node: Node) -> bool:
        """Whether `node` is on the server, or on its way, or was there and counts as if it were."""
        record = self.record(node)
        return record.standing in (Standing.ON_SERVER, Standing.LOST) or record.making is not None

    def check_open(self) -> None:
        if self.closed:
            raise ClientClosedError("the client is closed", hint="use it inside its `async with`, or make a new one")

    def check_own(self, other: Session) -> None:
        if other is not self:
            raise InvalidRequestError(
                "a state of another client cannot be used here: its id means nothing to this client's server",
                param="refs",
                hint="make all states of one graph with one client",
            )

    def check_usable(self, node: Node) -> None:
        standing = self.record(node).standing
        if standing is Standing.RELEASED:
            raise StateReleasedError(f"state {node.id} was released", hint="states are values: build it again")
        if standing is Standing.LOST and self._on_lost == "error":
            raise _lost(node)

    # ------------------------------------------------------------ making states

    async def ensure(self, node: Node) -> None:
        """Return once `node` is on the server, computed at most once however many callers ask.

        A caller that is cancelled leaves the computation to the others. If it fails, all callers get the error, and
        a later call tries again. If it was lost, it is made again (`on_lost`).
        """
        await self._recovering(node, lambda: self._ensure(node))

    async def _ensure(self, node: Node) -> None:
        self.check_open()
        self.check_usable(node)
        record = self.record(node)
        if record.standing is Standing.ON_SERVER:
            return
        if record.standing is Standing.LOST:
            raise _lost(node)
        if record.making is None:
            record.making = task = asyncio.create_task(self._make(node, record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # Nobody may be left to hear of a failure; that is no reason for asyncio to complain.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        making = record.making
        await asyncio.wait([making])  # being cancelled here does not cancel what is awaited
        if making.cancelled():
            raise ClientClosedError("the client was closed meanwhile")
        making.result()

    async def generate(
        self,
        node: Node,
        sampling: wire.Sampling,
        *,
        keep: bool = True,
        keep_partial: bool = False,
        timeout: float | None = None,
    ) -> wire.GenerateResponse:
        """Run `node` on the server, once what it references is there."""

        async def attempt() -> object:
            body = await self._prepared(node, sampling=sampling, keep=keep, keep_partial=keep_partial)
            return await self._sent(node, self._transport.request("POST", GENERATE, body, timeout=timeout))

        return self.accept(node, _parsed(wire.GenerateResponse, await self._recovering(node, attempt)))

    async def open_stream(
        self, node: Node, sampling: wire.Sampling, *, keep: bool, keep_partial: bool, timeout: float | None
    ) -> EventStream:
        """As `generate`, but streamed; whoever reads the final event calls `accept`."""

        async def attempt() -> EventStream:
            body = await self._prepared(node, sampling=sampling, keep=keep, keep_partial=keep_partial, stream=True)
            return await self._sent(node, self._transport.stream(GENERATE, body, timeout=timeout))

        return await self._recovering(node, attempt)

    def accept(self, node: Node, response: wire.GenerateResponse) -> wire.GenerateResponse:
        """The server has finished `node`."""
        record = self.record(node)
        record.response = response
        self._made(record, response.kept)
        return response

    async def cancel(self, node: Node) -> None:
        """Stop the generation of `node`; one that has ended already stays as it is."""
        self.check_open()
        with suppress(StateNotFoundError, StateReleasedError):
            await self._transport.request("POST", f"{API}/states/{node.id}/cancel")

    async def make_again(self, node: Node) -> None:
        """Make a state that was lost once more: under its id, with the tokens that it had generated.

        What it references must be there. Nobody's scope comes to own it, and one that was released stays released.
        """
        self.check_open()
        record = self.record(node)
        again: dict[str, object] = {"sampling": wire.Sampling(max_tokens=0), "again": True}
        if node.generated:
            assert record.response is not None, "what a state generated is known since it was made"
            again["generated"] = record.response.tokens
        reply = await self._transport.request("POST", GENERATE, self._body(node, context(node), **again))
        self._made(record, _parsed(wire.GenerateResponse, reply).kept)

    async def explain(self, node: Node) -> Explanation:
        """Where everything that `node` sees is, or would be."""
        self.check_open()
        self.check_usable(node)

        async def attempt() -> Explanation:
            if node.owns_tokens and self.exists(node):
                await self._ensure(node)
                request = wire.ExplainRequest(id=node.id)
            else:
                request = wire.ExplainRequest(spec=(await self._ready(node)).spec())
            return await self.post("explain", request, Explanation)

        return await self._recovering(node, attempt)

    async def _recovering(self, node: Node, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await `attempt`, which needs `node` or what it references; if that was lost, make it again and repeat."""
        try:
            return await attempt()
        except StateNotFoundError as error:
            tried = error.__cause__ is not None  # by the attempt itself, for a state that it makes on its way
            if self._on_lost == "error" or tried:
                raise
            try:
                await rebuild(self, node)
            except AnabranchError as failure:
                error.add_note(f"and it could not be made again: {failure}")
                raise error from failure
        return await attempt()

    async def renew(self, node: Node, lease: float | None) -> wire.StateInfo:
        """Begin the lease of one state anew, and let it last `lease` seconds from now on, if that is given."""
        if not node.owns_tokens:
            raise InvalidRequestError("this state has no tokens of its own, so nothing of it is on the server")
        if lease is not None:
            check_lease(lease)

        async def attempt() -> wire.StateInfo:
            await self._ensure(node)
            return await self.post(f"states/{node.id}/renew", wire.RenewOneRequest(lease=lease), wire.StateInfo)

        info = await self._recovering(node, attempt)
        if lease is not None:
            self.record(node).lease = lease
        return info

    # ------------------------------------------------------------ releasing states

    async def release(self, *nodes: Node) -> None:
        """Give states up; those already gone are fine. If it fails, it can be tried again."""
        self.check_open()
        making = [task for node in nodes if (task := self.record(node).making) is not None]
        if making:
            await asyncio.wait(making)
        before = {node: self.record(node).standing for node in nodes}
        for node in before:  # at once: nobody may start to use them while the request is under way
            self.record(node).standing = Standing.RELEASED
        there = [node for node, one in before.items() if one in (Standing.ON_SERVER, Standing.UNCERTAIN)]
        try:
            await self.give_up(there)
        except BaseException:
            for node, standing in before.items():
                self.record(node).standing = standing
            raise

    async def give_up(self, nodes: Sequence[Node]) -> None:
        """Release on the server, whatever is known of these states here."""
        for some in _chunks(nodes):
            await self.post("states/release", wire.ReleaseRequest(ids=tuple(one.id for one in some)), wire.Released)

    # ------------------------------------------------------------ the server itself

    async def get(self, path: str, model: type[M]) -> M:
        self.check_open()
        return _parsed(model, await self._transport.request("GET", f"{API}/{path}"))

    async def post(self, path: str, message: BaseModel, model: type[M], *, timeout: float | None = None) -> M:
        self.check_open()
        reply = await self._transport.request("POST", f"{API}/{path}", dumped(message), timeout=timeout)
        return _parsed(model, reply)

    @property
    def nodes(self) -> list[Node]:
        """Those that somebody can still name."""
        # `keyrefs` is one step of the interpreter: another thread may be building states (`sync.Client`).
        return [node for reference in self._records.keyrefs() if (node := reference()) is not None]

    async def aclose(self) -> None:
        """Stop what is under way and close the connections. States on the server stay there for one more lease."""
        if self.closed:
            return
        self.closed = True
        await self._heartbeat.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.aclose()

    # ------------------------------------------------------------ inside

    async def _make(self, node: Node, record: Record) -> None:
        try:
            # If it was asked for before and the answer was lost, the server knows the request again.
            await self.generate(node, wire.Sampling(max_tokens=0))
        finally:
            record.making = None

    def _made(self, record: Record, kept: bool) -> None:
        record.made += 1
        if record.standing is not Standing.RELEASED:
            record.standing = Standing.ON_SERVER if kept else Standing.RELEASED
        if kept and not self.closed:
            self._heartbeat.start()

    async def _prepared(self, node: Node, **fields: Any) -> Body:
        self.check_open()
        return self._body(node, await self._ready(node), **fields)

    def _body(self, node: Node, resolved: Context, **fields: Any) -> Body:
        spec, lease = resolved.spec(), self.record(node).lease
        try:
            request = wire.GenerateRequest(
                id=node.id,
                refs=spec.refs,
                place=spec.place,
                rules=spec.rules,
                lease=self._lease if lease is None else lease,
                input=node.input,
                **fields,
            )
        except ValidationError as error:
            raise invalid(error) from None
        return dumped(request)

    async def _ready(self, node: Node) -> Context:
        """The context of `node`, once everything in it is on the server."""
        resolved = context(node)
        resolved.spec()  # what is wrong is said before anything is sent
        self._check_ancestors(resolved.targets)
        await asyncio.gather(*map(self._ensure, resolved.targets))
        return resolved

    def _check_ancestors(self, targets: Iterable[Node]) -> None:
        """Everything that would have to be made is checked first, so that nothing is made in vain."""
        seen: set[Node] = set()
        stack = list(targets)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            self.check_usable(node)
            if not self.exists(node):
                resolved = context(node)
                resolved.spec()
                stack.extend(resolved.targets)

    async def _sent(self, node: Node, request: Awaitable[Any]) -> Any:
        """Await a request that makes `node`, and remember what may exist after it, however it ends."""
        record = self.record(node)
        scope = current(self)
        if scope is not None:
            scope.own(node)
        record.standing = Standing.UNCERTAIN  # until it is accepted: a stream may be left early, an answer be lost
        try:
            return await request
        except AnabranchError as error:
            if not _may_have_run(error):
                record.standing = Standing.LOCAL
                if scope is not None:
                    scope.disown(node)
            raise


def dumped(message: BaseModel) -> Body:
    """A message as JSON data, without what equals the protocol's defaults (but always with its id)."""
    return message.model_dump(mode="json", exclude_defaults=True)


def _may_have_run(error: AnabranchError) -> bool:
    if isinstance(error, APIConnectionError):
        return error.sent
    return isinstance(error, APIStatusError) and error.status in (500, 502, 504)


def _parsed(model: type[M], reply: object) -> M:
    try:
        return model.model_validate(reply)
    except ValidationError as error:
        raise InternalError(
            f"the server's answer is not a {model.__name__}: {invalid(error).message}", hint=NOT_ANABRANCH
        ) from error


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many at once as one request may name."""
    return (items[i : i + wire.MAX_IDS] for i in range(0, len(items), wire.MAX_IDS))


def _lost(node: Node) -> StateNotFoundError:
    return StateNotFoundError(
        f"state {node.id} was lost: its lease ran out, or the server was restarted",
        hint='build it again; AsyncClient(on_lost="rebuild") does so by itself',
    )
