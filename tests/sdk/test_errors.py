"""How answers become errors: ours by code, all others by status. Not when (test_transport.py)."""

from __future__ import annotations

import pickle

import pytest

import anabranch
from anabranch import errors
from anabranch.errors import BY_CODE, from_body, from_status
from anabranch.wire import HTTP_STATUS


def test_one_class_per_code():
    assert set(BY_CODE) == set(HTTP_STATUS)
    assert all(kind.code == code and issubclass(kind, errors.APIStatusError) for code, kind in BY_CODE.items())
    assert all(kind.__name__ in anabranch.__all__ for kind in BY_CODE.values())
    assert issubclass(errors.APITimeoutError, errors.APIConnectionError)
    assert not issubclass(errors.APIConnectionError, errors.APIStatusError)


@pytest.mark.parametrize("code", HTTP_STATUS)
def test_our_own_errors(code: str):
    body = {"error": {"code": code, "message": "m", "hint": "h", "param": "p", "request_id": "r"}}
    error = from_status(HTTP_STATUS[code], body, request_id="header", retry_after=2)  # type: ignore[index]
    assert type(error) is BY_CODE[code]  # type: ignore[index]
    assert (error.message, error.hint, error.param, error.request_id) == ("m", "h", "p", "r")
    assert (error.code, error.status) == (code, HTTP_STATUS[code])  # type: ignore[index]
    assert from_body(body["error"]).status == error.status


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (401, {"error": "Unauthorized"}, errors.UnauthorizedError, "Unauthorized"),
        (403, "", errors.UnauthorizedError, "no message"),
        (404, {"detail": "Not Found"}, errors.InvalidRequestError, "Not Found"),
        (404, "404 page not found", errors.InvalidRequestError, "404 page not found"),
        (400, {"error": {"message": "bad", "type": "BadRequest", "code": 400}}, errors.InvalidRequestError, "bad"),
        (400, {"object": "error", "message": "old form"}, errors.InvalidRequestError, "old form"),
        (422, {"detail": [{"msg": "field required"}]}, errors.InvalidRequestError, "field required"),
        (429, "slow down", errors.RateLimitedError, "slow down"),
        (500, "Internal Server Error", errors.InternalError, "Internal Server Error"),
        (502, "<html>\n<h1>Bad Gateway</h1></html>", errors.InternalError, "<html> <h1>Bad Gateway</h1></html>"),
        (503, None, errors.InternalError, "no message"),
        (504, [1], errors.InternalError, "[1]"),
        (418, {"error": None}, errors.InvalidRequestError, "HTTP 418"),
        (408, "late", errors.APITimeoutError, "late"),
        (302, "", errors.InternalError, "HTTP 302"),
        (409, {"error": {"code": "brand_new", "message": "m"}}, errors.InvalidRequestError, "code brand_new"),
        (500, "x" * 10_000, errors.InternalError, "xxx…"),
    ],
)
def test_errors_of_others(status: int, body: object, kind: type[Exception], message: str):
    error = from_status(status, body)
    assert type(error) is kind and message in error.message and error.status == status and len(error.message) < 300


def test_hints():
    assert "ANABRANCH_API_KEY" in str(from_status(401, {"error": "Unauthorized"}))
    assert "anabranch serve" in str(from_status(404, "nope"))


def test_a_body_that_says_nothing():
    for body in (None, "text", {}, {"code": 3}):
        assert isinstance(from_body(body), errors.InternalError)


def test_errors_survive_pickling():
    """Process pools send exceptions by pickle."""
    error = errors.PoolExhaustedError("full", hint="h", retry_after=2, status=503)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and vars(again) == vars(error) and str(again) == str(error)
    lost = pickle.loads(pickle.dumps(errors.APIConnectionError("lost", sent=False)))
    assert lost.sent is False


def test_local_errors_need_no_answer():
    error = errors.InvalidRequestError("no", param="span", hint="yes")
    assert (error.code, error.status, error.request_id) == ("invalid_request", None, None)
    assert str(error) == "[invalid_request] no (param=span)\nhint: yes"
