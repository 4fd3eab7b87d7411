"""Hostile requests written by hand: what a generator that follows a description does not think of."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from anabranch_server.openapi import PREFIX, description
from tests.engine.api import PATH, body, error, inherit, new_id, send
from tests.hostile import judging
from tests.serving import Served

pytestmark = pytest.mark.engine

HUGE = 9 * 2**20
FIELDS = ["id", "refs", "input", "place", "rules", "keep", "keep_partial", "lease", "sampling", "stream", "again"]
VALUES = [
    *("null", "true", "0", "-1", "1e400", "-1e400", "NaN", "Infinity", "9" * 400, "0.1e-999", '""', '"\\u0000"'),
    *('"\\ud800"', '"\\udc00\\ud800"', "[]", "[[]]", "{}", '{"":{}}', "[null]", '[{"kind": "inherit"}]', '"__proto__"'),
]
BODIES = [
    *(b"", b" ", b"\n" * 1000, b"{", b"}", b"[1,", b"nul", b"'x'", b"\x00", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}"),
    *(b"{}" * 2, b'{"id": "a", "id": "b"}', b'{"a": 1}', b"[" * 100_000, b'{"a":' * 50_000, b'"' + b"x" * 100_000),
    *(b"[" * 100_000 + b"]" * 100_000, b"-", b"1e", b"--PDF", b"<xml/>", b"a=b&c=d", b'{"id": "\xc3\x28"}'),
]
NAMES = [
    *("..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "%", "%zz", "'", "%22", "%27%20OR%201=1", "a%0d%0aX-Y:%20z"),
    *("%F0%9F%A6%86", "%ED%A0%80", "%C0%AF", "a" * 32, "A" * 32, "0" * 33, "%61" * 32, "*", "{state_id}", "x" * 8000),
    *("a%3Fb", "a;b", "a%23b", "\u0661" * 32),
]
POSTS = [path for path, methods in description()["paths"].items() if "post" in methods]


def concrete(path: str) -> str:
    return path.replace("{state_id}", "a" * 32)


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_requests(besieged: Served, path: str):
    for text in BODIES:
        if path.endswith("/cancel") or (path.endswith("}/renew") and not text):
            continue
        answer = httpx.post(besieged.url + concrete(path), content=text, timeout=judging.DEADLINE)
        judging.ours(answer, "post", path)
        assert answer.status_code == 400, (text[:50], answer.text)


def test_values_that_do_not_belong(besieged: Served):
    """Each field with each value, and each field twice."""
    with httpx.Client(base_url=besieged.url, timeout=judging.DEADLINE) as client:
        for field in FIELDS:
            for value in VALUES:
                parts = {"id": f'"{new_id()}"', "input": '[{"text": "x"}]', "sampling": '{"max_tokens": 1}'}
                text = ", ".join(f'"{name}": {one}' for name, one in (parts | {field: value}).items())
                judging.ours(client.post(PATH, content=f"{{{text}}}"), "post", PATH)
                judging.ours(client.post(PATH, content=f'{{{text}, "{field}": {value}}}'), "post", PATH)


KINDS = ["text/plain", "application/xml", "multipart/form-data", "application/json; charset=utf-16", "", "x" * 999]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[:32])
@pytest.mark.parametrize("encoding", [None, "gzip", "utf-7", "identity"])
def test_wrong_content_types(besieged: Served, kind: str, encoding: str | None):
    headers = {"content-type": kind} | ({"content-encoding": encoding} if encoding else {})
    text = json.dumps(body(text="x"))
    judging.ours(httpx.post(besieged.url + PATH, content=text, headers=headers), "post", PATH)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:24].encode("unicode_escape").decode())
def test_ids_in_paths(besieged: Served, name: str):
    for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/renew"), ("POST", "/cancel")):
        answer = httpx.request(method, f"{besieged.url}{PREFIX}/states/{name}{suffix}", timeout=judging.DEADLINE)
        judging.ours(answer)
        assert answer.status_code in (400, 404, 405), answer.text


@pytest.mark.parametrize("path", [*description()["paths"]])
def test_wrong_methods(besieged: Served, path: str):
    """Nothing is described for these: which status is the contract's business, but the body is its error."""
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"):
        if method.lower() in description()["paths"][path]:
            continue
        answer = httpx.request(method, besieged.url + concrete(path), timeout=judging.DEADLINE)
        assert 400 <= answer.status_code < 500, answer
        if method != "HEAD":
            judging.ours(answer)


