"""One end of a link, brought to any of its states, and then told anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from mlxtp.errors import LocalProtocolError, MlxtpError, RemoteProtocolError
from mlxtp.wire.frames import messages
from mlxtp.wire.messages import Message, Shutdown
from mlxtp.wire.protocol import LinkKind, LinkState, RequestFailed, Side, table
from mlxtp.wire.session import Session

from ..wire.samples import EXAMPLES, to_body
from ..wire.walk import EPOCH, example, pair_in, path_to

_CHANGED, _OURS, _RAW = 0x40, 0x80, 0xFF
_ODD: tuple[Any, ...] = (None, -1, 1 << 62, (1 << 64) - 1, float("nan"), "", b"", [], {}, [[]], True, "\x1b")


def _states(link: LinkKind) -> list[LinkState]:
    def reachable(state: LinkState) -> bool:
        try:
            path_to(link, state)
        except KeyError:
            return False
        return True

    return list(filter(reachable, table(link)))


def _kinds(link: LinkKind) -> list[type[Message]]:
    """Return the messages that may travel on it at some time, and one that may not."""
    may = {kind for moves in table(link).values() for side in moves.values() for kind in side}
    alien = next(kind for _, kind in sorted(messages().items()) if kind not in may)
    return [*sorted(may, key=lambda kind: kind.__name__), alien]


def seeds(link: LinkKind) -> list[bytes]:
    """Every state for either side, and every message from the peer."""
    states = [bytes((start,)) for start in range(2 * len(_states(link)))]
    usual = states[min(len(states) // 2, 7)]
    return states + [usual + bytes((kind, 0)) for kind in range(len(_kinds(link)))]


def told_anything(link: LinkKind) -> Callable[[bytes], None]:
    """A function that reads its input as a story: where the link stands, then who says what."""
    states, kinds = _states(link), _kinds(link)

    def run(data: bytes) -> None:
        story = iter(data)
        start = next(story, 0)
        side = Side.UPPER if start & 1 else Side.LOWER
        pair = pair_in(link, states[(start >> 1) % len(states)])
        end, seq = pair.end(side), pair.end(side.peer).seq
        for which in story:
            if which == _RAW:
                _receive(end, bytes(story))
                break
            how = next(story, 0)
            kind = kinds[which % len(kinds)]
            body = _body(kind, how, next(story, 0) if how & _CHANGED else 0)
            number = example(kind).TYPE
            if how & _OURS:
                message = messages()[number].CODEC.from_wire(body)
                try:
                    end.send(message)
                except LocalProtocolError:
                    return
            else:
                seq += 1
                payload = msgpack.packb((number, EPOCH, seq, body))
                _receive(end, len(payload).to_bytes(4, "big") + payload)
            assert end.outstanding >= 0
        end.receive_eof()

    return run


def _body(kind: type[Message], how: int, value: int) -> dict[str, Any]:
    """The example's, perhaps with another value in one field."""
    message = example(kind) if kind is RequestFailed else EXAMPLES[kind]
    body = to_body(message)
    if how & _CHANGED and body:
        name = list(body)[(how & 0x3F) % len(body)]
        before = body[name]
        if type(before) is int and value < 128:
            body[name] = value
        elif type(before) is bytes and value < 128:
            body[name] = b"".join(n.to_bytes(4, "little") for n in range(value % 8, value // 8))
        else:
            body[name] = _ODD[value % len(_ODD)]
    return body


def _receive(end: Session, data: bytes) -> None:
    """An error is final: it comes again from any call, and nothing is taken any more."""
    try:
        end.receive_data(data)
    except RemoteProtocolError as error:
        _stays_failed(end, (type(error), str(error)))
        raise


def _stays_failed(end: Session, reason: tuple[type[MlxtpError], str]) -> None:
    assert end.state is LinkState.FAILED
    for again in (lambda: end.receive_data(b"\0"), end.receive_eof, lambda: end.send(Shutdown())):
        assert _raised(again) == reason


def _raised(act: Callable[[], object]) -> tuple[type[MlxtpError], str] | None:
    try:
        act()
    except MlxtpError as error:
        return type(error), str(error)
    return None
