"""Every message of every link: one frozen dataclass each, and the table that numbers them.

A frame is `[type, epoch, seq, body]` (see `frames.py`); `body` is the message's fields as a map. What a
field may hold is said once, in its declaration, and holds for both directions: a message that breaks it
is refused before it is sent and after it is received.

Links: *pipe* joins an agent and one rank of its own; *decode* joins rank 0 and one other rank.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from ..errors import Code, RemoteProtocolError

PROTOCOL_VERSION = 1
MAX_RANKS = 8
MAX_ROWS = 1024
"""Sequences one step may drive."""
MAX_CONTEXT = 1 << 24
"""Tokens of prompt and answer; a model's own context is usually far shorter."""
MAX_FRAME_TOKENS = 1 << 20
"""Tokens one frame may carry: half of what the largest frame would hold."""

U32 = 2**32 - 1
U63 = 2**63 - 1

Wire = Any
"""What msgpack packs: int, str, bytes, bool, float, list, dict."""


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """How one field is packed (`to_wire`) and how a received value is checked and unpacked (`from_wire`).

    `from_wire` raises ValueError with what it expected; it never trusts the type of what it gets.
    """

    to_wire: Callable[[Any], Wire]
    from_wire: Callable[[Wire], Any]


def _same(value: Any) -> Any:
    return value


def _int(low: int, high: int) -> FieldCodec:
    def check(value: Wire) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return FieldCodec(_same, check)


def _float(low: float, high: float) -> FieldCodec:
    def check(value: Wire) -> float:
        # NaN fails both comparisons.
        if type(value) is not float or not low <= value <= high:
            raise ValueError(f"a number from {low} to {high}")
        return value

    return FieldCodec(float, check)


def _bool() -> FieldCodec:
    def check(value: Wire) -> bool:
        if type(value) is not bool:
            raise ValueError("true or false")
        return value

    return FieldCodec(_same, check)


def _str(max_chars: int) -> FieldCodec:
    def check(value: Wire) -> str:
        if type(value) is not str or len(value) > max_chars:
            raise ValueError(f"a string of at most {max_chars} characters")
        return value

    return FieldCodec(lambda value: value[:max_chars], check)


def _choice(*allowed: str) -> FieldCodec:
    def check(value: Wire) -> str:
        if type(value) is not str or value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value

    return FieldCodec(str, check)


def _bytes(low: int, high: int) -> FieldCodec:
    def check(value: Wire) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise ValueError(f"{low} to {high} bytes")
        return value

    return FieldCodec(_same, check)


def _ints(low: int, high: int, min_items: int, max_items: int) -> FieldCodec:
    """A tuple of integers as packed little-endian 32-bit words: four bytes an item, no object each."""
    unsigned = high > 2**31 - 1
    kind = "I" if unsigned else "i"

    def pack(value: tuple[int, ...]) -> bytes:
        return struct.pack(f"<{len(value)}{kind}", *value)

    def check(value: Wire) -> tuple[int, ...]:
        if type(value) is not bytes or len(value) % 4 or not min_items <= len(value) // 4 <= max_items:
            raise ValueError(f"{min_items} to {max_items} packed 32-bit integers")
        items = struct.unpack(f"<{len(value) // 4}{kind}", value)
        if items and not (low <= min(items) and max(items) <= high):
            raise ValueError(f"integers from {low} to {high}")
        return items

    return FieldCodec(pack, check)


def _strs(max_items: int, max_chars: int) -> FieldCodec:
    def check(value: Wire) -> tuple[str, ...]:
        if type(value) is not list or len(value) > max_items:
            raise ValueError(f"a list of at most {max_items} strings")
        for item in value:
            if type(item) is not str or len(item) > max_chars:
                raise ValueError(f"strings of at most {max_chars} characters")
        return tuple(value)

    return FieldCodec(list, check)


def _f(codec: FieldCodec) -> Any:
    return field(metadata={"codec": codec})


_uid = _int(1, U32)
_count = _int(0, U63)
_detail = _str(1000)  # an Error fits the 4 KiB of a link that is not open yet
_code = _choice(*(code.value for code in Code))
_seconds = _float(0.0, 1e9)


class Message:
    """Base of all messages. `TYPE` is the number on the wire."""

    __slots__ = ()
    TYPE: ClassVar[int]