@pytest.mark.parametrize("path", ["", "/", "/nothing", "/generate/", "/states/", "/states//renew", "/v1/generate"])
def test_paths_that_are_not_there(besieged: Served, path: str):
    answer = httpx.get(besieged.url + PREFIX + path, timeout=judging.DEADLINE)
    assert answer.status_code in (400, 404), answer
    judging.ours(answer)


def test_bodies_over_the_limit(besieged: Served):
    for path in POSTS:
        if path.endswith("/cancel"):
            continue
        answer = httpx.post(besieged.url + concrete(path), content=b"[" + b" " * HUGE, timeout=judging.DEADLINE)
        judging.ours(answer, "post", path)
        assert answer.status_code == 413
    answer = send(besieged, **body(text="x" * HUGE))
    assert error(answer).code == "context_too_long"


def test_thousands_of_references(besieged: Served):
    root = send(besieged, **body(text="r")).json()["id"]
    for count in (1024, 1025, 100_000):
        answer = send(besieged, **body([inherit(root)] * count, "x", 1))
        judging.ours(answer, "post", PATH)
        assert answer.status_code == (200 if count <= 1024 else 400), answer.text
    answer = send(besieged, **body([inherit(new_id()) for _ in range(1024)], "x", 1))
    assert error(answer).code == "state_not_found"
    judging.ours(besieged.post(f"{PREFIX}/states/renew", ids=["a" * 32] * 4096), "post", f"{PREFIX}/states/renew")
    judging.ours(besieged.post(f"{PREFIX}/states/release", ids=[root] * 4097), "post", f"{PREFIX}/states/release")
    judging.ours(besieged.post(f"{PREFIX}/states/release", ids=[root] * 4096), "post", f"{PREFIX}/states/release")


def test_cycles_of_waiting_requests(besieged: Served):
    """Each of three names the next; whoever comes first is refused, and so is everybody after."""
    with ThreadPoolExecutor(12) as pool:
        for _ in range(20):
            ring = [body(text="x", n=30) for _ in range(3)]
            for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
                one["refs"] = [inherit(other["id"])]
            for answer in pool.map(lambda one: send(besieged, **one), ring * 2):
                judging.ours(answer, "post", PATH)
                assert answer.status_code in (400, 404, 410), answer.text


def test_a_chain_of_waiting_requests_whose_head_is_cancelled(besieged: Served):
    chain = [body(text="x", n=120)]
    for _ in range(30):
        chain.append(body([inherit(chain[-1]["id"])], "y", 1))
    with ThreadPoolExecutor(len(chain)) as pool:
        answers = []
        for one in chain:
            answers.append(pool.submit(send, besieged, **one))
            while besieged.get(f"{PREFIX}/states/{one['id']}").status_code != 200 and not answers[-1].done():
                pass
        besieged.post(f"{PREFIX}/states/{chain[0]['id']}/cancel")
        for one in answers:
            judging.ours(one.result(), "post", PATH)


GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(a+)+$"},
    {"regex": "("},
    {"regex": "[z-a]"},
    {"regex": "\x00"},
    {"regex": "(?=a)b"},
    {"regex": "(a)\\1"},
    {"regex": "("},
    {"regex": "(" * 2000 + "a" + ")" * 2000},
    {"json_schema": "{"},
    {"json_schema": "false"},
    {"json_schema": "[" * 100_000},
    {"json_schema": '{"items":' * 300 + "{}" + "}" * 300},
    {"json_schema": '{"$ref": "#"}'},
    {"json_schema": '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'},
    {"json_schema": '{"$ref": "file:///etc/passwd"}'},
    {"json_schema": '{"type": "nothing"}'},
    {"ebnf": "root ::= root"},
    {"ebnf": "root ::="},
    {"regex": "a", "ebnf": "b"},
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: str(grammar)[:50])
def test_grammars_that_are_none_or_never_end(besieged: Served, grammar: dict[str, Any]):
    asked = body(text="x", n=4, sampling=grammar)
    answer = httpx.post(besieged.url + PATH, json=asked, timeout=judging.DEADLINE)
    judging.ours(answer, "post", PATH)
