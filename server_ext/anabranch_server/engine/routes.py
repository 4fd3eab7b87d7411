"""The HTTP routes under `/anabranch/v1`: parse, render, hand to SGLang, and shape what comes back.

No state is kept here; the store lives in the scheduler process and is asked through `control.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from anabranch import wire
from anabranch_server.engine import generation
from anabranch_server.engine.control import ask
from anabranch_server.errors import Refusal, invalid

M = TypeVar("M", bound=BaseModel)
CLIENT_GONE = 499


def after_init_request_dispatcher(result: Any, tokenizer_manager: Any) -> None:
    """Add the routes to SGLang's HTTP app, in the one process that has it."""
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None and not getattr(http_server.app.state, "anabranch", False):
        http_server.app.include_router(router(tokenizer_manager))
        http_server.app.state.anabranch = True


def router(tokenizer_manager: Any) -> APIRouter:
    routes = APIRouter(prefix="/anabranch/v1", tags=["anabranch"])

    @routes.post("/generate", response_model=None)
    @answers
    async def generate(request: Request) -> Response:
        arrived = time.perf_counter()
        asked = await parsed(request, wire.GenerateRequest)
        events = generation.generate(tokenizer_manager, asked, request, arrived)
        first = await anext(events)  # what is wrong with a request shows before its first event
        if asked.stream:
            return StreamingResponse(_stream(first, events, asked.id), media_type="text/event-stream")
        assert isinstance(first, wire.FinalEvent), "without a stream there is one event"
        return reply(first.response)

    @routes.post("/explain", response_model=None)
    @answers
    async def explain(request: Request) -> Response:
        asked = await parsed(request, wire.ExplainRequest)
        spec = asked.spec.model_dump(mode="json") if asked.spec is not None else None
        return reply(wire.Explanation.model_validate(await ask(tokenizer_manager, "explain", id=asked.id, spec=spec)))

    @routes.get("/states", response_model=None)
    @answers
    async def states(request: Request) -> Response:
        return reply(wire.StateList.model_validate(await ask(tokenizer_manager, "list")))

    @routes.get("/states/{state_id}", response_model=None)
    @answers
    async def state(request: Request, state_id: str) -> Response:
        return reply(wire.StateInfo.model_validate(await ask(tokenizer_manager, "info", id=state_id)))

    @routes.delete("/states/{state_id}", response_model=None)
    @answers
    async def release(request: Request, state_id: str) -> Response:
        await ask(tokenizer_manager, "release", id=state_id)
        return Response(status_code=204)

    @routes.get("/stats", response_model=None)
    @answers
    async def stats(request: Request) -> Response:
        return reply(wire.Stats.model_validate(await ask(tokenizer_manager, "stats")))

    @routes.get("/health", response_model=None)
    @answers
    async def health(request: Request) -> Response:
        await ask(tokenizer_manager, "stats")  # the scheduler answers
        args = tokenizer_manager.server_args
        return reply(
            wire.Health(
                status="ok",
                version=version("anabranch"),
                sglang_version=version("sglang"),
                model=args.served_model_name or args.model_path,
                attention_backend=str(args.attention_backend),
            )
        )

    return routes


def answers(route: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Turn every refusal into the error body of the contract."""

    @wraps(route)
    async def answered(request: Request, **path: Any) -> Response:
        try:
            return await route(request, **path)
        except Refusal as refusal:
            headers = {"Retry-After": "1"} if refusal.status in (429, 503) else None
            error = wire.ErrorResponse(error=refusal.body(request.headers.get("x-request-id")))
            return reply(error, status=refusal.status, headers=headers)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)  # nobody reads it

    return answered


async def parsed(request: Request, model: type[M]) -> M:
    """The body as `model`. Raises Refusal; a body that is too large is not read to its end."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > wire.MAX_BODY_BYTES:
            raise Refusal(
                "context_too_long",
                f"the request body is larger than {wire.MAX_BODY_BYTES} bytes",
                hint="send long inputs in parts: append them to a state, one generate with max_tokens=0 each",
            )
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        raise invalid(error) from error


def reply(model: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


async def _stream(first: Any, events: AsyncIterator[Any], state_id: str) -> AsyncIterator[bytes]:
    try:
        yield _event(first)
        async for event in events:
            yield _event(event)
    except Refusal as refusal:
        yield _event(wire.ErrorEvent(error=refusal.body(state_id)))
    except (HTTPException, ValueError) as error:
        body = wire.ErrorBody(code="internal", message=str(error), request_id=state_id)
        yield _event(wire.ErrorEvent(error=body))


def _event(event: BaseModel) -> bytes:
    return b"data: " + event.model_dump_json().encode() + b"\n\n"
