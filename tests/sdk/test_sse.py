"""The event parser alone, cut at every byte. Not connections (test_transport.py)."""

from __future__ import annotations

import pytest

from anabranch.sse import SSEDecoder

CASES = [
    (b"data: a\n\n", ["a"]),
    (b"data: a\r\n\r\n", ["a"]),
    (b"data: a\r\rdata: b\r\r", ["a", "b"]),
    (b"data:a\ndata: b\ndata:  c\n\n", ["a\nb\n c"]),
    (b": comment\n\ndata: a\n: more\n\n", ["a"]),
    (b"event: x\nid: 1\nretry: 5\ndata: a\n\n", ["a"]),
    (b"\n\n\ndata: a\n\n\n\n", ["a"]),
    (b"data\n\ndata:\n\ndata: a\n\n", ["a"]),
    ("\ufeffdata: é€😀\n\n".encode(), ["é€😀"]),
    (b"data: a\n\ndata: unfinished\n", ["a"]),
    (b"data: x: y\n\n", ["x: y"]),
    (b"data: \xff\n\n", ["\ufffd"]),
    (b"data: a\r\n\ndata: b\n\r\n", ["a", "b"]),
]


@pytest.mark.parametrize(("data", "payloads"), CASES)
def test_wherever_the_bytes_are_cut(data: bytes, payloads: list[str]):
    for size in range(1, len(data) + 1):
        decoder = SSEDecoder()
        got = [payload for i in range(0, len(data), size) for payload in decoder.feed(data[i : i + size])]
        assert got == payloads, size
    for cut in range(len(data)):
        decoder = SSEDecoder()
        assert decoder.feed(data[:cut]) + decoder.feed(data[cut:]) == payloads, cut


def test_a_long_line_in_many_pieces():
    decoder = SSEDecoder()
    assert decoder.feed(b"data: ") == []
    for _ in range(20_000):
        assert decoder.feed(b"x" * 50) == []
    assert decoder.feed(b"\n\n") == ["x" * 1_000_000]