# --- opening a link ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First frame of whoever opens a link. On decode, `proof` is keyed by the epoch's secret."""

    TYPE: ClassVar[int] = 0x01
    version: int = _f(_int(0, U32))
    rank: int = _f(_int(0, MAX_RANKS - 1))
    pid: int = _f(_count)
    nonce: bytes = _f(_bytes(16, 16))
    proof: bytes = _f(_bytes(0, 32))


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The answer to a Hello that was accepted; a refused one gets an Error and the link ends."""

    TYPE: ClassVar[int] = 0x02
    version: int = _f(_int(0, U32))
    proof: bytes = _f(_bytes(0, 32))


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Asks for exactly one Pong."""

    TYPE: ClassVar[int] = 0x03


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """What a rank is doing. `phase_s` is the time since it entered the phase or last made progress in it."""

    TYPE: ClassVar[int] = 0x04
    phase: str = _f(
        _choice("starting", "forming", "proving", "loading", "idle", "prefill", "decode", "closing")
    )
    phase_s: float = _f(_seconds)
    in_flight: int = _f(_count)
    step: int = _f(_count)
    forwards: int = _f(_count)
    collectives: int = _f(_count)
    emitted: int = _f(_count)
    memory_bytes: int = _f(_count)
    peak_memory_bytes: int = _f(_count)
    model: str = _f(_str(1000))


# 0x05 DesiredState, 0x06 Members and 0x0B SideChannel belong to links between Macs and come with them.


@dataclass(frozen=True, slots=True)
class Bootstrap(Message):
    """Agent to its rank: the group this process will be part of, for one epoch."""

    TYPE: ClassVar[int] = 0x07
    rank: int = _f(_int(0, MAX_RANKS - 1))
    world_size: int = _f(_int(1, MAX_RANKS))
    backend: str = _f(_choice("none", "ring"))
    hosts: tuple[str, ...] = _f(_strs(MAX_RANKS, 100))
    decode_address: str = _f(_str(100))
    epoch_key: bytes = _f(_bytes(32, 32))
    deadline_s: float = _f(_seconds)
    ack_deadline_s: float = _f(_seconds)
    run_ahead: int = _f(_int(0, 1))


# --- decoding ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptTokens(Message):
    """One prefill forward over `tokens`, which start at position `offset` of a prompt of `total` tokens.

    The chunk that ends the prompt (offset + len(tokens) == total) also produces the first new token.
    """

    TYPE: ClassVar[int] = 0x08
    uid: int = _f(_uid)
    offset: int = _f(_int(0, MAX_CONTEXT))
    total: int = _f(_int(1, MAX_CONTEXT))
    tokens: tuple[int, ...] = _f(_ints(0, 2**31 - 1, 1, MAX_FRAME_TOKENS))


@dataclass(frozen=True, slots=True)
class StepToken(Message):
    """One decode forward for the running batch: the uids of its rows, in row order.

    The token each row feeds is the one its previous forward produced, already agreed on inside the graph.
    """

    TYPE: ClassVar[int] = 0x09
    rows: tuple[int, ...] = _f(_ints(1, U32, 1, MAX_ROWS))
    agreement: str = _f(_choice("broadcast"))


@dataclass(frozen=True, slots=True)
class SessionStop(Message):
    """A sequence is over. `forwards` counts its prefill chunks and steps; every rank checks its own count."""

    TYPE: ClassVar[int] = 0x0A
    uid: int = _f(_uid)
    reason: str = _f(_choice("stop", "length", "cancel"))
    forwards: int = _f(_count)


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """The answer to exactly one PromptTokens or StepToken, named by the seq of its frame.

    `forwards` and `collectives` are the rank's totals after that step, `digest` covers the tokens it chose.
    """

    TYPE: ClassVar[int] = 0x10
    step: int = _f(_count)
    forwards: int = _f(_count)
    collectives: int = _f(_count)
    digest: int = _f(_int(0, U32))


@dataclass(frozen=True, slots=True)
class Error(Message):
    """Something failed.

    With a `uid`, that request is over and nothing else is. Without one (0): as the reply to a command it
    stands for the success it replaces; unasked, the sender is ending.
    """

    TYPE: ClassVar[int] = 0x11
    code: str = _f(_code)
    detail: str = _f(_detail)
    uid: int = _f(_int(0, U32))


# --- the life of a rank: each gets exactly one reply ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Init(Message):
    """Form the group. Reply: InitDone."""

    TYPE: ClassVar[int] = 0x12


@dataclass(frozen=True, slots=True)
class SanityCheck(Message):
    """Prove the group by value. Reply: SanityDone."""

    TYPE: ClassVar[int] = 0x13


@dataclass(frozen=True, slots=True)
class LoadShard(Message):
    """Load this rank's share of the model in folder `path`. Reply: Loaded.

    `eos` are end tokens that the tokenizer knows; the model's own configuration may add to them.
    """

    TYPE: ClassVar[int] = 0x14
    path: str = _f(_str(4000))
    prefill_chunk: int = _f(_int(1, MAX_CONTEXT))
    eos: tuple[int, ...] = _f(_ints(0, 2**31 - 1, 0, 64))


@dataclass(frozen=True, slots=True)
class ClearCache(Message):
    """Give cached buffers back to the system. Reply: Done."""

    TYPE: ClassVar[int] = 0x15


