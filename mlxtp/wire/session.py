"""One end of one link; no I/O.

Messages to send go in and bytes come out; received bytes go in and messages come out. Anything that breaks
the rules of `messages.py`, `protocol.py` or `rules.py` raises.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from ..errors import Code, LinkError, LocalProtocolError, MlxtpError, RemoteProtocolError
from .frames import MAX_FRAME, Decoder, encode
from .messages import Done, Error, Message
from .protocol import OPENING, TABLES, TERMINAL, LinkKind, LinkState, Moves, RequestFailed, Side
from .rules import LEDGERS, Ledger, Violation

__all__ = ["LinkKind", "LinkState", "Received", "Session", "Side"]

#: The reply to the command of one of these states ends every earlier sequence or request.
_FORGETTING = frozenset((LinkState.UNLOADING, LinkState.CLOSING))


class Received(NamedTuple):
    """A message and the seq of the frame that carried it."""

    seq: int
    message: Message


class Session:
    """One end of a link, for one epoch.

    Each direction numbers its frames 1, 2, 3 ...; a frame of another epoch is dropped and counted. The first
    error is final: every later call raises the same error again.

    Not safe for several threads at once.
    """

    def __init__(self, link: LinkKind, side: Side, epoch: int) -> None:
        self.link = link
        self.side = side
        self.epoch = epoch
        self.seq = 0  #: number of the frame sent last
        self.dropped = 0  #: frames of other epochs that came and were ignored
        self.ledger: Ledger = LEDGERS[link]()
        self._peer = side.peer
        self._table = TABLES[link]
        self._rules = self.ledger.rules()
        self._decoder = Decoder()
        self._received_seq = 0
        self._failure: MlxtpError | None = None
        self._ended_here = False
        self._enter(LinkState.NEW)

    @property
    def state(self) -> LinkState:
        """State of the link, as far as this end knows."""
        return self._state

    @property
    def closed(self) -> bool:
        """True when the link has ended in order; EOF is then no error."""
        return self._state is LinkState.CLOSED

    @property
    def outstanding(self) -> int:
        """Replies of the lower side that have not come: Acks on a decode link, Pongs on a pipe."""
        return self.ledger.outstanding

    def send(self, message: Message) -> bytes:
        """Return the frame to transmit; `seq` is then its number.

        Raises LocalProtocolError for a message that is not legal now or holds a value that no peer would
        accept, LinkError (LINK_LOST) once the link has ended.
        """
        if self._failure is not None:
            self._fail_again()
        seq = self.seq + 1
        try:
            data = encode(message, self.epoch, seq, self._decoder.limit)
            self._advance(self._sendable, self.side, message, seq)
        except Violation as violation:
            if self._state in TERMINAL:
                raise LinkError(f"{self.link}: {violation}") from None
            self._fail(LocalProtocolError(f"{self.link}: {violation}", violation.code))
        except LocalProtocolError as error:
            self._fail(error)
        self.seq = seq
        return data

    def receive_data(self, data: bytes) -> list[Received]:
        """Return the messages that `data` completes.

        After an Error or a SessionEnd of this end, later data from the peer is discarded. Raises
        RemoteProtocolError; messages that came before the fault in the same `data` are lost with it.
        """
        if self._failure is not None:
            self._fail_again()
        received: list[Received] = []
        if self._ended_here:
            return received
        decoder = self._decoder
        decoder.feed(data)
        try:
            while (frame := decoder.next_frame()) is not None:
                message, epoch, seq = frame
                if epoch != self.epoch:
                    self.dropped += 1
                    continue
                if seq != self._received_seq + 1:
                    raise Violation(
                        Code.WRONG_SEQ,
                        f"{type(message).__name__} is numbered {seq}, expected {self._received_seq + 1}",
                    )
                self._received_seq = seq
                self._advance(self._receivable, self._peer, message, seq)
                received.append(Received(seq, message))
        except Violation as violation:
            self._fail(RemoteProtocolError(f"{self.link}: {violation}", violation.code))
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.link}: {error.detail}", error.code))
        return received

    def receive_eof(self) -> None:
        """Record the end of the peer's stream. Raises LinkError (LINK_LOST) unless the link had ended."""
        if self._failure is not None:
            self._fail_again()
        if self.closed or self._ended_here:
            return
        where = "in the middle of a frame" if self._decoder.pending else f"in state {self._state}"
        self._fail(LinkError(f"{self.link}: {self.link.who(self._peer)} is gone, {where}"))

    def _advance(self, moves: Moves, sender: Side, message: Message, seq: int) -> None:
        kind: type[Message] = type(message)
        if kind is Error and message.uid:  # type: ignore[attr-defined]
            kind = RequestFailed
        state = moves.get(kind)
        if state is None:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"{self.link.who(sender)} may not send {_name(kind)} in state {self._state}",
            )
        rule = self._rules.get(kind)
        if rule is not None:
            rule(message, seq)
        if state is not self._state:
            if kind is Done and self._state in _FORGETTING:
                self.ledger.forget()
            self._enter(state)
            self._ended_here = state in TERMINAL and sender is self.side

    def _enter(self, state: LinkState) -> None:
        self._state = state
        moves = self._table[state]
        self._sendable = moves[self.side]
        self._receivable = moves[self._peer]
        if state not in OPENING:
            self._decoder.limit = MAX_FRAME

    def _fail(self, failure: MlxtpError) -> NoReturn:
        self._enter(LinkState.FAILED)
        self._failure = failure
        raise failure from None

    def _fail_again(self) -> NoReturn:
        assert self._failure is not None
        raise type(self._failure)(self._failure.detail, self._failure.code)


def _name(kind: type[Message]) -> str:
    return "Error with a uid" if kind is RequestFailed else kind.__name__
