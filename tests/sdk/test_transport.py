"""HTTP as it really behaves: a small socket server that answers, stalls, and drops. Not what the messages mean."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import formatdate
from typing import Any

import httpx
import pytest

import anabranch
from anabranch import APIConnectionError, APITimeoutError, AsyncClient, InvalidRequestError
from anabranch.config import Config
from anabranch.transport import HTTPTransport, retry_after

RESPONSE = {
    "id": "0" * 32,
    "text": "hi",
    "tokens": [1],
    "finish_reason": "stop",
    "usage": {"context_tokens": 0, "reused_tokens": 0, "computed_tokens": 1, "generated_tokens": 1},
    "timings": {},
}
DELTA = {"type": "delta", "text": "hé\n", "tokens": [1]}
FINAL = {"type": "final", "response": RESPONSE}

Script = Callable[["Wire"], Awaitable[None]]


class Wire:
    """One accepted request: its head and body, and the means to answer it byte by byte."""

    def __init__(self, head: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head, self.body, self.reader, self.writer = head, body, reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, status: int, body: Any, *headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} x", f"content-length: {len(data)}", *headers, "", ""]
        await self.send("\r\n".join(lines).encode() + data)

    async def begin_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")

    async def gone(self) -> bool:
        """Whether the client closes the connection within two seconds."""
        return await asyncio.wait_for(self.reader.read(1), 2) == b""


class SocketServer:
    """Each request takes the next script; the last script serves all further ones."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.seen: list[Wire] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n") if line[:15] == "content-length:"), 0
                )
                wire = Wire(head, await reader.readexactly(length), reader, writer)
                self.seen.append(wire)
                await self.scripts[min(len(self.seen), len(self.scripts)) - 1](wire)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def sockets() -> AsyncIterator[SocketServer]:
    server = SocketServer()
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()


def answers(status: int, body: Any, *headers: str) -> Script:
    return lambda wire: wire.reply(status, body, *headers)


async def drops(wire: Wire) -> None:
    wire.writer.close()


async def stalls(wire: Wire) -> None:
    assert await wire.gone()


def streams(*chunks: bytes, then: Script = drops) -> Script:
    async def script(wire: Wire) -> None:
        await wire.begin_stream()
        for chunk in chunks:
            await wire.send(chunk)
            await asyncio.sleep(0.001)
        await then(wire)

    return script


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events)


def refusing_url() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.retry.FIRST_BACKOFF", 0.001)


# ------------------------------------------------------------ requests


async def test_a_request_on_the_wire(sockets: SocketServer):
    sockets.scripts = [answers(200, RESPONSE)]
    async with AsyncClient(sockets.url + "/", api_key="secret-key") as client:
        g = await client.root("grüß").generate(max_tokens=3)
    assert (g.text, g.tokens, g.timings.total) == ("hi", (1,), 0.0)
    (wire,) = sockets.seen
    lines = wire.head.lower().split("\r\n")
    assert lines[0] == "post /anabranch/v1/generate http/1.1"
    assert "authorization: bearer secret-key" in lines and "content-type: application/json" in lines
    assert json.loads(wire.body) == {
        "id": g.state.id,
        "input": [{"text": "grüß"}],
        "sampling": {"max_tokens": 3},
        "lease": 300.0,
    }
    assert "secret-key" not in repr(client) + repr(client.config)


async def test_release_on_the_wire(sockets: SocketServer):
    sockets.scripts = [answers(200, RESPONSE), answers(200, {"released": [], "unknown": []})]
    async with AsyncClient(sockets.url) as client:
        g = await client.root("a").generate()
        await g.state.release()
    assert sockets.seen[1].head.startswith("POST /anabranch/v1/states/release ")
    assert json.loads(sockets.seen[1].body) == {"ids": [g.state.id]}


