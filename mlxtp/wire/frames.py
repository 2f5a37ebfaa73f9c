"""Frames: bytes to messages and back; no I/O.

A frame is a 4-byte big-endian length, checked before anything is stored for it, then the msgpack array
`[type, epoch, seq, body]`. `_scan` walks it without creating an object, then msgpack unpacks it. The scan
bounds memory (1 MB of empty maps would unpack to 73 MB). Frames up to 4 KiB on an open link skip it.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final, NamedTuple

import msgpack

from ..errors import Code, LocalProtocolError, RemoteProtocolError
from .codecs import NUMBERED, U63, Message, located
from .messages import Ack, Forward


@cache
def messages() -> dict[int, type[Message]]:
    """Return all messages by number. A rank receives no messages of agents, so it never imports them."""
    from . import cluster_messages, peer_messages  # noqa: F401 - importing numbers their messages

    return NUMBERED


# --- frames ----------------------------------------------------------------------------------------------

MAX_OPENING_FRAME: Final = 4 * 1024  #: bytes of one frame, without its length, until the link is open
MAX_FRAME: Final = 8 * 1024 * 1024  #: the same on an open link
MAX_DEPTH: Final = 5
#: Items of one array, entries of one map. Lists of numbers travel as one packed string of bytes.
MAX_ITEMS: Final = 64
MAX_OBJECTS: Final = 1024  #: objects in one scanned frame

_UNCHECKED: Final = frozenset((Forward, Ack))  #: sent with every step; only the receiver checks them
_LENGTH = struct.Struct(">I")
_HEADER_BYTES: Final = _LENGTH.size

_pack = msgpack.Packer().pack  # for all threads: each call is atomic, because it runs no Python code


class Frame(NamedTuple):
    message: Message
    epoch: int
    seq: int


def encode(message: Message, epoch: int, seq: int, limit: int = MAX_FRAME) -> bytes:
    """Return the frame of `message`, length included. Raises LocalProtocolError.

    FIELD_INVALID: no receiver would accept a value (a decode step and an Ack are checked only for the size of
    their integers). FRAME_OVERSIZE: more than `limit` bytes.
    """
    try:
        body = message.CODEC.to_wire(message)
        if type(message) not in _UNCHECKED or body.get("prompts"):
            message.CODEC.from_wire(body)
        payload: bytes = _pack((message.TYPE, epoch, seq, body))
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        why = f"{type(message).__name__} cannot be sent: {error}"
        raise LocalProtocolError(why, Code.FIELD_INVALID) from None
    if len(payload) > limit:
        why = f"{type(message).__name__} of {len(payload)} bytes; at most {limit} may be sent now"
        raise LocalProtocolError(why, Code.FRAME_OVERSIZE)
    return _LENGTH.pack(len(payload)) + payload


class Decoder:
    """Splitter of a byte stream into frames. Holds less than one frame, plus the bytes fed last."""

    __slots__ = ("_at", "_buffer", "limit")

    def __init__(self) -> None:
        self.limit = MAX_OPENING_FRAME
        self._buffer = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> None:
        """Add bytes. Before adding more, call `next_frame` until it returns None."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None. After a RemoteProtocolError, the stream is unreadable."""
        buffer, at = self._buffer, self._at
        start = at + _HEADER_BYTES
        if len(buffer) < start:
            self._drop_used()
            return None
        (length,) = _LENGTH.unpack_from(buffer, at)
        if length > self.limit:
            why = f"a frame of {length} bytes; at most {self.limit} may come now"
            raise RemoteProtocolError(why, Code.FRAME_OVERSIZE)
        end = start + length
        if len(buffer) < end:
            self._drop_used()
            return None
        self._at = end
        return _decode(buffer[start:end], self.limit)

    def _drop_used(self) -> None:
        if self._at:
            del self._buffer[: self._at]
            self._at = 0

    @property
    def pending(self) -> int:
        return len(self._buffer) - self._at


