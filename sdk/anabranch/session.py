"""What a client knows to exist on its server, and the requests that change it; each state is made at most once.

It builds no states (`state.py`) and moves no bytes (`transport.py`). One event loop runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError

from anabranch import wire
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
from anabranch.results import Explanation
from anabranch.scope import current
from anabranch.transport import Body, EventStream, Transport

API = "/anabranch/v1"

M = TypeVar("M", bound=BaseModel)


class Standing(Enum):
    """Where a state stands, as far as this client knows."""

    LOCAL = "local"
    UNCERTAIN = "uncertain"
    """A request for it was sent and not answered, or not yet."""
    ON_SERVER = "on server"
    RELEASED = "released"


@dataclass(slots=True)
class Record:
    """What the client knows about one node. `making` is the task that computes it on the server, if one runs."""

    standing: Standing = Standing.LOCAL
    making: asyncio.Task[None] | None = None
    response: wire.GenerateResponse | None = None


class Session:
    """One client's view of one server."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # Weak: what nobody can name any more need not be remembered.
        self._records: WeakKeyDictionary[Node, Record] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    # ------------------------------------------------------------ what is known

    def record(self, node: Node) -> Record:
        return self._records.setdefault(node, Record())

    def exists(self, node: Node) -> bool:
        """Whether `node` is on the server, or on its way."""
        record = self.record(node)
        return record.standing is Standing.ON_SERVER or record.making is not None

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
        if self.record(node).standing is Standing.RELEASED:
            raise StateReleasedError(f"state {node.id} was released", hint="states are values: build it again")

    # ------------------------------------------------------------ making states

    async def ensure(self, node: Node) -> None:
        """Return once `node` is on the server, computed at most once however many callers ask.

        A caller that is cancelled leaves the computation to the others. If it fails, all callers get the error, and
        a later call tries again.
        """
        self.check_open()
        self.check_usable(node)
        record = self.record(node)
        if record.standing is Standing.ON_SERVER:
            return
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
        self, node: Node, sampling: wire.Sampling, *, keep: bool = True, timeout: float | None = None
    ) -> wire.GenerateResponse:
        """Run `node` on the server, once what it references is there."""
        body = await self._prepared(node, sampling, keep=keep, stream=False)
        reply = await self._sent(node, self._transport.request("POST", f"{API}/generate", body, timeout=timeout))
        return self.accept(node, _parsed(wire.GenerateResponse, reply))

    async def open_stream(
        self, node: Node, sampling: wire.Sampling, *, keep: bool, timeout: float | None
    ) -> EventStream:
        """As `generate`, but streamed; whoever reads the final event calls `accept`."""
        body = await self._prepared(node, sampling, keep=keep, stream=True)
        return await self._sent(node, self._transport.stream(f"{API}/generate", body, timeout=timeout))

    def accept(self, node: Node, response: wire.GenerateResponse) -> wire.GenerateResponse:
        """The server has finished `node`."""
        record = self.record(node)
        record.response = response
        if record.standing is not Standing.RELEASED:
            record.standing = Standing.ON_SERVER if response.kept else Standing.RELEASED
        return response

    async def explain(self, node: Node) -> Explanation:
        """Where everything that `node` sees is, or would be."""
        self.check_open()
        self.check_usable(node)
        if node.owns_tokens and self.exists(node):
            await self.ensure(node)
            request = wire.ExplainRequest(id=node.id)
        else:
            request = wire.ExplainRequest(spec=(await self._ready(node)).spec())
        return _parsed(Explanation, await self._transport.request("POST", f"{API}/explain", dumped(request)))

    # ------------------------------------------------------------ releasing states

    async def release(self, *nodes: Node) -> None:
        """Give states up; those already gone are fine. All are tried, then the first error is raised."""
        self.check_open()
        results = await asyncio.gather(*map(self._release, dict.fromkeys(nodes)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _release(self, node: Node) -> None:
        record = self.record(node)
        if record.making is not None:
            await asyncio.wait([record.making])
        before = record.standing
        if before is Standing.RELEASED:
            return
        record.standing = Standing.RELEASED  # at once: nobody may start to use it while the request is under way
        if before is Standing.LOCAL:
            return
        try:
            await self._transport.request("DELETE", f"{API}/states/{node.id}")
        except (StateReleasedError, StateNotFoundError):
            pass  # gone is what was asked for
        except BaseException:
            record.standing = before
            raise

    # ------------------------------------------------------------ the server itself

    async def get(self, path: str, model: type[M]) -> M:
        self.check_open()
        return _parsed(model, await self._transport.request("GET", f"{API}/{path}"))

    async def aclose(self) -> None:
        """Stop what is under way and close the connections. States on the server stay there."""
        if self.closed:
            return
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.aclose()

    # ------------------------------------------------------------ inside

    async def _make(self, node: Node, record: Record) -> None:
        try:
            if record.standing is Standing.UNCERTAIN and await self._found(node):
                record.standing = Standing.ON_SERVER
            else:
                await self.generate(node, wire.Sampling(max_tokens=0))
        finally:
            record.making = None

    async def _found(self, node: Node) -> bool:
        """Whether the request whose answer was lost made the state after all (a running one can be referenced)."""
        try:
            await self.get(f"states/{node.id}", wire.StateInfo)
        except StateNotFoundError:
            return False
        return True

    async def _prepared(self, node: Node, sampling: wire.Sampling, *, keep: bool, stream: bool) -> Body:
        self.check_open()
        spec = (await self._ready(node)).spec()
        try:
            request = wire.GenerateRequest(
                id=node.id,
                refs=spec.refs,
                place=spec.place,
                rules=spec.rules,
                keep=keep,
                input=node.input,
                sampling=sampling,
                stream=stream,
            )
        except ValidationError as error:
            raise invalid(error) from None
        return dumped(request)

    async def _ready(self, node: Node) -> Context:
        """The context of `node`, once everything in it is on the server."""
        resolved = context(node)
        resolved.spec()  # what is wrong is said before anything is sent
        self._check_ancestors(resolved.targets)
        await asyncio.gather(*map(self.ensure, resolved.targets))
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