async def test_loopback_needs_no_proxy(sockets: SocketServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", refusing_url())
    sockets.scripts = [answers(200, {"states": []})]
    async with AsyncClient(sockets.url) as client:
        assert await client.states() == ()


@pytest.mark.parametrize("answer", [answers(200, b"<html>hello</html>"), answers(200, {"text": 3}), answers(200, b"")])
async def test_an_answer_that_is_not_the_contract(sockets: SocketServer, answer: Script):
    sockets.scripts = [answer]
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(anabranch.InternalError) as caught:
            await client.root("a").generate()
    assert "anabranch serve" in str(caught.value.hint)


async def test_a_body_that_is_too_large_is_not_sent(sockets: SocketServer):
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(InvalidRequestError, match="bytes"):
            await client.root("x" * 8_400_000).generate()
    assert sockets.seen == []


# ------------------------------------------------------------ failures and retries


async def test_connection_refused(fast: None):
    async with AsyncClient(refusing_url()) as client:
        with pytest.raises(APIConnectionError, match="cannot reach") as caught:
            await client.root("a").generate()
    assert caught.value.sent is False and "anabranch serve" in str(caught.value.hint)


async def test_a_server_that_comes_up_late_is_reached(fast: None, sockets: SocketServer):
    """A refused connect sent nothing: a generate is tried again under the same id."""
    attempts: list[str] = []

    class Late(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            attempts.append(json.loads(request.content)["id"])
            if len(attempts) < 3:
                raise httpx.ConnectError("refused", request=request)
            return await super().handle_async_request(request)

    sockets.scripts = [answers(200, RESPONSE)]
    async with AsyncClient(transport=HTTPTransport(Config(sockets.url), backend=Late())) as client:
        g = await client.root("a").generate()
    assert attempts == [g.state.id] * 3


async def test_a_generate_whose_connection_is_lost_is_repeated(fast: None, sockets: SocketServer):
    sockets.scripts = [drops, answers(200, RESPONSE)]
    async with AsyncClient(sockets.url) as client:
        assert (await client.root("a").generate()).text == "hi"
    assert len(sockets.seen) == 2 and sockets.seen[0].body == sockets.seen[1].body


async def test_a_connection_that_is_always_lost(fast: None, sockets: SocketServer):
    sockets.scripts = [drops]
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(APIConnectionError, match="lost") as caught:
            await client.root("a").generate()
    assert caught.value.sent and not isinstance(caught.value, APITimeoutError) and len(sockets.seen) == 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_statuses_that_are_tried_again(fast: None, sockets: SocketServer, status: int):
    sockets.scripts = [answers(status, b"busy"), answers(status, b"busy"), answers(200, RESPONSE)]
    async with AsyncClient(sockets.url) as client:
        await client.root("a").generate()
    assert len(sockets.seen) == 3 and len({wire.body for wire in sockets.seen}) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 413, 422, 500])
async def test_statuses_that_are_final(fast: None, sockets: SocketServer, status: int):
    sockets.scripts = [answers(status, b"no")]
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(anabranch.APIStatusError) as caught:
            await client.root("a").generate()
    assert caught.value.status == status and len(sockets.seen) == 1


async def test_retries_end(fast: None, sockets: SocketServer):
    body = {"error": {"code": "pool_exhausted", "message": "the pool is full", "hint": "release"}}
    sockets.scripts = [answers(503, body, "retry-after: 0", "x-request-id: r7")]
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(anabranch.PoolExhaustedError) as caught:
            await client.root("a").generate()
    error = caught.value
    assert len(sockets.seen) == 3
    assert (error.status, error.retry_after, error.request_id, error.hint) == (503, 0.0, "r7", "release")
    assert error.message == "the pool is full" and "[pool_exhausted]" in str(error)


async def test_retry_after_is_honoured(sockets: SocketServer):
    sockets.scripts = [answers(429, b"", "retry-after: 0.3"), answers(200, RESPONSE)]
    async with AsyncClient(sockets.url) as client:
        began = time.monotonic()
        await client.root("a").generate()
    assert 0.3 <= time.monotonic() - began < 0.5 + 0.3, "less than the first backoff would be on top"


def test_retry_after_forms():
    assert retry_after("7") == 7 and retry_after("-3") == 0 and retry_after(None) is None
    assert retry_after("nan") is None and retry_after("soon") is None
    in_ten = retry_after(formatdate(time.time() + 10, usegmt=True))
    assert in_ten is not None and 8 <= in_ten <= 10
    assert retry_after(formatdate(time.time() - 10, usegmt=True)) == 0


# ------------------------------------------------------------ time


async def test_read_timeouts(sockets: SocketServer):
    sockets.scripts = [stalls]
    async with AsyncClient(sockets.url, timeout=30) as client:
        with pytest.raises(APITimeoutError, match="in time") as caught:
            await client.root("a").generate(timeout=0.05)
    assert caught.value.sent and len(sockets.seen) == 1