def _decode(payload: bytearray, limit: int) -> Frame:
    frame = _unpack(payload, scan=len(payload) > MAX_OPENING_FRAME or limit == MAX_OPENING_FRAME)
    if type(frame) is not list or len(frame) != 4:
        raise _malformed("not an array of type, epoch, seq and body")
    number, epoch, seq, body = frame
    # Exact types: True is an int to isinstance.
    whole = type(number) is int and type(epoch) is int and type(seq) is int
    if not (whole and 0 <= epoch <= U63 and 0 <= seq <= U63):
        raise _malformed("type, epoch and seq must be whole numbers")
    message_type = NUMBERED.get(number) or messages().get(number)
    if message_type is None:
        raise RemoteProtocolError(f"no message has type {number:#04x}", Code.UNKNOWN_TYPE)
    try:
        return Frame(message_type.CODEC.from_wire(body), epoch, seq)
    except ValueError as error:
        raise RemoteProtocolError(located(message_type.__name__, error), Code.FIELD_INVALID) from None


def _unpack(payload: bytearray, scan: bool) -> Any:
    try:
        if scan:
            _scan(payload)
        # Strings and bytes need no limit of their own: unpackb takes the payload's size.
        return msgpack.unpackb(
            payload,
            object_pairs_hook=_unique_keys,
            ext_hook=_no_extension,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise _malformed(str(error) or type(error).__name__) from None


def _malformed(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"malformed frame: {detail}", Code.FRAME_MALFORMED)


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if len(result := dict(pairs)) != len(pairs):
        raise ValueError("a key appears twice in one map")
    return result


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


_SCALAR, _ARRAY, _MAP = range(3)

_Form = tuple[int, int, int]  #: kind, bytes of the length after the first byte, and the size if that is 0


def _forms() -> list[_Form | None]:
    """Return the form for each first byte of a msgpack object; None for forbidden ones."""
    forms: list[_Form | None] = [(_SCALAR, 0, 0)] * 256  # numbers in one byte, nil, false, true
    forms[0x80:0x90] = [(_MAP, 0, n) for n in range(16)]
    forms[0x90:0xA0] = [(_ARRAY, 0, n) for n in range(16)]
    forms[0xA0:0xC0] = [(_SCALAR, 0, n) for n in range(32)]
    forms[0xC1] = None  # never used
    forms[0xC4:0xC7] = [(_SCALAR, n, 0) for n in (1, 2, 4)]  # bytes
    forms[0xC7:0xCA] = [None] * 3  # extensions
    forms[0xCA:0xCC] = [(_SCALAR, 0, n) for n in (4, 8)]  # floats
    forms[0xCC:0xD4] = [(_SCALAR, 0, n) for n in (1, 2, 4, 8, 1, 2, 4, 8)]  # integers
    forms[0xD4:0xD9] = [None] * 5  # extensions of fixed size, timestamps among them
    forms[0xD9:0xDC] = [(_SCALAR, n, 0) for n in (1, 2, 4)]  # strings
    forms[0xDC:0xDE] = [(_ARRAY, n, 0) for n in (2, 4)]
    forms[0xDE:0xE0] = [(_MAP, n, 0) for n in (2, 4)]
    return forms


_FORMS = _forms()


def _scan(payload: bytearray) -> None:
    """Walk one msgpack object. Raises ValueError if it is incomplete or breaks one of the limits above."""
    at, objects, size = 0, 0, len(payload)
    missing = [1]  # objects still missing on each open level
    while missing:
        if not missing[-1]:
            missing.pop()
            continue
        missing[-1] -= 1
        objects += 1
        if objects > MAX_OBJECTS:
            raise ValueError(f"more than {MAX_OBJECTS} objects")
        if at >= size:
            raise ValueError("it ends early")
        form = _FORMS[payload[at]]
        if form is None:
            raise ValueError(f"byte {payload[at]:#04x} starts no object that is allowed")
        kind, length_bytes, count = form
        if length_bytes:
            count = int.from_bytes(payload[at + 1 : at + 1 + length_bytes], "big")
        at += 1 + length_bytes
        if kind == _SCALAR:
            at += count
            continue
        if count > MAX_ITEMS:
            raise ValueError(f"{count} items; at most {MAX_ITEMS} are allowed")
        if len(missing) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        missing.append(count if kind == _ARRAY else 2 * count)
