"""Refusal: the one exception by which the server turns a request down before it runs.

It is not an HTTP response; `engine/routes.py` makes one of it, from the table of codes in the wire contract.
"""

from __future__ import annotations

from pydantic import ValidationError

from anabranch.wire import HTTP_STATUS, ErrorBody, ErrorCode


class Refusal(Exception):
    """A request that will not run. `code` is stable, `hint` is the next step, `param` names the field at fault."""

    def __init__(self, code: ErrorCode, message: str, *, hint: str | None = None, param: str | None = None):
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.hint = hint
        self.param = param

    @classmethod
    def of(cls, body: ErrorBody) -> Refusal:
        """The refusal that another process had put into a body."""
        return cls(body.code, body.message, hint=body.hint, param=body.param)

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]

    def body(self, request_id: str | None = None) -> ErrorBody:
        return ErrorBody(code=self.code, message=self.message, hint=self.hint, param=self.param, request_id=request_id)


def no_states() -> Refusal:
    """The refusal of a server that runs without our cache backend."""
    return Refusal("invalid_request", "this server holds no states", hint="start it with `anabranch serve`")


class StateRunning(Exception):
    """A referenced state is accepted but not sealed yet: the request waits for it. Never leaves the server."""

    def __init__(self, state_id: str):
        super().__init__(state_id)
        self.state_id = state_id


def invalid(error: ValidationError, prefix: str = "") -> Refusal:
    """The first fault that pydantic found, as a refusal that names the field."""
    fault = error.errors(include_url=False, include_input=False)[0]
    # Members of a union and of a tuple are named by type; only names and indices lead a person to the field.
    path = [str(step) for step in fault["loc"] if isinstance(step, int) or str(step).isidentifier()]
    message = fault["msg"].removeprefix("Value error, ")
    param = ".".join(filter(None, [prefix, *path])) or None
    return Refusal("invalid_request", f"{param}: {message}" if param else message, param=param)