async def test_a_408_is_a_timeout(sockets: SocketServer):
    sockets.scripts = [answers(408, b"slow")]
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(APITimeoutError) as caught:
            await client.root("a").generate()
    assert caught.value.status == 408


async def test_a_cancelled_generate_closes_its_connection(sockets: SocketServer):
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def watches(wire: Wire) -> None:
        arrived.set()
        if await wire.gone():
            closed.set()

    sockets.scripts = [watches]
    async with AsyncClient(sockets.url) as client:
        task = asyncio.create_task(client.root("a").generate())
        await arrived.wait()
        task.cancel()
        await asyncio.wait_for(closed.wait(), 2)


# ------------------------------------------------------------ streams


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
async def test_a_stream_in_chunks_of_any_size(sockets: SocketServer, size: int):
    data = b": hello\r\n\r\n" + sse(DELTA, DELTA) + sse(FINAL).replace(b"\n", b"\r\n") + b"data: [DONE]\n\n"
    sockets.scripts = [streams(*(data[i : i + size] for i in range(0, len(data), size)))]
    async with AsyncClient(sockets.url) as client, client.root("a").stream() as s:
        assert [piece async for piece in s.text()] == ["hé\n", "hé\n"]
        assert (await s.final()).text == "hi"
    assert json.loads(sockets.seen[0].body)["stream"] is True


async def test_nothing_is_repeated_after_the_first_event(fast: None, sockets: SocketServer):
    sockets.scripts = [streams(sse(DELTA))]
    async with AsyncClient(sockets.url) as client, client.root("a").stream() as s:
        pieces = s.text()
        assert await anext(pieces) == "hé\n"
        with pytest.raises(APIConnectionError):
            await anext(pieces)
    assert len(sockets.seen) == 1


@pytest.mark.parametrize("chunks", [[], [b"data: [DONE]\n\n"], [b"data: {"]])
async def test_a_stream_that_ends_without_any_event(fast: None, sockets: SocketServer, chunks: list[bytes]):
    sockets.scripts = [streams(*chunks)]
    async with AsyncClient(sockets.url) as client, client.root("a").stream() as s:
        with pytest.raises(APIConnectionError, match="final event"):
            await s.final()
    assert len(sockets.seen) == 1


async def test_opening_a_stream_is_retried(fast: None, sockets: SocketServer):
    sockets.scripts = [answers(503, b"", "retry-after: 0"), streams(sse(DELTA, FINAL))]
    async with AsyncClient(sockets.url) as client, client.root("a").stream() as s:
        assert (await s.final()).text == "hi"
    assert len(sockets.seen) == 2


async def test_a_refused_stream_is_a_typed_error(sockets: SocketServer):
    body = {"error": {"code": "state_incompatible", "message": "other weights", "param": "refs"}}
    sockets.scripts = [answers(409, body)]
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(anabranch.StateIncompatibleError) as caught:
            async with client.root("a").stream():
                pass
    assert caught.value.param == "refs"


async def test_json_instead_of_a_stream_is_refused(sockets: SocketServer):
    sockets.scripts = [answers(200, RESPONSE, "content-type: application/json")]
    async with AsyncClient(sockets.url) as client:
        with pytest.raises(anabranch.InternalError, match="event stream"):
            async with client.root("a").stream():
                pass


@pytest.mark.parametrize("read", [0, 1])
async def test_leaving_early_closes_the_connection(sockets: SocketServer, read: int):
    """Also if nothing was read at all."""
    closed = asyncio.Event()

    async def watches(wire: Wire) -> None:
        if await wire.gone():
            closed.set()

    sockets.scripts = [streams(sse(DELTA), then=watches)]
    async with AsyncClient(sockets.url) as client:
        async with client.root("a").stream() as s:
            for _ in range(read):
                await anext(s)
        await asyncio.wait_for(closed.wait(), 2)


async def test_a_stream_that_stalls(sockets: SocketServer):
    sockets.scripts = [streams(sse(DELTA), then=stalls)]
    async with AsyncClient(sockets.url) as client, client.root("a").stream(timeout=0.1) as s:
        with pytest.raises(APITimeoutError):
            await s.final()


async def test_an_event_that_is_not_json(sockets: SocketServer):
    for data in (b"data: {oops\n\n", b"data: 3\n\n"):
        sockets.scripts = [streams(data)]
        async with AsyncClient(sockets.url) as client, client.root("a").stream() as s:
            with pytest.raises(anabranch.InternalError, match="not"):
                await s.final()
