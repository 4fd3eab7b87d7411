"""The seam to the server: a narrow protocol, and its one implementation over HTTP. The only file that imports httpx.

One call is one attempt: retries are `retry.py`'s business. It does not know what the messages mean.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import httpx

from anabranch.config import Config
from anabranch.errors import (
    NOT_ANABRANCH,
    APIConnectionError,
    APITimeoutError,
    InternalError,
    InvalidRequestError,
    from_status,
)
from anabranch.sse import SSEDecoder
from anabranch.wire import MAX_BODY_BYTES

T = TypeVar("T")
Body: TypeAlias = dict[str, Any]

# uvicorn drops idle connections after 5 s: let them go before, or a request may race with the closing.
_KEEPALIVE = httpx.Limits(max_connections=1024, max_keepalive_connections=64, keepalive_expiry=3.0)


class EventStream(Protocol):
    """An open stream of parsed events. `aclose` may be called at any time, and closes the connection."""

    def __aiter__(self) -> AsyncIterator[Body]: ...

    async def __anext__(self) -> Body: ...

    async def aclose(self) -> None: ...


class Transport(Protocol):
    """What carries a request to a server. Raises the typed errors of `errors.py`, nothing else."""

    async def request(self, method: str, path: str, body: Body | None = None, *, timeout: float | None = None) -> Any:
        """Send `body` as JSON and return the parsed answer (None: it was empty). `timeout` in seconds."""
        ...

    async def stream(self, path: str, body: Body, *, timeout: float | None = None) -> EventStream:
        """POST `body`; returns once the server has begun to answer. `timeout`: seconds to wait for each event."""
        ...

    async def aclose(self) -> None: ...


class HTTPTransport:
    """Transport over HTTP."""

    def __init__(self, config: Config, *, backend: httpx.AsyncBaseTransport | None = None) -> None:
        headers = {"accept": "application/json, text/event-stream"}
        if config.api_key is not None:
            headers["authorization"] = f"Bearer {config.api_key}"
        self._config = config
        self._client = httpx.AsyncClient(
            base_url=config.base_url,
            headers=headers,
            limits=_KEEPALIVE,
            transport=backend,
            trust_env=not config.loopback,  # no proxy stands before a loopback server
        )

    async def request(self, method: str, path: str, body: Body | None = None, *, timeout: float | None = None) -> Any:
        response = await _typed(self._client.send(self._built(method, path, body, timeout)))
        raw = response.content
        if not response.is_success:
            raise _error(response, raw)
        if not raw:
            return None
        try:
            return json.loads(raw)
        except ValueError as error:
            raise InternalError(
                f"the server answered {method} {path} with something that is not JSON",
                hint=NOT_ANABRANCH,
                status=response.status_code,
            ) from error

    async def stream(self, path: str, body: Body, *, timeout: float | None = None) -> EventStream:
        response = await _typed(self._client.send(self._built("POST", path, body, timeout), stream=True))
        kind = response.headers.get("content-type", "")
        if response.is_success and kind.startswith("text/event-stream"):
            return _HTTPEvents(response)
        try:
            raw = await _typed(response.aread())
        finally:
            await response.aclose()
        if response.is_success:
            raise InternalError(
                f"the server answered {path} with {kind or 'no content type'}, not with an event stream",
                hint=NOT_ANABRANCH,
                status=response.status_code,
            )
        raise _error(response, raw)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _built(self, method: str, path: str, body: Body | None, timeout: float | None) -> httpx.Request:
        seconds = self._config.timeout if timeout is None else timeout
        return self._client.build_request(
            method,
            path,
            content=None if body is None else _encoded(body),
            headers=None if body is None else {"content-type": "application/json"},
            timeout=httpx.Timeout(seconds, connect=min(self._config.connect_timeout, seconds)),
        )


class _HTTPEvents:
    """The events of one open response. Reading on after `aclose` ends the iteration."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = response.aiter_bytes()
        self._decoder = SSEDecoder()
        self._ready: deque[str] = deque()
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Body]:
        return self

    async def __anext__(self) -> Body:
        while not self._ready:
            chunk = None if self._closed else await _typed(anext(self._chunks, None))
            if chunk is None:
                raise StopAsyncIteration
            self._ready.extend(payload for payload in self._decoder.feed(chunk) if payload != "[DONE]")
        try:
            event: object = json.loads(self._ready.popleft())
        except ValueError as error:
            raise InternalError("the server sent an event that is not JSON", hint=NOT_ANABRANCH) from error
        if not isinstance(event, dict):
            raise InternalError("the server sent an event that is not a JSON object", hint=NOT_ANABRANCH)
        return cast("Body", event)

    async def aclose(self) -> None:
        self._closed = True
        self._ready.clear()
        await self._response.aclose()


async def _typed(call: Awaitable[T]) -> T:
    """Await one call into httpx; what it raises becomes one of our errors."""
    try:
        return await call
    except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise APITimeoutError("no connection to the server in time", sent=False) from error
    except httpx.TimeoutException as error:
        raise APITimeoutError("the server did not answer in time", hint="raise timeout=") from error
    except (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
        raise APIConnectionError(
            f"cannot reach the server: {error}",
            sent=False,
            hint="is it running (`anabranch serve`), and is base_url right?",
        ) from error
    except httpx.RequestError as error:
        raise APIConnectionError(f"the connection was lost: {error or type(error).__name__}") from error


def _encoded(body: Body) -> bytes:
    try:
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the request has a lone surrogate, which no encoding can carry") from error
    if len(content) > MAX_BODY_BYTES:
        raise InvalidRequestError(
            f"the request has {len(content)} bytes, more than {MAX_BODY_BYTES}",
            hint="split the input: fork in between, and append the rest to the fork",
            param="input",
        )
    return content


def _error(response: httpx.Response, raw: bytes) -> Exception:
    try:
        body: object = json.loads(raw)
    except ValueError:
        body = raw.decode("utf-8", "replace")
    return from_status(
        response.status_code,
        body,
        request_id=response.headers.get("x-request-id"),
        retry_after=retry_after(response.headers.get("retry-after")),
    )


def retry_after(header: str | None) -> float | None:
    """Seconds to wait, from a Retry-After header that holds seconds or an HTTP date; None if it says neither."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds == seconds else None
