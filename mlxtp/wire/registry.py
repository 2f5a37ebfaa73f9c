"""Table of all messages by their number, which also packs and checks their bodies."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from ..errors import Code, RemoteProtocolError
from .base import Message
from .cluster_messages import CONTROL_MESSAGES
from .codecs import FieldCodec, Wire
from .copy_messages import COPY_MESSAGES
from .join_messages import JOIN_MESSAGES
from .messages import RANK_MESSAGES

M = TypeVar("M", bound=Message)

MESSAGES: dict[int, type[Message]] = {
    message.TYPE: message for message in (*RANK_MESSAGES, *CONTROL_MESSAGES, *JOIN_MESSAGES, *COPY_MESSAGES)
}
assert len(MESSAGES) == sum(map(len, (RANK_MESSAGES, CONTROL_MESSAGES, JOIN_MESSAGES, COPY_MESSAGES))), (
    "two messages with one number"
)

#: Numbers of messages of earlier versions, which are not used again.
RETIRED = frozenset({0x15, 0x17, 0x4C, 0x4D, 0x4E, 0x52, 0x53})

_CODECS: dict[type[Message], tuple[tuple[str, FieldCodec], ...]] = {
    message: tuple((f.name, f.metadata["codec"]) for f in fields(message))  # type: ignore[arg-type]
    for message in MESSAGES.values()
}
_PACK = {
    message: tuple((name, codec.to_wire) for name, codec in codecs) for message, codecs in _CODECS.items()
}
_CHECK = {
    message: tuple((name, codec.from_wire) for name, codec in codecs) for message, codecs in _CODECS.items()
}
#: Setters of a message's slots. The `__init__` of a frozen dataclass takes twice as long.
_FILL = {
    message: tuple((getattr(message, name).__set__, name, codec.from_wire) for name, codec in codecs)
    for message, codecs in _CODECS.items()
}


def field_codecs(message: type[Message]) -> tuple[tuple[str, FieldCodec], ...]:
    """Return names and codecs of a message's fields, in order."""
    return _CODECS[message]


def to_body(message: Message) -> dict[str, Wire]:
    """Return the map to send. Values are packed, not checked; `check_body` on the same map checks them."""
    return {name: pack(getattr(message, name)) for name, pack in _PACK[type(message)]}


def from_body(message_type: type[M], body: Wire) -> M:
    """Return the message of an unpacked body. Raises RemoteProtocolError as `check_body` does."""
    slots = _FILL[message_type]
    if type(body) is dict and len(body) == len(slots):
        message = object.__new__(message_type)
        try:
            for fill, name, check in slots:
                fill(message, check(body[name]))
            return message
        except (KeyError, ValueError):
            pass  # `check_body` below reports the field and the reason
    return message_type(*check_body(message_type, body))


def check_body(message_type: type[Message], body: Wire) -> list[Any]:
    """Return the fields' values of an unpacked body, in order.

    Raises RemoteProtocolError (FIELD_INVALID) naming the field: missing, surplus, of the wrong type or out of
    range.
    """
    checks = _CHECK[message_type]
    name = "body"
    values = []
    try:
        if type(body) is not dict or len(body) != len(checks):
            raise ValueError(f"a map of exactly the fields {', '.join(n for n, _ in checks) or '(none)'}")
        for name, check in checks:
            values.append(check(body[name]))
    except KeyError:
        raise RemoteProtocolError(
            f"{message_type.__name__}: field {name!r} is missing", Code.FIELD_INVALID
        ) from None
    except ValueError as error:
        raise RemoteProtocolError(
            f"{message_type.__name__}.{name}: expected {error}", Code.FIELD_INVALID
        ) from None
    return values
