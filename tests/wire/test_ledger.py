"""Rules between messages: each is broken once, in both directions, and every time the same code comes out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxtp.errors import Code, LocalProtocolError, RemoteProtocolError
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import (
    Abort,
    Ack,
    Cancel,
    ClearCache,
    Delta,
    Done,
    Error,
    Finished,
    Generate,
    Message,
    Ping,
    Pong,
    PromptTokens,
    SessionStop,
    Shutdown,
    StepToken,
    Unload,
)
from mlxtp.wire.protocol import LinkKind, Side, State

from .walk import EPOCH, Pair, pair_in, requests, sequences

PONG = Pong("idle", 0.0, 0, 0, 0, 0, 0, 0, 0, "")
UP, DOWN = Side.UPPER, Side.LOWER


def step(*rows: int) -> StepToken:
    return StepToken(rows, "broadcast")


def prompt(uid: int, offset: int, total: int, count: int) -> PromptTokens:
    return PromptTokens(uid, offset, total, (5,) * count)


def ack(seq: int) -> Ack:
    return Ack(seq, 1, 1, 0)


def delta(*tokens: tuple[int, int]) -> Delta:
    return Delta(tuple(uid for uid, _ in tokens), tuple(i for _, i in tokens), (9,) * len(tokens))


def stop(uid: int) -> SessionStop:
    return SessionStop(uid, "stop", 1)


def finished(uid: int) -> Finished:
    return Finished(uid, "stop", 1, 1)


def failed(uid: int) -> Error:
    return Error(Code.BAD_REQUEST, "no", uid)


# Each case starts in LOADED with uid 1 live: its prompt complete on a decode link, where seqs go on from
# FIRST; without tokens on a pipe. `said` is legal; `wrong` is not.
FIRST = 6

DECODE_CASES: dict[str, tuple[Sequence[tuple[Side, Message]], tuple[Side, Message], Code]] = {
    "a prompt for an old uid": ([(UP, stop(1))], (UP, prompt(1, 0, 2, 2)), Code.WRONG_UID),
    "a prompt for a running uid": ([], (UP, prompt(1, 0, 2, 2)), Code.WRONG_UID),
    "uids that go back": ([(UP, prompt(9, 0, 2, 2))], (UP, prompt(8, 0, 2, 2)), Code.WRONG_UID),
    "a prompt that starts late": ([], (UP, prompt(2, 1, 3, 2)), Code.OUT_OF_ORDER),
    "a gap between chunks": ([(UP, prompt(2, 0, 9, 2))], (UP, prompt(2, 3, 9, 1)), Code.OUT_OF_ORDER),
    "a chunk twice": ([(UP, prompt(2, 0, 9, 2))], (UP, prompt(2, 0, 9, 2)), Code.OUT_OF_ORDER),
    "another total": ([(UP, prompt(2, 0, 9, 2))], (UP, prompt(2, 2, 8, 1)), Code.OUT_OF_ORDER),
    "past the total": ([(UP, prompt(2, 0, 3, 2))], (UP, prompt(2, 2, 3, 2)), Code.FIELD_INVALID),
    "a step for a stranger": ([], (UP, step(1, 2)), Code.WRONG_UID),
    "a step for half a prompt": ([(UP, prompt(2, 0, 9, 2))], (UP, step(2)), Code.WRONG_UID),
    "a step for a stopped uid": ([(UP, stop(1))], (UP, step(1)), Code.WRONG_UID),
    "a row twice": ([], (UP, step(1, 1)), Code.WRONG_UID),
    "a stop for a stranger": ([], (UP, stop(2)), Code.WRONG_UID),
    "a stop twice": ([(UP, stop(1))], (UP, stop(1)), Code.WRONG_UID),
    "a prompt after its stop": (
        [(UP, prompt(2, 0, 9, 2)), (UP, stop(2))],
        (UP, prompt(2, 2, 9, 2)),
        Code.WRONG_UID,
    ),
    "an Ack of nothing": ([], (DOWN, ack(FIRST)), Code.OUT_OF_ORDER),
    "an Ack twice": ([(UP, step(1)), (DOWN, ack(FIRST))], (DOWN, ack(FIRST)), Code.OUT_OF_ORDER),
    "Acks out of order": ([(UP, step(1)), (UP, step(1))], (DOWN, ack(FIRST + 1)), Code.OUT_OF_ORDER),
    "an Ack of a stop": ([(UP, stop(1))], (DOWN, ack(FIRST)), Code.OUT_OF_ORDER),
    "a step after Abort": ([(UP, Abort()), (DOWN, Done())], (UP, step(1)), Code.WRONG_UID),
    "an old uid after Abort": (
        [(UP, Abort()), (DOWN, Done())],
        (UP, prompt(1, 0, 2, 2)),
        Code.WRONG_UID,
    ),
    **{
        f"{type(command).__name__} before the Ack": ([(UP, step(1))], (UP, command), Code.OUT_OF_ORDER)
        for command in (ClearCache(), Abort(), Unload(), Shutdown())
    },
}

PIPE_CASES: dict[str, tuple[Sequence[tuple[Side, Message]], tuple[Side, Message], Code]] = {
    "a uid twice": ([], (UP, Generate(1, (5,), 9)), Code.WRONG_UID),
    "uids that go back": ([(UP, Generate(9, (5,), 9))], (UP, Generate(8, (5,), 9)), Code.WRONG_UID),
    "a Cancel before its Generate": ([], (UP, Cancel(2)), Code.WRONG_UID),
    "a Delta for a stranger": ([], (DOWN, delta((2, 0))), Code.WRONG_UID),
    "a Delta after Finished": ([(DOWN, finished(1))], (DOWN, delta((1, 0))), Code.WRONG_UID),
    "a Delta after its Error": ([(DOWN, failed(1))], (DOWN, delta((1, 0))), Code.WRONG_UID),
    "a first token that is not 0": ([], (DOWN, delta((1, 1))), Code.OUT_OF_ORDER),
    "a gap": ([(DOWN, delta((1, 0)))], (DOWN, delta((1, 2))), Code.OUT_OF_ORDER),
    "a repeat": ([(DOWN, delta((1, 0)))], (DOWN, delta((1, 0))), Code.OUT_OF_ORDER),
    "a repeat in one Delta": ([], (DOWN, delta((1, 0), (1, 0))), Code.OUT_OF_ORDER),
    "lists of two lengths": ([], (DOWN, Delta((1,), (0, 1), (9,))), Code.FIELD_INVALID),
    "Finished twice": ([(DOWN, finished(1))], (DOWN, finished(1)), Code.WRONG_UID),
    "Finished after Error": ([(DOWN, failed(1))], (DOWN, finished(1)), Code.WRONG_UID),
    "an Error for a stranger": ([], (DOWN, failed(2)), Code.WRONG_UID),
    "a Delta after Abort": ([(UP, Abort()), (DOWN, Done())], (DOWN, delta((1, 0))), Code.WRONG_UID),
    "a Pong unasked": ([], (DOWN, PONG), Code.OUT_OF_ORDER),
    "a Pong twice": ([(UP, Ping()), (DOWN, PONG)], (DOWN, PONG), Code.OUT_OF_ORDER),
}

CASES = [(LinkKind.DECODE, name) for name in DECODE_CASES] + [
    (LinkKind.PIPE_LEADER, name) for name in PIPE_CASES
]


def after(link: LinkKind, name: str) -> tuple[Pair, Side, Message, Code]:
    said, (side, wrong), code = (DECODE_CASES if link is LinkKind.DECODE else PIPE_CASES)[name]
    pair = pair_in(link, State.LOADED)
    for sender, message in said:
        pair.move(sender, message)
    return pair, side, wrong, code


@pytest.mark.parametrize(("link", "name"), CASES)
def test_it_is_not_sent(link: LinkKind, name: str) -> None:
    pair, side, wrong, code = after(link, name)
    with pytest.raises(LocalProtocolError) as caught:
        pair.end(side).send(wrong)
    assert caught.value.code is code
    assert type(wrong).__name__ in caught.value.detail
    assert pair.end(side).state is State.FAILED


@pytest.mark.parametrize(("link", "name"), CASES)
def test_it_is_not_accepted(link: LinkKind, name: str) -> None:
    pair, side, wrong, code = after(link, name)
    receiver = pair.end(side.peer)
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.receive_data(encode(wrong, EPOCH, pair.end(side).seq + 1))
    assert caught.value.code is code
    assert receiver.state is State.FAILED


def test_the_seq_of_the_cases() -> None:
    assert pair_in(LinkKind.DECODE, State.LOADED).upper.seq == FIRST - 1


def test_a_cancel_may_come_late() -> None:
    pair = pair_in(LinkKind.PIPE_LEADER, State.LOADED)
    pair.down(finished(1))
    pair.up(Cancel(1), Cancel(1))


def test_nothing_is_kept_of_what_is_over() -> None:
    decode = pair_in(LinkKind.DECODE, State.LOADED)
    pipe = pair_in(LinkKind.PIPE_LEADER, State.LOADED)
    decode.up(stop(1))
    pipe.down(finished(1))
    for uid in range(2, 500):
        decode.up(prompt(uid, 0, 1, 1))
        decode.down(ack(decode.upper.seq))
        decode.up(stop(uid))
        pipe.up(Generate(uid, (5,), 9))
        pipe.down(delta((uid, 0)), finished(uid))
    for end in (decode.upper, decode.lower):
        ledger = sequences(end)
        assert not ledger.prompts
        assert not ledger.running
        assert not ledger.steps
    for end in (pipe.upper, pipe.lower):
        assert not requests(end).tokens
