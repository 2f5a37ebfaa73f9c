"""Codecs of message fields, where each kind is packed, checked and unpacked, and the base of all messages."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

_FEW = 65  # integers of one field whose format is kept
Wire = Any  #: values that msgpack packs: int, str, bytes, bool, float, list, dict


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """Codec of one field: `to_wire` packs it, `from_wire` checks and unpacks a received value.

    `from_wire` raises ValueError with what it expected. It never trusts the type of its argument.
    """

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

    With `cut`, a text for people: it is shortened if too long, and unprintable characters are replaced,
    rather than refused. With `raw`, any characters, for programs: a path, a grammar.
    """

    def check(value: Wire) -> str:
        if type(value) is not str or len(value) > max_chars:
            raise ValueError(f"a string of at most {max_chars} characters")
        if cut:
            return printable(value)
        if not raw and not value.isprintable():
            raise ValueError("printable characters")
        return value

    # File names and arguments that are not UTF-8 contain surrogates, which cannot be sent.
    return FieldCodec((lambda value: printable(value[:max_chars])) if cut else _same, check)


_GROUP = re.compile(r".+#(0|[1-9][0-9]?)")


def group_id(max_chars: int) -> FieldCodec:
    """Id of a group, a name, "#" and an index below 100, or an empty text: an index is read as a number."""
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
        if type(value) is not bytes or len(value) % 4 or not min_items <= len(value) // 4 <= max_items:
            raise ValueError(f"{min_items} to {max_items} packed 32-bit integers")
        count = len(value) // 4
        items = few[count].unpack(value) if count < _FEW else struct.unpack(f"<{count}{kind}", value)
        least, most = (
            (items[0], items[0]) if count == 1 else (min(items), max(items)) if items else (low, high)
        )
        if not (low <= least and most <= high):
            raise ValueError(f"integers from {low} to {high}")
        return items

    return FieldCodec(pack, check)


def numbers(low: float, high: float, max_items: int) -> FieldCodec:
    """Tuple of numbers as packed little-endian 32-bit floats."""

    def pack(value: tuple[float, ...]) -> bytes:
        return struct.pack(f"<{len(value)}f", *value)

    def check(value: Wire) -> tuple[float, ...]:
        if type(value) is not bytes or len(value) % 4 or len(value) // 4 > max_items:
            raise ValueError(f"at most {max_items} packed 32-bit floats")
        items = struct.unpack(f"<{len(value) // 4}f", value)
        for item in items:
            if not low <= item <= high:  # NaN fails both
                raise ValueError(f"numbers from {low} to {high}")
        return items

    return FieldCodec(pack, check)


def record(kind: type[Any]) -> FieldCodec:
    """Part of a message that is a dataclass itself: a map of its fields."""
    codecs = tuple((f.name, f.metadata["codec"]) for f in fields(kind))

    def pack(value: Any) -> Wire:
        if type(value) is not kind:
            raise TypeError(f"expected a {kind.__name__}, got a {type(value).__name__}")
        return {name: codec.to_wire(getattr(value, name)) for name, codec in codecs}

    def check(value: Wire) -> Any:
        if type(value) is not dict or value.keys() != {name for name, _ in codecs}:
            raise ValueError(f"a map of exactly the fields {', '.join(name for name, _ in codecs)}")
        values = []
        for name, codec in codecs:
            try:
                values.append(codec.from_wire(value[name]))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return kind(*values)

    return FieldCodec(pack, check)


def records(kind: type[Any], min_items: int, max_items: int) -> FieldCodec:
    """Tuple of such parts."""
    one = record(kind)

    def pack(value: tuple[Any, ...]) -> Wire:
        return [one.to_wire(item) for item in value] if value else []

    def check(value: Wire) -> tuple[Any, ...]:
        if value == [] and not min_items:
            return ()  # of every decode step
        if type(value) is not list or not min_items <= len(value) <= max_items:
            raise ValueError(f"a list of {min_items} to {max_items} {kind.__name__}")
        return tuple([one.from_wire(item) for item in value])

    return FieldCodec(pack, check)


def texts(max_items: int, max_chars: int, *, raw: bool = False) -> FieldCodec:
    """Tuple of texts."""
    one = text(max_chars, raw=raw)

    def check(value: Wire) -> tuple[str, ...]:
        if type(value) is not list or len(value) > max_items:
            raise ValueError(f"a list of at most {max_items} strings")
        return tuple([one.from_wire(item) for item in value])

    return FieldCodec(list, check)


def hexes(max_items: int, max_chars: int) -> FieldCodec:
    """Tuple of bytes, each in hex."""
    all_of = texts(max_items, max_chars)

    def check(value: Wire) -> tuple[str, ...]:
        found: tuple[str, ...] = all_of.from_wire(value)
        for each in found:
            bytes.fromhex(each)  # raises ValueError
        return found

    return FieldCodec(list, check)


def joined(max_items: int, max_chars: int) -> FieldCodec:
    """Tuple of texts without commas, as one text: a list in a list of parts would be nested too deep."""
    whole, one = text(max_items * (max_chars + 1)), texts(max_items, max_chars)

    def check(value: Wire) -> tuple[str, ...]:
        parts: tuple[str, ...] = one.from_wire(whole.from_wire(value).split(",")) if value != "" else ()
        return parts

    return FieldCodec(",".join, check)


# --- messages: frozen dataclasses whose fields declare their limits --------------------------------------

U32 = 2**32 - 1
U63 = 2**63 - 1
#: Characters of one grammar or schema: with four bytes each, a quarter of the largest frame.
MAX_GRAMMAR = 1 << 19


def holding(codec: FieldCodec, **default: Any) -> Any:
    """Return a dataclass field whose values `codec` packs and checks."""
    return field(metadata={"codec": codec}, **default)


class Message:
    """Base of all messages. Each has a `number` on the wire; one that `grows` may have surplus fields."""

    __slots__ = ()
    TYPE: ClassVar[int]
    GROWS: ClassVar[bool] = False

    def __init_subclass__(cls, number: int = 0, *, grows: bool = False) -> None:
        if number:
            assert number not in NUMBERED, f"two messages with number {number:#04x}"
            cls.TYPE, cls.GROWS = number, grows
        if "TYPE" in vars(cls):  # also of the class with slots that `dataclass` puts in the place of this one
            NUMBERED[cls.TYPE] = cls


NUMBERED: dict[int, type[Message]] = {}  #: messages of all modules that were imported
