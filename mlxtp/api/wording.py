"""Errors in the words of a dialect. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import MlxtpError, RequestError


def in_words_of(names: Mapping[str, str], error: MlxtpError) -> MlxtpError:
    """The same error, with the field that it is about called as a dialect calls it.

    That field is `param`, and the text may begin with it. What else the text says may be the client's own
    words, and stays as it is.
    """
    if not names or not isinstance(error, RequestError) or not error.param:
        return error
    param, detail = _renamed(names, error.param), error.detail
    if re.match(rf"{re.escape(error.param)}(?!\w)", detail):
        detail = param + detail[len(error.param) :]
    return RequestError(detail, error.code, status=error.status, param=param)


def _renamed(names: Mapping[str, str], path: str) -> str:
    """A field as the core writes it: `stop`, `response_format.pattern`, `tools[0].function.name`."""
    known = "|".join(map(re.escape, names))
    return re.sub(
        rf"^(tools\[\d+\]\.)?({known})(?!\w)", lambda found: (found[1] or "") + names[found[2]], path
    )
