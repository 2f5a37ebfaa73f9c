"""HTTP status of an error, and its body in OpenAI's dialect, the default of all paths. Pure."""

from __future__ import annotations

from typing import Any

from ..errors import Code, GroupError, LinkError, MlxtpError, RequestError

Json = dict[str, Any]


def error_status(error: MlxtpError) -> int:
    """Return the HTTP status. A lost group is being formed again, so the client may retry."""
    if isinstance(error, RequestError):
        return error.status
    if error.code is Code.DEADLINE:
        return 504
    come_back = isinstance(error, GroupError | LinkError) or error.code in (
        Code.NOT_READY,
        Code.SHUTTING_DOWN,
    )
    return 503 if come_back else 500


def error_body(message: str, code: str, status: int, param: str | None = None, state: str = "") -> Json:
    """Return an error in OpenAI's shape."""
    kind = (
        "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    )
    more = {"state": state} if state else {}
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def error_body_of(error: MlxtpError) -> Json:
    param, state = (error.param, error.state) if isinstance(error, RequestError) else (None, "")
    return error_body(error.detail, error.code.value, error_status(error), param, state)


def internal_error() -> MlxtpError:
    """Return a client's error message for a bug."""
    return MlxtpError("internal error; the server's log has the details", Code.INTERNAL)
