"""Codecs that pack, check and unpack message fields, and the base of all messages."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

_FEW = 65  # formats of fewer integers are kept
Wire = Any  #: values that msgpack packs: int, str, bytes, bool, float, list, dict


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """Codec of one field. `from_wire` raises a ValueError that describes the expected value."""

    to_wire: Callable[[Any], Wire]
    from_wire: Callable[[Wire], Any]


def _same(value: Any) -> Any:
    return value


def integer(low: int, high: int) -> FieldCodec:
    def check(value: Wire) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return FieldCodec(_same, check)


def number(low: float, high: float) -> FieldCodec:
    def check(value: Wire) -> float:
        # NaN fails both comparisons.
        if type(value) is not float or not low <= value <= high:
            raise ValueError(f"a number from {low} to {high}")
        return value

    return FieldCodec(float, check)


def boolean() -> FieldCodec:
    def check(value: Wire) -> bool:
        if type(value) is not bool:
            raise ValueError("true or false")
        return value

    return FieldCodec(_same, check)


def printable(text: str) -> str:
    """Return the text for a terminal or a log: on one line, without control or bidi characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def text(max_chars: int, *, cut: bool = False, raw: bool = False) -> FieldCodec:
    """Printable characters on one line, because names and reasons of other Macs reach terminals and logs.
    `cut` shortens and mends a text instead of refusing it. `raw` accepts any.
    """

    def check(value: Wire) -> str:
        if type(value) is not str or len(value) > max_chars:
            raise ValueError(f"a string of at most {max_chars} characters")
        if cut:
            return printable(value)
        if not raw and not value.isprintable():
            raise ValueError("printable characters")
        return value

    # File names and arguments outside UTF-8 contain surrogates, which msgpack refuses.
    return FieldCodec((lambda value: printable(value[:max_chars])) if cut else _same, check)


_GROUP = re.compile(r".+#(0|[1-9][0-9]?)")


def group_id(max_chars: int) -> FieldCodec:
    """Id of a group (a name, "#" and an index below 100, for code that reads it as a number), or empty."""
    name = text(max_chars)

    def check(value: Wire) -> str:
        if type(value) is not str or (value and not _GROUP.fullmatch(value)):
            raise ValueError(f"a string of at most {max_chars} characters, the id of a group such as tiny#0")
        return str(name.from_wire(value))

    return FieldCodec(_same, check)


def choice(*allowed: str) -> FieldCodec:
    def check(value: Wire) -> str:
        if type(value) is not str or value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value

    return FieldCodec(str, check)


def binary(low: int, high: int) -> FieldCodec:
    def check(value: Wire) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise ValueError(f"{low} to {high} bytes")
        return value

    return FieldCodec(_same, check)


def integers(low: int, high: int, min_items: int, max_items: int) -> FieldCodec:
    """Tuple of integers as packed little-endian 32-bit words: four bytes per item, no object for each."""
    unsigned = high > 2**31 - 1
    kind = "I" if unsigned else "i"
    at_least, at_most = 4 * min_items, 4 * max_items
    few = [struct.Struct(f"<{count}{kind}") for count in range(_FEW)]

    def pack(value: tuple[int, ...]) -> bytes:
        if value == ():
            return b""
        if len(value) < _FEW:
            return few[len(value)].pack(*value)
        return struct.pack(f"<{len(value)}{kind}", *value)

    def check(value: Wire) -> tuple[int, ...]:
        if value == b"" and not min_items:
            return ()
        if type(value) is not bytes or (size := len(value)) % 4 or not at_least <= size <= at_most:
            raise ValueError(f"{min_items} to {max_items} packed 32-bit integers")
        count = size // 4
        items = few[count].unpack(value) if count < _FEW else struct.unpack(f"<{count}{kind}", value)
        least, most = (items[0], items[0]) if count == 1 else (min(items), max(items))
        if not (low <= least and most <= high):
            raise ValueError(f"integers from {low} to {high}")
        return items

    return FieldCodec(pack, check)


def numbers(low: float, high: float, max_items: int) -> FieldCodec:
    """Tuple of numbers as packed little-endian 32-bit floats."""

    def check(value: Wire) -> tuple[float, ...]:
        if type(value) is not bytes or len(value) % 4 or len(value) // 4 > max_items:
            raise ValueError(f"at most {max_items} packed 32-bit floats")
        items = struct.unpack(f"<{len(value) // 4}f", value)
        for item in items:
            if not low <= item <= high:  # NaN fails both
                raise ValueError(f"numbers from {low} to {high}")
        return items

    return FieldCodec(lambda value: struct.pack(f"<{len(value)}f", *value), check)


class _FieldError(ValueError):
    """Fault of a record's field, located by `located`."""


def located(name: str, error: ValueError) -> str:
    """Return "name: expected VALUES", or for a fault within a field "name.field: expected VALUES"."""
    return f"{name}{'.' if isinstance(error, _FieldError) else ': expected '}{error}"


