"""Connections that break, lie or dawdle, byte by byte: nobody else notices, and nothing is left."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.engine.api import PATH, body, send
from tests.hostile.aftermath import idle
from tests.serving import Served

pytestmark = pytest.mark.engine

HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n"
DEADLINE = 20.0


def raw(served: Served, *parts: str | bytes, pause: float = 0.0, read: bool = True) -> bytes:
    """Send `parts`, `pause` seconds apart; returns what comes until the server is silent or hangs up."""
    where = urlsplit(served.url)
    with socket.create_connection((where.hostname, where.port), timeout=DEADLINE) as link:
        with suppress(ConnectionError):  # the server may have hung up before it had all
            for part in parts:
                link.sendall(part.encode("latin-1") if isinstance(part, str) else part)
                time.sleep(pause)
        found = b""
        with suppress(ConnectionError):
            while read and (some := link.recv(65536)):
                found += some
                if b"\r\n\r\n" in found and (b"content-length: 0" in found or found.endswith((b"}", b"}\n\n", b"."))):
                    break
        return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


def valid(n: int = 1, **more: Any) -> bytes:
    return json.dumps(body(text="x", n=n, **more)).encode()


@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ",
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: -1\r\n\r\n{}",
        "Content-Length: 1e3\r\n\r\n{}",
        "Content-Length: " + "9" * 40 + "\r\n\r\n{}",
        "Content-Length: two\r\n\r\n{}",
        "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "Transfer-Encoding: nothing\r\n\r\n{}",
        "X: " + "x" * 200_000 + "\r\n\r\n",
        "".join(f"X{i}: y\r\n" for i in range(20_000)) + "\r\n",
        "X\x00Y: z\r\n\r\n",
        "X: a\r\n b\r\n\r\n",
        "Content-Length: 2\r\nExpect: 200-maybe\r\n\r\n{}",
        "Upgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=lambda lines: lines[:40].encode("unicode_escape").decode(),
)
def test_headers_that_lie(besieged: Served, lines: str):
    answer = raw(besieged, HEAD, lines)
    assert status(answer) in (0, 400, 413, 431, 501), answer[:300]


NONE = [
    *("GET", "GET /\r\n\r\n", "\r\n\r\n\r\n", "POST " + "/x" * 50_000 + " HTTP/1.1\r\n\r\n"),
    *("\x16\x03\x01\x02\x00", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
]


@pytest.mark.parametrize(
    "line",
    NONE,
    ids=lambda line: line[:12].encode("unicode_escape").decode(),
)
def test_what_is_no_request(besieged: Served, line: str):
    assert status(raw(besieged, line, read="\r\n\r\n" in line)) in (0, 400, 404, 414, 431)


def test_a_connection_that_is_dropped_at_each_point(besieged: Served):
    text = valid(n=60, stream=True)
    whole = HEAD.encode() + f"Content-Length: {len(text)}\r\n\r\n".encode() + text
    chunked = HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + f"{len(text):x}\r\n".encode() + text
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: raw(besieged, whole[:at], read=False), range(0, len(whole) + 1, 3)))
        list(pool.map(lambda at: raw(besieged, chunked[:at], read=False), range(0, len(chunked) + 1, 3)))
    before = idle(besieged)
    with ThreadPoolExecutor(8) as pool:  # and after the request, in the middle of the answer

        def leave(n: int) -> None:
            asked = valid(n=200, stream=bool(n % 2))
            head = HEAD + f"Content-Length: {len(asked)}\r\n\r\n"
            raw(besieged, head, asked, pause=0.02 * n, read=False)

        list(pool.map(leave, range(24)))
    after = idle(besieged)
    assert after["failed"] == before["failed"] and after["states"] - before["states"] <= 24, after


def test_senders_that_are_slow_hold_nobody_up(besieged: Served):
    text = valid()
    head = HEAD + f"Content-Length: {len(text)}\r\n\r\n"
    with ThreadPoolExecutor(32) as pool:
        slow = [
            pool.submit(raw, besieged, head, *(text[at : at + 8] for at in range(0, len(text), 8)), pause=0.15)
            for _ in range(32)
        ]
        began = time.monotonic()
        for _ in range(5):
            assert send(besieged, **body(text="x", n=1)).status_code == 200
        assert time.monotonic() - began < DEADLINE
        assert not any(one.done() for one in slow)
        for one in slow:
            # all are the same request: the first makes the state, the others are answered with it
            assert status(one.result()) == 200, one.result()[:300]


def test_pipelined_requests_are_answered_in_order(besieged: Served):
    one = f"GET /anabranch/v1/states/{'a' * 32} HTTP/1.1\r\nHost: x\r\n\r\n"
    last = one.replace("Host: x", "Host: x\r\nConnection: close")
    where = urlsplit(besieged.url)
    with socket.create_connection((where.hostname, where.port), timeout=DEADLINE) as link:
        link.sendall((one * 20 + last).encode())
        found = b""
        while some := link.recv(65536):
            found += some
    assert found.count(b"HTTP/1.1 404") == 21, found[:500]
