"""Errors with a dialect's names of fields. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import MlxtpError, RequestError
from .budget import TooLong

if TYPE_CHECKING:
    from .adapter import Dialect


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
