"""HTTP status of an error, its body, and its wording in a dialect's names of fields. Pure.

The body is that of OpenAI's dialect, the default of all paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import Code, GroupError, LinkError, MlxtpError, RequestError
from .adapter import Dialect, Json
from .catalog import TooLong


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


# --- names of fields --------------------------------------------------------------------------------------


def in_words_of(dialect: Dialect, error: MlxtpError) -> MlxtpError:
    """Return the same error, with its field under the dialect's name.

    That field is `param`, and the text may begin with it. The rest of the text may quote the client and stays
    unchanged.
    """
    names = dialect.names
    if isinstance(error, TooLong):
        detail = dialect.too_long.format(tokens=error.counted, most=error.most)
        return RequestError(detail, error.code, param=names.get("messages", "messages"))
    if not names or not isinstance(error, RequestError) or not error.param:
        return error
    param, detail = _renamed(names, error.param), error.detail
    if re.match(rf"{re.escape(error.param)}(?!\w)", detail):
        detail = param + detail[len(error.param) :]
    return RequestError(detail, error.code, status=error.status, param=param, state=error.state)


def _renamed(names: Mapping[str, str], path: str) -> str:
    """Rename a field in the core's notation: `stop`, `response_format.pattern`, `tools[0].function.name`."""
    known = "|".join(map(re.escape, names))
    return re.sub(
        rf"^(tools\[\d+\]\.)?({known})(?!\w)", lambda found: (found[1] or "") + names[found[2]], path
    )
