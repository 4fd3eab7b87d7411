"""The HTTP routes under `/anabranch/v1`: parse, render, hand to SGLang, and shape what comes back.

No state is kept here; the store lives in the scheduler process and is asked through `control.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial, wraps
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from anabranch import wire
from anabranch_server.engine import access, generation, metrics
from anabranch_server.engine.access import caller
from anabranch_server.engine.attempts import Attempts, Event, Key
from anabranch_server.engine.channel import ask
from anabranch_server.engine.clock import keep_time
from anabranch_server.errors import Refusal, invalid
from anabranch_server.openapi import PREFIX, description

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
CLIENT_GONE = 499


def after_init_request_dispatcher(result: Any, tokenizer_manager: Any) -> None:
    """Add the routes to SGLang's HTTP app, in the one process that has it."""
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None and not getattr(http_server.app.state, "anabranch", False):
        access.load(tokenizer_manager.server_args)
        access.guard(http_server.app)
        if tokenizer_manager.server_args.enable_metrics:
            metrics.start()
        http_server.app.include_router(router(tokenizer_manager))
        http_server.app.router.routes.append(Route(PREFIX + "{path:path}", Nothing()))
        http_server.app.state.anabranch = True


def router(manager: Any) -> APIRouter:
    routes = APIRouter(prefix=PREFIX, tags=["anabranch"])

    async def exists(key: Key) -> bool:
        try:
            await ask(manager, "renew", tenant=key[0], ids=[key[1]], lease=None, strict=True)
        except Refusal as refusal:
            if refusal.code == "state_released":
                raise
            return False
        return True

    attempts = Attempts(exists)

    @routes.post("/generate", response_model=None)
    @answers
    async def generate(request: Request) -> Response:
        arrived = time.perf_counter()
        asked, tenant = await parsed(request, wire.GenerateRequest), caller(request).tenant
        keep_time(manager)
        start = partial(generation.attempt, manager, asked, tenant, arrived)
        events = attempts.join((tenant, asked.id), asked, start)
        if asked.stream:
            first = await unless_gone(
                request, anext(events)
            )  # what is wrong with a request shows before its first event
            return StreamingResponse(_stream(first, events, asked.id), media_type="text/event-stream")
        final = await unless_gone(request, _last(events))
        assert isinstance(final, wire.FinalEvent), "the final event is the last"
        return reply(final.response)

    @routes.post("/explain", response_model=None)
    @answers
    async def explain(request: Request) -> Response:
        asked = await parsed(request, wire.ExplainRequest)
        spec = asked.spec.model_dump(mode="json") if asked.spec is not None else None
        found = await ask(manager, "explain", tenant=caller(request).tenant, id=asked.id, spec=spec)
        return reply(wire.Explanation.model_validate(found))

    @routes.get("/states", response_model=None)
    @answers
    async def states(request: Request) -> Response:
        return reply(wire.StateList.model_validate(await ask(manager, "list", tenant=caller(request).tenant)))

    @routes.post("/states/renew", response_model=None)
    @answers
    async def renew(request: Request) -> Response:
        asked = await parsed(request, wire.RenewRequest)
        found = await ask(
            manager, "renew", tenant=caller(request).tenant, ids=asked.ids, lease=asked.lease, strict=False
        )
        return reply(wire.Renewal.model_validate(found))

    @routes.post("/states/release", response_model=None)
    @answers
    async def release(request: Request) -> Response:
        asked, tenant = await parsed(request, wire.ReleaseRequest), caller(request).tenant
        found = wire.Released.model_validate(await ask(manager, "release", tenant=tenant, ids=asked.ids, strict=False))
        for state_id in asked.ids:
            attempts.forget((tenant, state_id))
        return reply(found)

    @routes.get("/states/{state_id}", response_model=None)
    @answers
    async def state(request: Request, state_id: str) -> Response:
        return reply(await _info(request, state_id))

    @routes.delete("/states/{state_id}", response_model=None)
    @answers
    async def release_one(request: Request, state_id: str) -> Response:
        tenant = caller(request).tenant
        await ask(manager, "release", tenant=tenant, ids=[state_id], strict=True)
        attempts.forget((tenant, state_id))
        return Response(status_code=204)

    @routes.post("/states/{state_id}/renew", response_model=None)
    @answers
    async def renew_one(request: Request, state_id: str) -> Response:
        asked = await parsed(request, wire.RenewOneRequest, empty=True)
        tenant = caller(request).tenant
        await ask(manager, "renew", tenant=tenant, ids=[state_id], lease=asked.lease, strict=True)
        return reply(await _info(request, state_id))

    @routes.post("/states/{state_id}/cancel", response_model=None)
    @answers
    async def cancel(request: Request, state_id: str) -> Response:
        tenant = caller(request).tenant
        if not attempts.end((tenant, state_id)):
            await ask(manager, "cancel", tenant=tenant, id=state_id)
        return Response(status_code=204)

    @routes.get("/stats", response_model=None)
    @answers
    async def stats(request: Request) -> Response:
        who = caller(request)
        found = await ask(manager, "stats", tenant=who.tenant, everything=who.operator)
        return reply(wire.Stats.model_validate(found))

    @routes.get("/health", response_model=None)
    @answers
    async def health(request: Request) -> Response:
        await ask(manager, "ping")  # the scheduler answers
        args = manager.server_args
        return reply(
            wire.Health(
                status="ok",
                version=version("anabranch"),
                sglang_version=version("sglang"),
                model=args.served_model_name or args.model_path,
                attention_backend=str(args.attention_backend),
            )
        )

    @routes.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        return JSONResponse(description())

    async def _info(request: Request, state_id: str) -> wire.StateInfo:
        found = await ask(manager, "info", tenant=caller(request).tenant, id=state_id)
        return wire.StateInfo.model_validate(found)

    return routes


class Nothing:
    """Whatever else is asked for under our prefix, by any method: SGLang's app would answer in its own words."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = await _nothing(Request(scope, receive))
        await answer(scope, receive, send)


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """Await `answer`; it is cancelled, and ClientDisconnect raised, if the client goes away before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, watch = asyncio.ensure_future(answer), asyncio.create_task(gone())
    try:
        await asyncio.wait([answering, watch], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        watch.cancel()


async def _last(events: AsyncGenerator[Event, None]) -> Event:
    async with aclosing(events):
        return [event async for event in events][-1]


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


@answers
async def _nothing(request: Request) -> Response:
    hint = f"what there is: GET {PREFIX}/openapi.json"
    raise Refusal("invalid_request", f"there is no {request.method} {request.url.path}", hint=hint)


async def parsed(request: Request, model: type[M], *, empty: bool = False) -> M:
    """The body as `model`; with `empty`, none is one without fields. Raises Refusal; a body that is too large is not
    read to its end."""
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
        return model.model_validate_json(bytes(body) or b"{}" if empty else bytes(body))
    except ValidationError as error:
        raise invalid(error) from error


def reply(model: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), status, headers, media_type="application/json")


async def _stream(first: Event, events: AsyncGenerator[Event, None], state_id: str) -> AsyncIterator[bytes]:
    async with aclosing(events):
        try:
            yield _event(first)
            async for event in events:
                yield _event(event)
        except Refusal as refusal:
            yield _event(wire.ErrorEvent(error=refusal.body(state_id)))


def _event(event: BaseModel) -> bytes:
    return b"data: " + event.model_dump_json().encode() + b"\n\n"
