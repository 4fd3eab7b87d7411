"""Whose request it is: in the HTTP process, the caller of each request, and the tenant stamped on what SGLang is given.

A spec reaches the scheduler inside SGLang's own messages, which clients fill in: only what is stamped here is trusted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import Request
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope
from starlette.datastructures import Headers
from starlette.responses import Response

from anabranch import wire
from anabranch_server.engine.admission import KEY, TENANT
from anabranch_server.engine.clock import keep_time
from anabranch_server.engine.screening import screen
from anabranch_server.errors import Refusal
from anabranch_server.limits import Limits
from anabranch_server.tenancy import Caller, Keyring, read_keys

RID_PREFIX = "anabranch-"
RESERVED = (RID_PREFIX, HEALTH_CHECK_RID_PREFIX)
"""How request ids of our own begin. SGLang aborts by prefix, so a client's may not begin one of these either."""
OPEN_PATHS = ("/health", "/metrics")
_keyring = Keyring()
_releasing: set[asyncio.Future[None]] = set()


def load(server_args: Any) -> None:
    """Read the keys. Raises ValueError."""
    global _keyring
    path = Limits.read().api_keys_file
    _keyring = Keyring(read_keys(path) if path else {}, server_args.api_key, server_args.admin_api_key)


def caller(request: Request) -> Caller:
    """Who sent a request; raises Refusal `unauthorized`."""
    return _keyring.caller(request.headers.get("authorization"))


async def around_generate_request(
    original: Callable[..., Any], manager: Any, order: Any, request: Request | None = None
) -> AsyncIterator[Any]:
    """SGLang's endpoints come through here, and our own, which give no `request` and stamp themselves."""
    if request is not None and not request.url.path.startswith("/health"):  # its probe's id is SGLang's own
        for rid in order.rid if isinstance(order.rid, list) else [order.rid]:
            if isinstance(rid, str) and any(rid.startswith(mine) or mine.startswith(rid) for mine in RESERVED):
                raise ValueError(f"request ids may not begin with, or be the beginning of, {' or '.join(RESERVED)}")
        given = getattr(order, "sampling_params", None)
        for sampling in given if isinstance(given, list) else [given]:
            if not isinstance(sampling, dict):
                continue
            custom = sampling.get("custom_params")
            if isinstance(custom, dict) and KEY in custom:
                if not isinstance(custom[KEY], str):
                    raise ValueError(f"invalid_request: custom_params.{KEY} is a JSON string")
                keep_time(manager)
                sampling["custom_params"] = {**custom, TENANT: _stamp(request)}
    screen(order, manager.model_config.vocab_size)
    async with aclosing(original(manager, order, request)) as outputs:
        async for output in outputs:
            _name_status(output)
            yield output


def around_handle_abort_req(original: Callable[..., None], manager: Any, aborted: Any) -> None:
    """SGLang gives an adapter back when a request ends that names it, but not when it never ran. With 500 and 503 it
    does that later."""
    state = manager.rid_to_state.get(aborted.rid)
    original(manager, aborted)
    later = (aborted.finished_reason or {}).get("status_code") in (500, 503)
    if state is not None and state.finished and manager.enable_lora and state.obj.lora_path and not later:
        task = asyncio.ensure_future(manager.lora_registry.release(state.obj.lora_id))
        _releasing.add(task)
        task.add_done_callback(_releasing.discard)


def _name_status(output: Any) -> None:
    """SGLang's streaming endpoints tell an error from a cancellation by the type of its status."""
    reason = output.get("meta_info", {}).get("finish_reason") if isinstance(output, dict) else None
    if isinstance(reason, dict) and isinstance(reason.get("status_code"), int):
        reason["status_code"] = HTTPStatus(reason["status_code"])


def _stamp(request: Request) -> str:
    try:
        return caller(request).tenant
    except Refusal as refusal:
        raise ValueError(f"{refusal.code}: {refusal.message}") from refusal


class KeyCheck:
    """Lets in only those whose keys are in the keys file, to SGLang's endpoints as to ours; to its controls, only the
    operator."""

    def __init__(self, app: Any, routes: Any):
        self.app = app
        self.routes = routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"].startswith(OPEN_PATHS):
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            who = _keyring.caller(headers.get("authorization"))
            if not who.operator and _get_auth_level_from_app_and_scope(self.routes, scope) is not AuthLevel.NORMAL:
                raise Refusal("unauthorized", "this endpoint is the operator's")
        except Refusal as refusal:
            error = wire.ErrorResponse(error=refusal.body(headers.get("x-request-id"))).model_dump_json()
            return await Response(error, refusal.status, media_type="application/json")(scope, receive, send)
        return await self.app(scope, receive, send)


def guard(app: Any) -> None:
    """Put the check in front of the whole HTTP app, if there is a keys file."""
    if _keyring.named:
        app.add_middleware(KeyCheck, routes=app)
