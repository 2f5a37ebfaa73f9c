"""Limits on the size of a JSON text, counted without parsing it, because parsing blocks all else. Pure.

16 MiB of empty objects take many seconds; text within these limits takes half a second on a small server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ..errors import RequestError

SHORT = 64 * 1024  #: bytes or characters of a text that takes no time
MOST_CONTAINERS = 100_000
MOST_FIELDS = 250_000
MOST_VALUES = 2**20  #: room for a prompt of a million token ids, and the fields around it
_BOUNDS = (
    (b"{[", MOST_CONTAINERS, "objects and lists"),
    (b":", MOST_FIELDS, "fields"),
    (b",", MOST_VALUES, "values"),
)
_PIECE = 64 * 1024  #: bytes; other threads may run between pieces
_OTHERS = bytes(set(range(256)) - set(b'"{[:,'))
_STRING = re.compile(rb'"[^"]*"')


def check_extent(*texts: bytes | str, where: str = "the body", param: str | None = None) -> None:
    """Raise RequestError with the count if the texts together have too many parts to parse."""
    if sum(map(len, texts)) <= SHORT:
        return
    encoded = [each.encode(errors="surrogatepass") if isinstance(each, str) else each for each in texts]
    if all(_count(encoded, signs) <= most for signs, most, _ in _BOUNDS):  # counts signs in strings too
        return
    found = [0] * len(_BOUNDS)
    for piece in chain.from_iterable(map(_outside_strings, encoded)):
        for i, (signs, most, what) in enumerate(_BOUNDS):
            found[i] += _count([piece], signs)
            if found[i] > most:
                raise RequestError(f"{where} has at least {found[i]} {what}; at most {most}", param=param)


def parsed(text: str, otherwise: object = None) -> Any:
    """Parse JSON; return `otherwise` if the text is not JSON or too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def integral(value: Any) -> Any:
    """Convert a whole float to int, since JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _outside_strings(text: bytes) -> Iterator[bytes]:
    in_string = cut_escape = False
    for at in range(0, len(text), _PIECE):
        piece = text[at + cut_escape : at + _PIECE].replace(b"\\\\", b"")
        cut_escape = piece.endswith(b"\\")
        piece = piece.replace(b'\\"', b"").translate(None, _OTHERS)
        piece = _STRING.sub(b"", b'"' + piece if in_string else piece)
        piece, quote, _ = piece.partition(b'"')
        in_string = bool(quote)
        yield piece


def _count(texts: Iterable[bytes], signs: bytes) -> int:
    return sum(text.count(sign) for text in texts for sign in signs)
