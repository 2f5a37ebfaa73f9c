"""Errors in the words of a dialect. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import MlxtpError, RequestError


def in_words_of(names: Mapping[str, str], error: MlxtpError) -> MlxtpError:
    """The same error, with the fields called as a dialect calls them."""
    if not names or not isinstance(error, RequestError) or not error.param:
        return error  # it is about no field: what it says of a stop is no field of that name
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    detail = pattern.sub(lambda found: names[found[1]], error.detail)
    param = pattern.sub(lambda found: names[found[1]], error.param)
    return RequestError(detail, error.code, status=error.status, param=param)
