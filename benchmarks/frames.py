"""Cost of one frame in Python."""

from __future__ import annotations

import timeit
from collections.abc import Callable

from mlxtp.wire.frames import MAX_FRAME, Decoder, encode
from mlxtp.wire.messages import (
    Ack,
    Forward,
    Hello,
    Init,
    InitDone,
    Loaded,
    LoadShard,
    Message,
    PromptPart,
    SanityCheck,
    SanityDone,
    Welcome,
)
from mlxtp.wire.session import LinkKind, Session, Side

from .measures import Row, absolute
from .stage import Stage

_ROUNDS = 5
_PER_ROUND = 20_000

STEP = Forward((1,), (1,))


async def measure(stage: Stage) -> list[Row]:
    """The cost of a step of one row and of an Ack: the best of several rounds."""
    stage.say("frames")
    encoding = _best_us(lambda: encode(STEP, 1, 1))
    decoding = _best_us(_decode_step())
    step_us, ack_us = _protocol_us()
    figures = {
        "encode step": encoding,
        "decode step": decoding,
        "encode + decode step": encoding + decoding,
        "protocol send + receive step": step_us,
        "protocol send + receive Ack": ack_us,
    }
    return [absolute(name, [value]) for name, value in figures.items()]


def _decode_step() -> Callable[[], object]:
    frame = encode(STEP, 1, 1)
    decoder = Decoder()
    decoder.limit = MAX_FRAME

    def decode() -> None:
        decoder.feed(frame)
        while decoder.next_frame() is not None:
            pass

    return decode


def _protocol_us() -> tuple[float, float]:
    upper, lower = _decoding_link()
    seqs: list[int] = []

    def step() -> None:
        lower.receive_data(upper.send(STEP))
        seqs.append(upper.seq)

    def ack() -> None:
        upper.receive_data(lower.send(Ack(seqs.pop(0), 1000, 2000, 0xDEADBEEF)))

    def rounds(act: Callable[[], None]) -> float:
        return timeit.timeit(act, number=100) / 100 * 1e6

    # In turns, so that the steps that wait for their Ack stay as few as they are in life.
    pairs = [(rounds(step), rounds(ack)) for _ in range(_ROUNDS * _PER_ROUND // 100)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def _decoding_link() -> tuple[Session, Session]:
    """Both ends of a decode link with one running sequence."""
    upper = Session(LinkKind.DECODE, Side.UPPER, 1)
    lower = Session(LinkKind.DECODE, Side.LOWER, 1)
    life: list[tuple[Session, Session, Message]] = [
        (lower, upper, Hello(1, 1, 1, bytes(16), bytes(32))),
        (upper, lower, Welcome(1, bytes(32))),
        (upper, lower, Init()),
        (lower, upper, InitDone(1, 2)),
        (upper, lower, SanityCheck()),
        (lower, upper, SanityDone(2, (0, 1), 1)),
        (upper, lower, LoadShard("model", 512, ())),
        (lower, upper, Loaded(2048, 4096, 1, ())),
        (upper, lower, Forward((1,), (0,), (1,), (1,), prompts=(PromptPart(1),))),
    ]
    for sender, receiver, message in life:
        receiver.receive_data(sender.send(message))
    upper.receive_data(lower.send(Ack(upper.seq, 1, 1, 0)))
    return upper, lower


def _best_us(act: Callable[[], object]) -> float:
    return min(timeit.repeat(act, number=_PER_ROUND, repeat=_ROUNDS)) / _PER_ROUND * 1e6
