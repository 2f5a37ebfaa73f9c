"""Two protocols joined back to back, and the way to any state of any link."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache

from mlxtp.errors import Code
from mlxtp.wire.messages import Ack, Error, Generate, Message
from mlxtp.wire.protocol import LinkKind, LinkState, RequestFailed, Side, table
from mlxtp.wire.session import DecodeLedger, Received, RequestLedger, Session

from .forwards import of_prompt
from .samples import EXAMPLES

EPOCH = 7

Move = tuple[Side, type[Message]]

USUAL = {
    LinkKind.PIPE: LinkState.LINKED,
    LinkKind.CONTROL: LinkState.OPEN,
    LinkKind.REQUESTS: LinkState.OPEN,
    LinkKind.JOIN: LinkState.OFFERED,
}
"""The usual state of a link, unless that is LOADED."""


def example(kind: type[Message]) -> Message:
    """A message for one column of the table."""
    return Error(Code.BAD_REQUEST, "too long", 1) if kind is RequestFailed else EXAMPLES[kind]


@dataclass(frozen=True)
class Pair:
    """Both ends of one link; what one sends, the other receives at once."""

    upper: Session
    lower: Session

    @classmethod
    def of(cls, link: LinkKind) -> Pair:
        return cls(Session(link, Side.UPPER, EPOCH), Session(link, Side.LOWER, EPOCH))

    def end(self, side: Side) -> Session:
        return self.upper if side is Side.UPPER else self.lower

    def move(self, side: Side, message: Message) -> list[Received]:
        received = self.end(side.peer).receive_data(self.end(side).send(message))
        assert self.upper.state is self.lower.state
        return received

    def up(self, *messages: Message) -> None:
        """The upper side sends."""
        for message in messages:
            assert [r.message for r in self.move(Side.UPPER, message)] == [message]

    def down(self, *messages: Message) -> None:
        """The lower side sends."""
        for message in messages:
            assert [r.message for r in self.move(Side.LOWER, message)] == [message]


def path_to(link: LinkKind, target: LinkState) -> list[Move]:
    """A legal way from NEW to `target`: through LOADED if that can be, the shortest otherwise."""
    ways = _ways(link, LinkState.NEW)
    if LinkState.LOADED in ways and target not in _before_loaded(ways):
        after = _ways(link, LinkState.LOADED)
        if target in after:
            return [*ways[LinkState.LOADED], *after[target]]
    return ways[target]


@cache
def _ways(link: LinkKind, start: LinkState) -> dict[LinkState, list[Move]]:
    ways: dict[LinkState, list[Move]] = {start: []}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        for side, moves in table(link)[state].items():
            for kind, end in moves.items():
                if end not in ways:
                    ways[end] = [*ways[state], (side, kind)]
                    waiting.append(end)
    return ways


def _before_loaded(ways: dict[LinkState, list[Move]]) -> set[LinkState]:
    whole = ways[LinkState.LOADED]
    return {state for state, way in ways.items() if way == whole[: len(way)]}


def pair_in(link: LinkKind, target: LinkState) -> Pair:
    """A pair in `target`. Where the way leads through LOADED, uid 1 is live there."""
    pair = Pair.of(link)
    for side, kind in path_to(link, target):
        start_uid_1(pair)
        pair.move(side, example(kind))
    start_uid_1(pair)
    assert pair.upper.state is target
    return pair


def start_uid_1(pair: Pair) -> None:
    """Start one request, or one sequence with its prompt complete."""
    link, state = pair.upper.link, pair.upper.state
    if state is USUAL.get(link, LinkState.LOADED) and Generate in table(link)[state][Side.UPPER]:
        pair.up(Generate(1, (5, 6), 10))
    elif state is LinkState.LOADED:
        pair.up(of_prompt(1, 0, 2, (5, 6)))
        pair.down(Ack(pair.upper.seq, 1, 1, 0))


def requests(end: Session) -> RequestLedger:
    assert isinstance(end.ledger, RequestLedger)
    return end.ledger


def sequences(end: Session) -> DecodeLedger:
    assert isinstance(end.ledger, DecodeLedger)
    return end.ledger
