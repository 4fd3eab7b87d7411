"""`FakeServer`: an in-process server without a model, for unit tests of programs that use anabranch.

It keeps the rules of states (ids, spans, visibility, placement, release); it knows no text but the replies given.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import anyio.lowlevel
from pydantic import BaseModel, ValidationError

from anabranch import wire
from anabranch.client import AsyncClient
from anabranch.errors import AnabranchError, InvalidRequestError, from_body, invalid
from anabranch.fake import FakeState, explain, refusal, see
from anabranch.session import API
from anabranch.transport import Body, EventStream

Reply: TypeAlias = str | Sequence[str] | Callable[[str], str]

M = TypeVar("M", bound=BaseModel)

POOL_TOKENS = 1_000_000


class FakeServer:
    """Give it to a client as `transport=`, or take `server.client()`.

    `reply` is what "the model" says: always the same string, strings in turn (the last one again and again), or a
    function of the visible text. Tokens are words. `requests` records every request as (method, path, body),
    `cancelled` the ids of states whose stream was closed early.
    """

    def __init__(self, reply: Reply = "ok") -> None:
        self.reply = reply
        self.requests: list[tuple[str, str, Body | None]] = []
        self.cancelled: list[str] = []
        # Released states stay in it: descendants may still see their tokens.
        self._states: dict[str, FakeState] = {}
        self._released: set[str] = set()
        self._vocabulary: dict[str, int] = {}
        self._failures: list[AnabranchError] = []
        self._replied = 0

    def client(self, *, max_retries: int = 0) -> AsyncClient:
        """A client of this server. It does not retry, unless told to, so that injected failures show."""
        return AsyncClient(transport=self, max_retries=max_retries)

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
        return [body for _, path, body in self.requests if path == f"{API}/generate" and body is not None]

    # ------------------------------------------------------------ the transport seam

    async def request(self, method: str, path: str, body: Body | None = None, *, timeout: float | None = None) -> Any:
        await self._arrived(method, path, body)
        answer = self._answer(method, path, body)
        return None if answer is None else answer.model_dump(mode="json")

    async def stream(self, path: str, body: Body, *, timeout: float | None = None) -> EventStream:
        await self._arrived("POST", path, body)
        state = self._begun(_parsed(wire.GenerateRequest, body))
        return FakeStream(self._played(state), lambda: self.cancelled.append(state.request.id))

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
                state = self._begun(_parsed(wire.GenerateRequest, body))
                return self._sealed(state, *self._spoken(state))
            case "POST", ["explain"]:
                request = _parsed(wire.ExplainRequest, body)
                if request.spec is not None:
                    return explain(*see(request.spec, self._parents(request.spec)), self._states)
                state = self._state(str(request.id))
                return explain(state.visible, state.start, self._states)
            case "GET", ["states"]:
                return wire.StateList(states=tuple(state.info for state in self._held))
            case "GET", ["states", name]:
                return self._state(name).info
            case "DELETE", ["states", name]:
                self._released.add(self._state(name).request.id)
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
        return [state for name, state in self._states.items() if name not in self._released]

    def _state(self, name: str, param: str = "id") -> FakeState:
        if name not in self._states:
            raise refusal("state_not_found", f"there is no state {name}", param)
        if name in self._released:
            raise refusal("state_released", f"state {name} was released", param)
        return self._states[name]

    def _parents(self, spec: wire.ContextSpec) -> dict[str, FakeState]:
        return {ref.id: self._state(ref.id, "refs") for ref in spec.refs}

    def _begun(self, request: wire.GenerateRequest) -> FakeState:
        if request.id in self._states:
            raise refusal("invalid_request", f"the id {request.id} is already in use", "id")
        visible, start = see(request, self._parents(request))
        words = tuple(word for piece in request.input for word in self._split(piece))
        last = request.refs[-1] if request.refs else None
        if not words and last is not None and last.kind == "inherit" and self._state(last.id).answer_due:
            words = ("<assistant>",)  # as the chat template begins an answer
        if not words:
            raise refusal("invalid_request", "there is no input", "input")
        return FakeState(request, visible, start, words, len(words))

    def _sealed(self, state: FakeState, words: list[str], finish: wire.FinishReason) -> wire.GenerateResponse:
        request, context = state.request, len(state.visible)
        self._states[request.id] = replace(state, words=(*state.words, *words))
        if not request.keep:
            self._released.add(request.id)
        tokens = tuple(self._number(word) for word in words)
        logprobs = tuple(wire.TokenLogprob(token=token, logprob=-1.0) for token in tokens)
        return wire.GenerateResponse(
            id=request.id,
            text="".join(words),
            tokens=tokens,
            logprobs=logprobs if request.sampling.logprobs else None,
            finish_reason=finish,
            usage=wire.Usage(
                context_tokens=context,
                reused_tokens=context,
                computed_tokens=state.input_tokens,
                generated_tokens=len(words),
            ),
            timings=wire.Timings(),
            kept=request.keep,
        )

    def _played(self, state: FakeState) -> Generator[Body, None, None]:
        words, finish = self._spoken(state)
        for word in words:
            yield wire.DeltaEvent(text=word, tokens=(self._number(word),)).model_dump(mode="json")
        yield wire.FinalEvent(response=self._sealed(state, words, finish)).model_dump(mode="json")

    def _stats(self) -> wire.Stats:
        held = sum(len(state.words) for state in self._held)
        counts = dict.fromkeys(wire.Stats.model_fields, 0)
        counts |= {"states": len(self._held), "created": len(self._states), "freed": len(self._released)}
        counts |= {"total_tokens": POOL_TOKENS, "held_tokens": held, "free_tokens": POOL_TOKENS - held}
        return wire.Stats(**counts)

    # ------------------------------------------------------------ words instead of a model

    def _spoken(self, state: FakeState) -> tuple[list[str], wire.FinishReason]:
        sampling = state.request.sampling
        if sampling.max_tokens == 0:
            return [], "length"
        if isinstance(self.reply, str):
            text = self.reply
        elif callable(self.reply):
            seen = [self._states[name].words[i] for name, i in state.visible]
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
    """The events of one generation. Closing it before the final event calls `cancelled`: no state is made."""

    def __init__(self, events: Generator[Body, None, None], cancelled: Callable[[], None]) -> None:
        self._events = events
        self._cancelled = cancelled
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
            self._events.close()
            self._cancelled()


def _words(text: str) -> list[str]:
    """Pieces that join to `text` again: words, each with the space before it."""
    return re.findall(r"\s*\S+|\s+", text)


def _parsed(model: type[M], body: Body | None) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        refused = invalid(error)
        raise InvalidRequestError(refused.message, param=refused.param, status=400) from None
