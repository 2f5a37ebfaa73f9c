"""Request bodies: read within limits, counted until their prompts are tokens, and validated (pure)."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.requests import Request

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from ..errors import Code, RequestError
from ..text.json_limits import SHORT, check_extent, integral
from ..text.renderer import WorkerQueue
from ..text.tool_grammar import log_once
from . import field_names
from .backend import Backend
from .request_context import current

# --- validation -------------------------------------------------------------------------------------------


_SHOWN = 80  # characters of a refused value in the error message
#: pydantic's names of a union's branches, which are not fields
_UNION_BRANCHES = ("str", "int", "float", "bool", "list[", "dict[", "tuple[", "function-", "constrained-")

_HALF = re.compile("[\ud800-\udfff]")


def _failing_fast(schema: CoreSchema) -> CoreSchema:
    """Stop each list and object at its first error: a million errors take 1 GB, and only one is reported."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if not part.keys().isdisjoint(("items_schema", "values_schema")):
                part["fail_fast"] = True
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
    return schema


class Schema(BaseModel):
    """A part of a body. None means absent, everywhere. Only a `BodySchema` tells of unknown fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _failing_fast(handler(source))


def _means(value: object) -> bool | None:
    return None if value is None else bool(value)


class BodySchema(Schema):
    """A body, or a part with rules of its own, whose other fields `field_names` settles for its `api`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, PlainValidator(_means)]] = Field(init=False)
    api: ClassVar[str] = ""

    @model_validator(mode="after")
    def _settle(self) -> Self:
        for name in self.ignored:
            log_once(f"ignoring {shown(name)} in {self.api}: {field_names.reason(self.api, name)}")
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """The first names of ignored fields. Raises RequestError for a field that is refused."""
        if not self.api:
            return ()
        own = {name for name in self.model_fields_set if getattr(self, name) is not None}
        vain = {name: True for name in sorted(own) if field_names.in_vain(self.api, name)}
        return field_names.ignored(self.api, vain | self.__pydantic_extra__)


