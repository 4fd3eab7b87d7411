"""The errors that this package raises: one tree, one class per stable code of the wire contract.

It decides nothing: what is retried is `retry.py`'s business, and it does not know HTTP beyond status numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

from pydantic import ValidationError

from anabranch.wire import HTTP_STATUS, ErrorCode

NOT_ANABRANCH = (
    "the answer is not in anabranch's format: is base_url right, and was the server started by `anabranch serve`?"
)


class AnabranchError(Exception):
    """Base of all errors of this package.

    `code` is stable, `hint` is the next step, `param` names the argument at fault, `request_id` is the server's name
    for the request, `status` is the HTTP status (None: nothing was answered, or nothing was sent).
    """

    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.request_id = request_id
        self.status = status

    def __str__(self) -> str:
        details = {"param": self.param, "status": self.status, "request_id": self.request_id}
        known = ", ".join(f"{name}={value}" for name, value in details.items() if value is not None)
        lines = [f"[{self.code}] {self.message}" + (f" ({known})" if known else "")]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class ClientClosedError(AnabranchError):
    """The client was closed: nothing can be sent any more."""

    code = "client_closed"


class APIConnectionError(AnabranchError):
    """No complete answer: the server could not be reached, or the connection was lost.

    `sent` is True if the request may have reached the server, which then may have acted on it.
    """

    code = "connection"

    def __init__(self, message: str, *, sent: bool = True, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, hint=hint, status=status)
        self.sent = sent


class APITimeoutError(APIConnectionError):
    """The answer, or the next part of a stream, did not come in time."""

    code = "timeout"


class APIStatusError(AnabranchError):
    """The server refused or failed. Local checks raise the same classes before anything is sent (`status` is None).

    `retry_after`, in seconds, is what the server asked to wait, if it did.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param, request_id=request_id, status=status)
        self.retry_after = retry_after


class InvalidRequestError(APIStatusError):
    """The request makes no sense: a bad span, an unknown policy, no input, a foreign state."""

    code = "invalid_request"


class UnauthorizedError(APIStatusError):
    """The API key is missing or wrong (ANABRANCH_API_KEY)."""

    code = "unauthorized"


class StateNotFoundError(APIStatusError):
    """The server does not know the state: its lease ran out, or the server was restarted. `AsyncClient` can make lost
    states again (`on_lost`)."""

    code = "state_not_found"


class StateIncompatibleError(APIStatusError):
    """The state was computed under another model, weights version, dtype or adapter."""

    code = "state_incompatible"


class StateReleasedError(APIStatusError):
    """The state was released."""

    code = "state_released"


class ContextTooLongError(APIStatusError):
    """Visible and new tokens exceed the server's context."""

    code = "context_too_long"


class PositionOverflowError(APIStatusError):
    """A position would leave the model's range."""

    code = "position_overflow"


class UnsupportedModelFeatureError(APIStatusError):
    """The model has a feature that does not allow what was asked."""

    code = "unsupported_model_feature"


class RateLimitedError(APIStatusError):
    """Too many requests (`retry_after`, seconds)."""

    code = "rate_limited"


class PoolExhaustedError(APIStatusError):
    """The server's KV pool is full: release states, or try again (`retry_after`, seconds)."""

    code = "pool_exhausted"


class InternalError(APIStatusError):
    """The server failed, or answered something that is not the contract."""

    code = "internal"


BY_CODE: dict[ErrorCode, type[APIStatusError]] = {
    "invalid_request": InvalidRequestError,
    "unauthorized": UnauthorizedError,
    "state_not_found": StateNotFoundError,
    "state_incompatible": StateIncompatibleError,
    "state_released": StateReleasedError,
    "context_too_long": ContextTooLongError,
    "position_overflow": PositionOverflowError,
    "unsupported_model_feature": UnsupportedModelFeatureError,
    "rate_limited": RateLimitedError,
    "pool_exhausted": PoolExhaustedError,
    "internal": InternalError,
}


def from_body(body: object, *, request_id: str | None = None, retry_after: float | None = None) -> APIStatusError:
    """The error that the `error` object of a reply or of an SSE event describes, its status taken from the code."""
    return _from_fields(_mapping(body), None, request_id, retry_after)


def from_status(
    status: int, body: object, *, request_id: str | None = None, retry_after: float | None = None
) -> APIStatusError | APITimeoutError:
    """The error for a reply whose status is not 2xx. `body` is its parsed JSON, or its text if it is not JSON.

    Bodies that are not anabranch's (SGLang's own, a proxy's HTML) map by status alone: 401 and 403 unauthorized,
    408 timeout, 429 rate limited, other 4xx invalid request, everything else internal.
    """
    fields = _mapping(_mapping(body).get("error"))
    if isinstance(fields.get("code"), str) and "message" in fields:
        return _from_fields(fields, status, request_id, retry_after)
    message = f"HTTP {status}: {_foreign_message(body) or 'no message'}"
    if status == 408:
        return APITimeoutError(message, status=status)
    kind = _by_status(status)
    hint = "set api_key or ANABRANCH_API_KEY" if kind is UnauthorizedError else NOT_ANABRANCH
    return kind(message, hint=hint, request_id=request_id, status=status, retry_after=retry_after)


def invalid(error: ValidationError) -> InvalidRequestError:
    """A failed check of the wire contract, as the error that a user sees; nothing was sent."""
    first = error.errors(include_url=False, include_context=False)[0]
    # A union of models reports which member it tried: class names mean nothing to the user.
    path = [str(part) for part in first["loc"] if not (isinstance(part, str) and part[:1].isupper())]
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequestError(message, param=".".join(path) or None)


def _mapping(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _by_status(status: int) -> type[APIStatusError]:
    if status in (401, 403):
        return UnauthorizedError
    if status == 429:
        return RateLimitedError
    return InvalidRequestError if 400 <= status < 500 else InternalError


def _from_fields(
    fields: Mapping[str, object], status: int | None, request_id: str | None, retry_after: float | None
) -> APIStatusError:
    def text(name: str) -> str | None:
        value = fields.get(name)
        return None if value is None else str(value)

    code = text("code")
    known = code if code in BY_CODE else None
    if status is None:
        status = HTTP_STATUS[known or "internal"]
    message = text("message") or "the server gave no message"
    if known is None and code is not None:
        message = f"{message} (code {code}, unknown to this version)"
    return (BY_CODE[known] if known else _by_status(status))(
        message,
        hint=text("hint"),
        param=text("param"),
        request_id=text("request_id") or request_id,
        status=status,
        retry_after=retry_after,
    )


def _foreign_message(body: object) -> str:
    """What a body that is not anabranch's says, cut to one readable line."""
    found = body
    for key in ("error", "message", "detail"):
        found = _mapping(found).get(key, found)
    text = " ".join(str(found).split()) if found is not None else ""
    return text if len(text) <= 200 else text[:199] + "…"
