"""Validation of the bodies of all dialects, and names of fields in refusals. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ..errors import Code, RequestError
from ..text.json_limits import check_extent

_SHOWN = 80  # characters of a refused value in the error message
#: pydantic's names of a union's branches, which are not fields
_UNION_BRANCHES = ("str", "int", "float", "bool", "list[", "dict[", "tuple[", "function-", "constrained-")

_HALF = re.compile("[\ud800-\udfff]")


class Schema(BaseModel):
    """A part of a body. Unknown fields are ignored; None means absent, everywhere."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


S = TypeVar("S", bound=Schema)


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return handler(core) | {"minimum": self.low, "maximum": self.high}

    def _check(self, value: float) -> float:
        if not self.low <= value <= self.high:
            raise PydanticCustomError("range", f"should be from {self.low} to {self.high}")
        return value


def in_range(low: float, high: float) -> _Range:
    """Constrain a number in `Annotated` to `low` to `high`; NaN is outside."""
    return _Range(low, high)


def parsed(schema: type[S], body: bytes) -> S:
    """Return the checked body. Raises RequestError that names the field, the reason and the value."""
    check_extent(body)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None


def checked(schema: type[S], value: object, where: str) -> S:
    """Return a part of a body, checked; `where` is its place. Raises RequestError as `parsed` does."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        if not error.errors(include_url=False, include_input=False)[0]["loc"]:
            raise wrong(where, "an object", value) from None
        raise refusal(error, where) from None


def refusal(error: ValidationError, where: str = "") -> RequestError:
    """Return the first error, with the field in the client's notation."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return _unreadable(first["input"], first["msg"].removeprefix("Invalid JSON: "))
    param = field_path((where, *first["loc"]) if where else first["loc"])
    if first["type"] == "missing":
        return RequestError(f"{param} is missing", param=param)
    if not param:
        return RequestError(f"the body must be a JSON object, got {shown(first['input'])}")
    if first["type"] == "too_short" and not first["input"]:
        return RequestError(f"{param} is empty", param=param)
    what = first["msg"].removeprefix("Input ").removeprefix("List ")
    return RequestError(f"{param} {what}, got {shown(first['input'])}", param=param)


def _unreadable(body: bytes, words: str) -> RequestError:
    """Return the error of a body that the parser refuses in `words`.

    JSON may have half a character, such as "\\ud83d", which is not text.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return RequestError(f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}")
    with suppress(ValueError, RecursionError):
        if (found := _half_character(json.loads(text))) is not None:
            where, half = found
            what = f"half a character, {half}, which is no text; send both halves, or leave it out"
            return RequestError(f"{where or 'the name of a field'} has {what}", param=where or None)
    return RequestError(f"the body is not valid JSON: {words}")


def _half_character(value: object, path: tuple[int | str, ...] = ()) -> tuple[str, str] | None:
    """Return the place and the escape of the first lone surrogate. The place is empty for one in a name."""
    found: tuple[str, str] | None = None
    parts: Iterable[tuple[int | str, object]] = ()
    if isinstance(value, str):
        if half := _HALF.search(value):
            found = field_path(path), ascii(half[0])[1:-1]
    elif isinstance(value, dict):
        found, parts = _half_character("".join(value)), value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    return found or next(filter(None, (_half_character(part, (*path, key)) for key, part in parts)), None)


def field_path(location: tuple[int | str, ...]) -> str:
    """Return a field in the client's notation: `messages[2].content`."""
    fields = [
        part
        for part in location
        if isinstance(part, int) or not (part in _UNION_BRANCHES or part.startswith(_UNION_BRANCHES[4:]))
    ]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fields).removeprefix(".")


def shown(value: object) -> str:
    """Return a refused value as text for the client."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def not_supported(detail: str, param: str) -> RequestError:
    """Return the error for a field that is understood but not supported."""
    return RequestError(detail, Code.NOT_SUPPORTED, param=param)


def wrong(where: str, expected: str, value: object) -> RequestError:
    """Return the error for a value of the wrong kind."""
    return RequestError(f"{where}: expected {expected}, got {shown(value)}", param=where)


def check_finite(value: object, where: str) -> None:
    """Refuse a value that is not JSON, such as NaN. Raises RequestError."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise RequestError(f"{where}: NaN and Infinity are not valid in JSON", param=where) from None