S = TypeVar("S", bound=Schema)


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    also: tuple[float, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        found = handler(core) | {"minimum": self.low, "maximum": self.high}
        return {"anyOf": [found, {"enum": list(self.also)}]} if self.also else found

    def _check(self, value: float) -> float:
        if not (self.low <= value <= self.high or value in self.also):
            others = "".join(f", or {each}" for each in self.also)
            raise PydanticCustomError("range", f"should be from {self.low} to {self.high}{others}")
        return value


def in_range(low: float, high: float, *also: float) -> _Range:
    """Constrain a number in `Annotated` to `low` to `high`, or one of `also`; NaN is outside."""
    return _Range(low, high, also)


def named(*names: str) -> Any:
    """Return, for `Annotated`, the names of a field; the first that a body has counts."""
    return Field(validation_alias=AliasChoices(*names))


Integer = Annotated[int, BeforeValidator(integral)]
MOST_TOKENS = 2**31 - 1


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
        return missing(param)
    if not param:
        return RequestError(f"the body must be a JSON object, got {shown(first['input'])}")
    if first["type"] == "too_short" and not first["input"]:
        return RequestError(f"{param} is empty", param=param)
    what = first["msg"].removeprefix("Input ").removeprefix("List ")
    return RequestError(f"{param} {what}, got {shown(first['input'])}", param=param)


def _unreadable(body: bytes, words: str) -> RequestError:
    """Return the error for a body that the parser refuses, such as for half a character ("\\ud83d")."""
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
    """Return place and escape of the first lone surrogate. In a field's name, the place is empty."""
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
    value = value[:_SHOWN] if isinstance(value, list) else value  # an element has a character at least
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def not_supported(detail: str, param: str) -> RequestError:
    return RequestError(detail, Code.NOT_SUPPORTED, param=param)


def wrong(where: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{where}: expected {expected}, got {shown(value)}", param=where)


def missing(where: str) -> RequestError:
    return RequestError(f"{where} is missing", param=where)


def none_of(value: str, allowed: Iterable[str], where: str) -> RequestError:
    return RequestError(f"{where}: {shown(value)} is none of {', '.join(allowed)}", param=where)


def check_finite(value: object, where: str) -> None:
    """Refuse a value that is not JSON, such as NaN. Raises RequestError."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise RequestError(f"{where}: NaN and Infinity are not valid in JSON", param=where) from None


# --- limits -----------------------------------------------------------------------------------------------


T = TypeVar("T")

MAX_BODY_BYTES = 16 * 1024 * 1024
MOST_MESSAGES = 10_000  #: of one request; conversations of agents have hundreds
BODY_S = 60.0
#: Bytes of all bodies, of the text in them, and of vectors to be read. The first 64 KiB of each do not count.
MAX_BODIES_BYTES = 96 * 1024 * 1024
SHARE = 7 / 8  # most that one client's bodies may take of the room left by other clients
#: Bytes a second. A slower body is dropped when another one needs its room.
LEAST_RATE = 64 * 1024
RATE_S = 2.0  # longest silence, in seconds, before a body counts as slow
MAX_WINDOW = 23  # log2 of the bytes that zstd may look back, as RFC 9659 bounds them for HTTP
WIDE = 4  # most bytes that Python needs for a character of a text that is not ASCII


class Body:
    """The body of one request. It and its text take room until released."""

    def __init__(self, bodies: Bodies) -> None:
        self.size = 0  # bytes
        self._bodies = bodies
        account = current()
        self._client = account.key_hash or account.origin if account is not None else ""
        self._taken = 0
        self._parts: list[bytes] = []
        self._data = b""
        self._slow_at = time.monotonic() + RATE_S  # counts as slow from then on, unless data arrive before
        self.late: RequestError | None = None  # the reason, if it gave way because it was slow

    async def parsed(self, parse: Callable[[bytes], T], *, slow: bool = False) -> T:
        """Return the result of `parse` for the body, once. `slow`: even a short body may take long."""
        data, self._data = self._data, b""
        if not slow and self.size <= SHORT:
            return parse(data)
        return await self._bodies.parsing.run(partial(parse, data), self._client)

    def release(self) -> None:
        """Give the room back. May be repeated."""
        self._hold(-self._taken)

    def hold(self, size: int) -> None:
        """Take room for `size` bytes of an answer, until released. Raises RequestError 503."""
        if not self._has_room(more := max(size - SHORT, 0)):
            words = "the bodies and answers of other requests leave no room; retry later"
            raise RequestError(words, Code.OVERLOADED, status=503)
        self._hold(more)

    def _hold(self, more: int) -> None:
        self._taken += more
        self._bodies.room -= more
        held = self._bodies.held
        held[self._client] += more
        if not held[self._client]:
            del held[self._client]  # else clients that are gone would take memory

    def _has_room(self, more: int, leaving: Iterable[Body] = ()) -> bool:
        """Return True if `more` bytes fit once some bodies are gone."""
        gone = [(each._taken, each._client == self._client) for each in leaving]
        room = self._bodies.room + sum(size for size, _ in gone)
        held = self._bodies.held[self._client] - sum(size for size, own in gone if own)
        return more <= min(room, (room + held) * SHARE - held)

    def _take(self, size: int) -> bool:
        """Take room for `size` bytes in all; False where there is too little.

        Slow bodies give way first, then the latest to begin: otherwise many at once would all be refused.
        """
        bodies, more = self._bodies, max(size - SHORT - self._taken, 0)
        if self not in bodies.coming:
            return False
        if not self._has_room(more):
            self._make_room(more)
        if self in bodies.coming:
            self._hold(more)
        return self in bodies.coming

    def _make_room(self, more: int) -> None:
        coming, now = self._bodies.coming, time.monotonic()
        slow = [each for each in coming if each._taken and each is not self and each._slow_at < now]
        while not self._has_room(more) and slow:
            given_up = slow.pop(0)
            given_up._give_way()
            words = f"the body arrived at less than {LEAST_RATE} bytes a second while others waited"
            given_up.late = RequestError(words, status=408)
        later = [each for each in coming[coming.index(self) + 1 :] if each._taken]
        if not self._has_room(more, later):
            later = [self]
        while not self._has_room(more) and later:
            later.pop()._give_way()

    def _give_way(self) -> None:
        self._bodies.coming.remove(self)
        self._parts.clear()
        self.release()

    async def read(self, request: Request, limit: int) -> None:
        """Read the body. Raises RequestError: 413 if it is too large, 503 if there is no room.

        Reads and discards up to 4 times the limit, since a client sees no reply while it is sending.
        """
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() else 0
        refused = self._bodies.backend.shortage() if size > SHORT else None
        if size <= 4 * limit:
            size = 0
            async for part in request.stream():
                size += len(part)
                self._slow_at = min(self._slow_at + len(part) / LEAST_RATE, time.monotonic() + RATE_S)
                if refused is None and size <= limit and self._take(size):
                    self._parts.append(part)
                else:
                    self._parts.clear()
                if size > 4 * limit:
                    break
        if size > limit:
            raise RequestError(f"the body is larger than {limit} bytes", status=413)
        data = b"".join(self._parts)
        self._parts.clear()
        if refused is None and (encoding := request.headers.get("content-encoding", "").lower()):
            data = decoded(data, encoding, limit)
        self.size = size = max(size, len(data))
        self._data = data
        plain = self._data.isascii() and b"\\u" not in self._data
        if refused is None and not self._take(size if plain else WIDE * size):
            refused = self.late or RequestError(
                "the bodies of other requests leave no room; retry later", Code.OVERLOADED, status=503
            )
        if refused is not None:
            raise refused


def decoded(data: bytes, encoding: str, limit: int) -> bytes:
    """Return a compressed body. Raises RequestError: 415 for another encoding, 413 for more than `limit`."""
    if encoding == "identity":
        return data
    if encoding not in ("gzip", "x-gzip", "deflate", "zstd"):
        words = f"content-encoding {shown(encoding)} is not read; send plain JSON, or gzip, deflate or zstd"
        raise RequestError(words, Code.NOT_SUPPORTED, status=415)
    window: dict[int, int] = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW}
    # zlib knows gzip and deflate by their first bytes
    stream = (
        zstd.ZstdDecompressor(options=window)
        if encoding == "zstd"
        else zlib.decompressobj(32 + zlib.MAX_WBITS)
    )
    try:
        found = stream.decompress(data, limit + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise RequestError(f"the body is not {encoding}, as its content-encoding says: {error}") from None
    if len(found) > limit:
        raise RequestError(f"the body is larger than {limit} bytes", status=413)
    if not stream.eof:
        raise RequestError(f"the body ends in the middle of its {encoding} stream")
    if stream.unused_data:
        raise RequestError(f"the body has {len(stream.unused_data)} bytes more after its {encoding} stream")
    return found


class Bodies:
    """The room for all bodies. `limit`: the most bytes of one, `body_s`: the time to send it."""

    def __init__(self, backend: Backend, limit: int, body_s: float) -> None:
        self.room = MAX_BODIES_BYTES  # bytes
        self.held: Counter[str] = Counter()  # bytes of each client
        self.coming: list[Body] = []  # bodies with room that are still being read, oldest first
        #: Slow parsing, one body at a time, so that it does not take all threads.
        self.parsing = WorkerQueue("other bodies kept the parser busy")
        self.backend = backend
        self._limit = limit
        self.body_s = body_s

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Yield the whole body of a request. Raises RequestError 408, 413 or 503."""
        body = Body(self)
        self.coming.append(body)
        try:
            try:
                async with asyncio.timeout(self.body_s):
                    await body.read(request, self._limit)
            except TimeoutError:
                words = f"the body was not complete within {self.body_s:g} s"
                raise body.late or RequestError(words, status=408) from None
            finally:
                with suppress(ValueError):  # it gave way
                    self.coming.remove(body)
            yield body
        finally:
            body.release()