@dataclass(frozen=True, slots=True)
class Unload(Message):
    """Drop the model; the group stays. Reply: Done."""

    TYPE: ClassVar[int] = 0x16


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Drop every session; the model stays. Reply: Done."""

    TYPE: ClassVar[int] = 0x17


@dataclass(frozen=True, slots=True)
class Shutdown(Message):
    """Finish, let go of everything, exit with status 0. Reply: Done, then SessionEnd."""

    TYPE: ClassVar[int] = 0x18


@dataclass(frozen=True, slots=True)
class InitDone(Message):
    """The group is formed."""

    TYPE: ClassVar[int] = 0x19
    rank: int = _f(_int(0, MAX_RANKS - 1))
    world_size: int = _f(_int(1, MAX_RANKS))


@dataclass(frozen=True, slots=True)
class SanityDone(Message):
    """What this rank computed: `total` = sum of ones, `ranks` = the gathered ranks, `digest` of the epoch."""

    TYPE: ClassVar[int] = 0x1A
    total: int = _f(_count)
    ranks: tuple[int, ...] = _f(_ints(0, 2**31 - 1, 0, MAX_RANKS))
    digest: int = _f(_int(0, U32))


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """The shard is in memory. `context` and `vocabulary` are the model's, in tokens."""

    TYPE: ClassVar[int] = 0x1B
    context: int = _f(_int(1, U32))
    vocabulary: int = _f(_int(1, U32))
    weight_bytes: int = _f(_count)
    eos: tuple[int, ...] = _f(_ints(0, 2**31 - 1, 0, 64))


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The reply of Bootstrap, ClearCache, Unload, Abort and Shutdown."""

    TYPE: ClassVar[int] = 0x1C


# --- requests in, tokens out ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate(Message):
    """Agent to rank 0: decode after this prompt until an end token or `max_tokens`."""

    TYPE: ClassVar[int] = 0x20
    uid: int = _f(_uid)
    tokens: tuple[int, ...] = _f(_ints(0, 2**31 - 1, 1, MAX_FRAME_TOKENS))
    max_tokens: int = _f(_int(1, MAX_CONTEXT))


@dataclass(frozen=True, slots=True)
class Delta(Message):
    """Rank 0 to agent: the confirmed tokens of one step. `tokens[i]` is number `indices[i]` of `uids[i]`."""

    TYPE: ClassVar[int] = 0x21
    uids: tuple[int, ...] = _f(_ints(1, U32, 1, MAX_ROWS))
    indices: tuple[int, ...] = _f(_ints(0, 2**31 - 1, 1, MAX_ROWS))
    tokens: tuple[int, ...] = _f(_ints(0, 2**31 - 1, 1, MAX_ROWS))


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Agent to rank 0: nobody wants this any more. Answered by Finished, unless it is over."""

    TYPE: ClassVar[int] = 0x22
    uid: int = _f(_uid)


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """Rank 0 to agent: the last word about a request. `generated` counts tokens with the end token."""

    TYPE: ClassVar[int] = 0x23
    uid: int = _f(_uid)
    reason: str = _f(_choice("stop", "length", "cancel"))
    generated: int = _f(_count)
    forwards: int = _f(_count)


@dataclass(frozen=True, slots=True)
class SessionEnd(Message):
    """The last frame of a link that closes in order."""

    TYPE: ClassVar[int] = 0xFF


M = TypeVar("M", bound=Message)

MESSAGES: dict[int, type[Message]] = {
    message.TYPE: message
    for message in (
        Hello, Welcome, Ping, Pong, Bootstrap, PromptTokens, StepToken, SessionStop, Ack, Error,
        Init, SanityCheck, LoadShard, ClearCache, Unload, Abort, Shutdown,
        InitDone, SanityDone, Loaded, Done, Generate, Delta, Cancel, Finished, SessionEnd,
    )
}  # fmt: skip

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


def field_codecs(message: type[Message]) -> tuple[tuple[str, FieldCodec], ...]:
    """Names and codecs of a message's fields, in order."""
    return _CODECS[message]


def to_body(message: Message) -> dict[str, Wire]:
    """The map that travels. Values are packed, not checked: `check_body` on the same map is the check."""
    return {name: pack(getattr(message, name)) for name, pack in _PACK[type(message)]}


def from_body(message_type: type[M], body: Wire) -> M:
    """A message from what was unpacked. Raises RemoteProtocolError as `check_body` does."""
    return message_type(*check_body(message_type, body))


def check_body(message_type: type[Message], body: Wire) -> list[Any]:
    """The fields' values, in order, from what was unpacked.

    Raises RemoteProtocolError (FIELD_INVALID) naming the field: missing, surplus, of the wrong type or out
    of range.
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
