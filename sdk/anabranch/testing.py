"""`FakeServer`: an in-process server without a model, for unit tests of programs that use anabranch.

It keeps the rules of states (ids, spans, visibility, placement, leases, release); it knows no text but the replies
given, and no clock.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import anyio.lowlevel
from pydantic import BaseModel, ValidationError

from anabranch import wire
from anabranch.client import AsyncClient
from anabranch.config import OnLost
from anabranch.errors import AnabranchError, APIConnectionError, InvalidRequestError, from_body, invalid
from anabranch.fake import FakeState, FakeStore, explain, refusal, see
from anabranch.session import API, GENERATE
from anabranch.transport import Body, EventStream

Reply: TypeAlias = str | Sequence[str] | Callable[[str], str]

M = TypeVar("M", bound=BaseModel)

POOL_TOKENS = 1_000_000


class Named(Protocol):
    """A state, of either client."""

    @property
    def id(self) -> str: ...


class FakeServer:
    """Give it to a client as `transport=`, or take `server.client()`.

    `reply` is what "the model" says: always the same string, strings in turn (the last one again and again), or a
    function of the visible text. Tokens are words. `requests` records every request as (method, path, body),
    `cancelled` the ids of states whose stream was closed early or cancelled. Leases do not run out by themselves:
    `expire` and `restart` lose states.
    """

    def __init__(self, reply: Reply = "ok") -> None:
        self.reply = reply
        self.requests: list[tuple[str, str, Body | None]] = []
        self.cancelled: list[str] = []
        self._store = FakeStore()
        # The streams that are open, and whether they are to be cancelled.
        self._running: dict[str, bool] = {}
        self._vocabulary: dict[str, int] = {}
        self._failures: list[AnabranchError] = []
        self._replied = 0

    def client(self, *, max_retries: int = 0, lease: float | None = None, on_lost: OnLost = "error") -> AsyncClient:
        """A client of this server. It does not retry, unless told to, so that injected failures show."""
        return AsyncClient(transport=self, max_retries=max_retries, lease=lease, on_lost=on_lost)

    def expire(self, *states: Named) -> None:
        """The leases of these states run out. What their descendants see of them stays there for them."""
        self._store.expire(state.id for state in states)

    def restart(self) -> None:
        """All states are lost, and all streams end."""
        self._store = FakeStore()
        self._running.clear()

    def fail_next(
        self, error: wire.ErrorCode | AnabranchError, *, times: int = 1, retry_after: float | None = None
    ) -> None:
        """Make the next `times` requests fail, with a code of the contract or with an error of your own."""
        if not isinstance(error, AnabranchError):
            body = {"code": error, "message": "injected by FakeServer.fail_next"}
            error = from_body(body, request_id="fake", retry_after=retry_after)
        self._failures.extend([error] * times)

    @property
    def generated(self) -> list[Body]:
        """The bodies of all generate requests so far, in order."""
        return [body for _, path, body in self.requests if path == GENERATE and body is not None]

    # ------------------------------------------------------------ the transport seam

    async def request(self, method: str, path: str, body: Body | None = None, *, timeout: float | None = None) -> Any:
        await self._arrived(method, path, body)
        answer = self._answer(method, path, body)
        return None if answer is None else answer.model_dump(mode="json")

    async def stream(self, path: str, body: Body, *, timeout: float | None = None) -> EventStream:
        await self._arrived("POST", path, body)
        request = _parsed(wire.GenerateRequest, body)
        if (known := self._store.repeated(request)) is not None:
            return FakeStream(iter(_told(known)), lambda: None)
        state, spoken = self._begun(request), list[str]()
        self._running[request.id] = False
        return FakeStream(self._played(state, spoken), lambda: self._left(state, spoken))

    async def aclose(self) -> None:
        """Nothing to close: the states stay for the next client."""

    async def _arrived(self, method: str, path: str, body: Body | None) -> None:
        self.requests.append((method, path, body))
        await anyio.lowlevel.checkpoint()  # other tasks run while a request is under way, as they do over a network
        if self._failures:
            raise self._failures.pop(0)

    def _answer(self, method: str, path: str, body: Body | None) -> BaseModel | None:
        match method, path.removeprefix(API).strip("/").split("/"):
            case "POST", ["generate"]:
                request = _parsed(wire.GenerateRequest, body)
                if (known := self._store.repeated(request)) is not None:
                    return known
                state = self._begun(request)
                return self._sealed(state, *self._spoken(state))
            case "POST", ["explain"]:
                request = _parsed(wire.ExplainRequest, body)
                if request.spec is not None:
                    return explain(*see(request.spec, self._store.parents(request.spec)), self._store.states)
                state = self._store.state(str(request.id))
                return explain(state.visible, state.start, self._store.states)
            case "GET", ["states"]:
                return wire.StateList(states=tuple(state.info for state in self._held))
            case "GET", ["states", name]:
                return self._store.state(name).info
            case "DELETE", ["states", name]:
                self._store.release([self._store.state(name).request.id])
                return None
            case "POST", ["states", "renew"]:
                renewal = _parsed(wire.RenewRequest, body)
                return self._store.renew(renewal.ids, renewal.lease)
            case "POST", ["states", "release"]:
                return self._store.release(_parsed(wire.ReleaseRequest, body).ids)
            case "POST", ["states", name, "renew"]:
                self._store.renew([self._store.state(name).request.id], _parsed(wire.RenewOneRequest, body).lease)
                return self._store.state(name).info
            case "POST", ["states", name, "cancel"]:
                if name not in self._running:
                    self._store.state(name)  # a sealed one stays as it is
                else:
                    self._running[name] = True
                return None
            case "GET", ["stats"]:
                return self._stats()
            case "GET", ["health"]:
                return wire.Health(
                    status="ok", version="fake", sglang_version="fake", model="fake", attention_backend="fake"
                )
            case _:
                raise InvalidRequestError(f"no such endpoint: {method} {path}", status=404)

    # ------------------------------------------------------------ the life of a state

    @property
    def _held(self) -> list[FakeState]:
        return self._store.held

    def _begun(self, request: wire.GenerateRequest) -> FakeState:
        if request.id in self._running:
            raise refusal("invalid_request", f"the id {request.id} is in use by an open stream", "id")
        visible, start = see(request, self._store.parents(request))
        words = tuple(word for piece in request.input for word in self._split(piece))
        last = request.refs[-1] if request.refs else None
        if not words and last is not None and last.kind == "inherit" and self._store.state(last.id).answer_due:
            words = ("<assistant>",)  # as the chat template begins an answer
        if not words:
            raise refusal("invalid_request", "there is no input", "input")
        return FakeState(request, visible, start, words, len(words), request.lease)

    def _sealed(self, state: FakeState, words: list[str], finish: wire.FinishReason) -> wire.GenerateResponse:
        request, context = state.request, len(state.visible)
        tokens = tuple(self._number(word) for word in words)
        logprobs = tuple(wire.TokenLogprob(token=token, logprob=-1.0) for token in tokens)
        given = len(request.generated or ())
        response = wire.GenerateResponse(
            id=request.id,
            text="".join(words),
            tokens=tokens,
            logprobs=logprobs if request.sampling.logprobs else None,
            finish_reason=finish,
            usage=wire.Usage(
                context_tokens=context,
                reused_tokens=context,
                computed_tokens=state.input_tokens + given,
                generated_tokens=len(words) - given,
            ),
            timings=wire.Timings(),
            kept=request.keep and (finish != "cancelled" or request.keep_partial),
        )
        self._store.seal(replace(state, words=(*state.words, *words)), response)
        return response

    def _played(self, state: FakeState, spoken: list[str]) -> Iterator[Body]:
        """The events of a stream; `spoken` grows with them."""
        words, finish = self._spoken(state)
        for word in (*words, None):
            cancelled = self._running.get(state.request.id)
            if cancelled is None:
                raise APIConnectionError("the server was restarted")
            if cancelled:
                finish = "cancelled"
                self.cancelled.append(state.request.id)
            if cancelled or word is None:
                break
            spoken.append(word)
            yield _delta(word, self._number(word))
        del self._running[state.request.id]
        yield _final(self._sealed(state, spoken, finish))

    def _left(self, state: FakeState, spoken: list[str]) -> None:
        """A stream was closed before its final event."""
        self.cancelled.append(state.request.id)
        if self._running.pop(state.request.id, None) is not None:
            self._sealed(state, spoken, "cancelled")

    def _stats(self) -> wire.Stats:
        held, counts = sum(len(state.words) for state in self._held), self._store.counts
        return wire.Stats(
            states=len(self._held),
            running=len(self._running),
            held_tokens=held,
            total_tokens=POOL_TOKENS,
            free_tokens=POOL_TOKENS - held,
            evictable_tokens=0,
            in_use_tokens=0,
            created=counts["created"],
            freed=counts["freed"],
            expired=counts["expired"],
            cancelled=counts["cancelled"],
        )

    # ------------------------------------------------------------ words instead of a model

    def _spoken(self, state: FakeState) -> tuple[list[str], wire.FinishReason]:
        sampling = state.request.sampling
        if state.request.generated is not None:
            return self._split(wire.TokensPiece(tokens=state.request.generated)), "length"
        if sampling.max_tokens == 0:
            return [], "length"
        if isinstance(self.reply, str):
            text = self.reply
        elif callable(self.reply):
            seen = [self._store.states[name].words[i] for name, i, _ in state.visible]
            text = self.reply("".join((*seen, *state.words)))
        else:
            text = self.reply[min(self._replied, len(self.reply) - 1)]
        self._replied += 1
        for stop in sampling.stop:
            text = text.split(stop, 1)[0]
        words = _words(text)
        return words[: sampling.max_tokens], "length" if len(words) > sampling.max_tokens else "stop"

    def _split(self, piece: wire.Piece) -> list[str]:
        match piece:
            case wire.TextPiece():
                return _words(piece.text)
            case wire.MessagePiece():
                return [f"<{piece.role}>", *_words(piece.content)]
            case wire.TokensPiece():
                known = {number: word for word, number in self._vocabulary.items()}
                return [known.get(token, f"<{token}>") for token in piece.tokens]

    def _number(self, word: str) -> int:
        return self._vocabulary.setdefault(word, len(self._vocabulary))


class FakeStream:
    """The events of one generation. Closing it before the final event calls `left`."""

    def __init__(self, events: Iterator[Body], left: Callable[[], None]) -> None:
        self._events = events
        self._left = left
        self._done = False

    def __aiter__(self) -> AsyncIterator[Body]:
        return self

    async def __anext__(self) -> Body:
        await anyio.lowlevel.checkpoint()
        event = next(self._events, None)
        if event is None:
            raise StopAsyncIteration
        self._done = event["type"] == "final"
        return event

    async def aclose(self) -> None:
        if not self._done:
            self._done = True
            self._events = iter(())
            self._left()


def _delta(text: str, *tokens: int) -> Body:
    return wire.DeltaEvent(text=text, tokens=tokens).model_dump(mode="json")


def _final(response: wire.GenerateResponse) -> Body:
    return wire.FinalEvent(response=response).model_dump(mode="json")


def _told(response: wire.GenerateResponse) -> list[Body]:
    """A finished generation as a stream."""
    return [_delta(response.text, *response.tokens), _final(response)]


def _words(text: str) -> list[str]:
    """Pieces that join to `text` again: words, each with the space before it."""
    return re.findall(r"\s*\S+|\s+", text)


def _parsed(model: type[M], body: Body | None) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        refused = invalid(error)
        raise InvalidRequestError(refused.message, param=refused.param, status=400) from None