def record(kind: type[Any]) -> FieldCodec:
    """Map of the fields of a message, or of a dataclass within one."""
    codecs = {f.name: f.metadata["codec"] for f in fields(kind)}
    sparse = issubclass(kind, Message) and kind.SPARSE
    defaults = {f.name: f.default if sparse else MISSING for f in fields(kind)}
    packs = tuple((name, codec.to_wire, defaults[name]) for name, codec in codecs.items())
    # Set slots directly, because the `__init__` of a frozen dataclass takes twice as long.
    checks = tuple(
        (name, codec.from_wire, getattr(kind, name).__set__, defaults[name]) for name, codec in codecs.items()
    )
    count, new = len(checks), object.__new__
    exactly = f"a map of exactly the fields {', '.join(codecs) or '(none)'}"
    grows = issubclass(kind, Message) and kind.GROWS

    def pack(value: Any) -> Wire:
        if type(value) is not kind:
            raise TypeError(f"expected a {kind.__name__}, got a {type(value).__name__}")
        if not sparse:
            return {name: to_wire(getattr(value, name)) for name, to_wire, _ in packs}
        return {
            name: to_wire(given)
            for name, to_wire, default in packs
            if (given := getattr(value, name)) is not default and given != default
        }

    def check(value: Wire) -> Any:
        if type(value) is not dict or (len(value) != count and not (grows or sparse)):
            raise ValueError(exactly)
        part, known = new(kind), 0
        try:
            for name, from_wire, fill, default in checks:
                if default is MISSING or name in value:
                    fill(part, from_wire(value[name]))
                    known += 1
                else:
                    fill(part, default)
        except KeyError:
            raise _FieldError(f"{name}: expected a value, which is missing") from None
        except ValueError as error:
            raise _FieldError(located(name, error)) from None
        if known != len(value) and not grows:
            raise ValueError(exactly)
        return part

    return FieldCodec(pack, check)


def records(kind: type[Any], min_items: int, max_items: int) -> FieldCodec:
    one = record(kind)

    def pack(value: tuple[Any, ...]) -> Wire:
        return [one.to_wire(item) for item in value] if value else []

    def check(value: Wire) -> tuple[Any, ...]:
        if value == [] and not min_items:
            return ()  # the case of every decode step
        if type(value) is not list or not min_items <= len(value) <= max_items:
            raise ValueError(f"a list of {min_items} to {max_items} {kind.__name__}")
        return tuple([one.from_wire(item) for item in value])

    return FieldCodec(pack, check)


def texts(max_items: int, max_chars: int, *, raw: bool = False) -> FieldCodec:
    one = text(max_chars, raw=raw)

    def check(value: Wire) -> tuple[str, ...]:
        if type(value) is not list or len(value) > max_items:
            raise ValueError(f"a list of at most {max_items} strings")
        return tuple([one.from_wire(item) for item in value])

    return FieldCodec(list, check)


def joined(max_items: int, max_chars: int) -> FieldCodec:
    """Tuple of texts without commas, joined in one text: lists within records would nest too deep."""
    whole, one = text(max_items * (max_chars + 1)), texts(max_items, max_chars)

    return FieldCodec(
        ",".join, lambda value: one.from_wire(whole.from_wire(value).split(",")) if value != "" else ()
    )


# --- messages: frozen dataclasses whose fields declare their limits --------------------------------------

U32 = 2**32 - 1
U63 = 2**63 - 1
MAX_GRAMMAR = 1 << 19  #: Characters of a grammar or schema, each of up to four bytes.


def holding(codec: FieldCodec, **default: Any) -> Any:
    return field(metadata={"codec": codec}, **default)


@dataclass_transform(frozen_default=True, field_specifiers=(holding,))
class MessageType(type):
    """Turns a class with a `number` into a frozen dataclass with slots.

    `grows`: unknown fields are ignored. `sparse`: fields with their default are left out of frames.
    """

    def __new__(
        cls,
        name: str,
        bases: tuple[type, ...],
        body: dict[str, Any],
        number: int = 0,
        *,
        grows: bool = False,
        sparse: bool = False,
    ) -> Any:
        made: Any = super().__new__(cls, name, bases, body)
        if not number:  # a base, or the class with slots that `dataclass` makes of a message
            return made
        assert number not in NUMBERED, f"two messages with number {number:#04x}"
        made = NUMBERED[number] = dataclass(frozen=True, slots=True)(made)
        made.TYPE, made.GROWS, made.SPARSE = number, grows, sparse
        made.CODEC = record(made)
        return made


class Message(metaclass=MessageType):
    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    TYPE: ClassVar[int]
    CODEC: ClassVar[FieldCodec]
    GROWS: ClassVar[bool] = False
    SPARSE: ClassVar[bool] = False


NUMBERED: dict[int, type[Message]] = {}  #: messages of all imported modules


class NodeRow(Message):
    """Base of a node's reports about itself, sent to all in a `Report`: see `cluster.links.ReportTable`.

    A node has one row of a kind for each value of its `KEYS`, and at most `MOST`. Rows with `LAST` stay when
    the node's link ends, until it restarts or is removed from the cluster.
    """

    __slots__ = ()
    KEYS: ClassVar[tuple[str, ...]] = ()  #: fields
    MOST: ClassVar[int] = 1
    LAST: ClassVar[bool] = False

    @property
    def about(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.KEYS)


def row() -> FieldCodec:
    """Row of any kind: a map of its fields, with its number under an empty name."""

    def check(value: Wire) -> NodeRow:
        number = value.get("") if type(value) is dict else None
        kind = NUMBERED.get(number) if type(number) is int else None
        if kind is None or not issubclass(kind, NodeRow):
            raise ValueError("a row of a known kind")
        found: NodeRow = kind.CODEC.from_wire({name: each for name, each in value.items() if name})
        return found

    return FieldCodec(lambda value: {"": value.TYPE, **value.CODEC.to_wire(value)}, check)
