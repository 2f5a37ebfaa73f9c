"""One end of one link; no I/O.

Messages to send go in and bytes come out; received bytes go in and messages come out. Anything that breaks
the rules of `messages.py`, of `protocol.py` or of the ledgers below raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..errors import Code, LinkError, LocalProtocolError, MlxtpError, RemoteProtocolError
from .frames import MAX_FRAME, Decoder, encode
from .messages import (
    DIGEST_BYTES,
    MAX_CONTEXT,
    MAX_WIDTH,
    Accepted,
    Ack,
    Arrange,
    Cancel,
    ChosenTokens,
    Delta,
    Done,
    Error,
    Evict,
    FetchBlocks,
    FetchedBlocks,
    Finished,
    Forward,
    Gathered,
    Generate,
    Message,
    Ping,
    Pong,
    Prefilled,
    PromptPart,
    Restore,
    SanityCheck,
    ScoredDelta,
    SessionStop,
    Shutdown,
    SideChannel,
    Spill,
    TimeCollectives,
    Unload,
)
from .protocol import OPENING, TERMINAL, LinkKind, LinkState, Moves, RequestFailed, Side, table

__all__ = ["LinkKind", "LinkState", "Received", "Session", "Side"]

# --- rules between the messages of a link beyond their order: uids, offsets, indices, one reply each -----
# Both ends keep a ledger, which sees every message, sent or received, in the link's order. `Session` calls
# its rules with a message that the table in `protocol.py` allows and the seq of its frame. They raise
# `Violation`.

Rules = dict[type[Message], Callable[[Any, int], None]]


class Violation(Exception):
    """A rule was broken. `Session` turns it into a local or a remote error, depending on the sender."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class PipeLedger:
    """Pings and rounds of the side channel, with their replies, between an agent and any rank."""

    def __init__(self) -> None:
        self.outstanding = 0  #: pings whose Pong has not come
        self.round = 0  #: number of the last round of the side channel
        self.round_is_open = False
        self.rounds_are_over = False

    def rules(self) -> Rules:
        return {
            Ping: self._ping,
            Pong: self._pong,
            SideChannel: self._side_channel,
            Gathered: self._gathered,
        }

    def forget(self) -> None:
        """Do nothing: no request ends here.

        `Session` calls it after the reply to a command that ends every request.
        """

    def _ping(self, ping: Ping, seq: int) -> None:
        self.outstanding += 1

    def _pong(self, pong: Pong, seq: int) -> None:
        if not self.outstanding:
            raise Violation(Code.OUT_OF_ORDER, "Pong without a Ping that waits for it")
        self.outstanding -= 1

    def _side_channel(self, ours: SideChannel, seq: int) -> None:
        # A round may also cross the error that ends them all; it gets no other reply.
        if self.round_is_open or ours.round != self.round + 1:
            raise Violation(
                Code.OUT_OF_ORDER, f"SideChannel with round {ours.round} after round {self.round}"
            )
        self.round = ours.round
        self.round_is_open = True

    def _gathered(self, gathered: Gathered, seq: int) -> None:
        if gathered.error and gathered.data:
            raise Violation(Code.FIELD_INVALID, "Gathered with both bytes and an error")
        if self.rounds_are_over:
            raise Violation(Code.OUT_OF_ORDER, "Gathered after the error that ended all rounds")
        if gathered.error:
            self.rounds_are_over = True
        elif not self.round_is_open or gathered.round != self.round:
            raise Violation(Code.OUT_OF_ORDER, f"Gathered for round {gathered.round}, which is not open")
        self.round_is_open = False


class RequestLedger(PipeLedger):
    """Requests between an agent and rank 0, and the tokens that came back."""

    def __init__(self) -> None:
        super().__init__()
        self.last_uid = 0
        self.tokens: dict[int, int] = {}  #: Tokens delivered for each live uid: the index of its next one.

    def rules(self) -> Rules:
        requests: Rules = {
            Generate: self._generate,
            Cancel: self._cancel,
            Accepted: self._live,
            Prefilled: self._live,
            Delta: self._delta,
            ScoredDelta: self._scored,
            Finished: self._finish,
            RequestFailed: self._finish,
        }
        return super().rules() | requests

    def forget(self) -> None:
        self.tokens.clear()

    def _generate(self, generate: Generate, seq: int) -> None:
        if generate.uid <= self.last_uid:
            raise Violation(Code.WRONG_UID, f"Generate for uid {generate.uid} after uid {self.last_uid}")
        if generate.answered >= min(len(generate.tokens), generate.max_tokens):
            raise Violation(
                Code.FIELD_INVALID,
                f"Generate with {generate.answered} tokens of answer, {len(generate.tokens)} in all and "
                f"{generate.max_tokens} at most",
            )
        self.last_uid = generate.uid
        self.tokens[generate.uid] = generate.answered

    def _cancel(self, cancel: Cancel, seq: int) -> None:
        # The request may have ended while this was on its way.
        if cancel.uid > self.last_uid:
            raise Violation(Code.WRONG_UID, f"Cancel for uid {cancel.uid}, which no Generate named")

    def _live(self, report: Accepted | Prefilled, seq: int) -> None:
        if report.uid not in self.tokens:
            raise Violation(
                Code.WRONG_UID, f"{type(report).__name__} for uid {report.uid}, which is not live"
            )

    def _scored(self, scored: ScoredDelta, seq: int) -> None:
        count = len(scored.tokens)
        if len(scored.logprobs) != count or not (
            len(scored.top_tokens) == len(scored.top_logprobs) == count * scored.top
        ):
            raise Violation(
                Code.FIELD_INVALID, "ScoredDelta with tokens and log-probabilities that do not fit"
            )
        self._deliver(scored, scored.uid, scored.index)
        self.tokens[scored.uid] += count - 1

    def _delta(self, delta: Delta, seq: int) -> None:
        if not len(delta.uids) == len(delta.indices) == len(delta.tokens):
            raise Violation(Code.FIELD_INVALID, "Delta with uids, indices and tokens of different lengths")
        for uid, index in zip(delta.uids, delta.indices, strict=True):
            self._deliver(delta, uid, index)

    def _deliver(self, message: Message, uid: int, index: int) -> None:
        expected = self.tokens.get(uid)
        if expected is None:
            raise Violation(Code.WRONG_UID, f"{type(message).__name__} for uid {uid}, which is not live")
        if index != expected:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"{type(message).__name__} with token {index} of uid {uid}, expected token {expected}",
            )
        self.tokens[uid] = index + 1

    def _finish(self, end: Finished | Error, seq: int) -> None:
        if self.tokens.pop(end.uid, None) is None:
            raise Violation(Code.WRONG_UID, f"{type(end).__name__} for uid {end.uid}, which is not live")


#: commands that come between steps only
_COMMANDS: tuple[type[Message], ...] = (SanityCheck, Unload, TimeCollectives, Shutdown)


class DecodeLedger:
    """Sequences and steps between rank 0 and another rank."""

    def __init__(self) -> None:
        self.last_uid = 0
        #: Each uid whose prompt is incomplete: (offset of its next chunk, length of the prompt).
        self.prompts: dict[int, tuple[int, int]] = {}
        #: Uids that a step may name, each with the token limit of its KV cache.
        self.running: dict[int, int] = {}
        #: Uids of ended sequences whose KV cache is still held, with its length in tokens.
        self.kept: dict[int, int] = {}
        #: Blocks to fetch for each uid until its Restore, or those that the rank has, and tokens of each.
        self.fetches: dict[int, tuple[int, int]] = {}
        self.reading: dict[int, int] = {}  #: Blocks to fetch for each uid that has no reply.
        self.chosen = 0  #: The newest forward whose choice was told.
        self.steps: deque[int] = deque()  #: Seqs of the steps that wait for their Ack, oldest first.

    @property
    def outstanding(self) -> int:
        """Steps whose Ack has not come."""
        return len(self.steps)

    def rules(self) -> Rules:
        return {
            Forward: self._forward,
            ChosenTokens: self._choose,
            SessionStop: self._stop,
            Evict: self._evict,
            Arrange: self._arrange,
            Spill: self._spill,
            FetchBlocks: self._fetch,
            FetchedBlocks: self._fetched,
            Restore: self._restore,
            Ack: self._ack,
            **dict.fromkeys(_COMMANDS, self._command),
        }

    def forget(self) -> None:
        """Forget all sequences, after the reply to the command that ends them."""
        self.prompts.clear()
        self.running.clear()
        self.kept.clear()
        self.fetches.clear()
        self.reading.clear()
        self.chosen = 0

    def _forward(self, forward: Forward, seq: int) -> None:
        rows, widths = forward.rows, forward.widths
        if len(forward.positions) != len(rows) or (widths and len(widths) != len(rows)):
            raise Violation(
                Code.FIELD_INVALID, "Forward with rows, positions and widths of different lengths"
            )
        if sum(widths) != len(forward.tokens):
            raise Violation(
                Code.FIELD_INVALID,
                f"Forward of {sum(widths)} tokens by its widths, {len(forward.tokens)} here",
            )
        if forward.prompts:
            self._prompts(forward)
        else:
            self._step(forward)
        self.steps.append(seq)

    def _step(self, step: Forward) -> None:
        rows, widths, running = step.rows, step.widths, self.running
        if len(rows) > 1 and len(set(rows)) != len(rows):
            raise Violation(Code.WRONG_UID, "Forward names a uid twice")
        if widths and max(widths) > MAX_WIDTH:
            raise Violation(Code.FIELD_INVALID, f"Forward of a row that feeds {max(widths)} tokens")
        for uid, at, width in zip(rows, step.positions, widths or (1,) * len(rows), strict=True):
            held = running.get(uid)
            if held is None:
                raise Violation(Code.WRONG_UID, f"Forward for uid {uid}, which is not running")
            if at > held:
                raise Violation(
                    Code.OUT_OF_ORDER, f"Forward at position {at} of uid {uid}, which holds {held}"
                )
            running[uid] = at + (width or 1)

    def _prompts(self, forward: Forward) -> None:
        """Check the parts of prompts that a forward reads."""
        count = len(forward.rows)
        if len(forward.prompts) != count or len(forward.widths) != count:
            raise Violation(Code.FIELD_INVALID, f"Forward with {count} rows and other numbers of prompts")
        ended: dict[int, int] = {}
        parts = zip(forward.rows, forward.positions, forward.widths, forward.prompts, strict=True)
        for uid, at, width, prompt in parts:
            if uid in self.prompts and count == 1:
                if prompt.source or prompt.take:
                    raise Violation(Code.OUT_OF_ORDER, f"Forward: uid {uid} names a source in a later part")
                expected = self.prompts.pop(uid)
            elif uid > self.last_uid:
                self._start(uid, at, prompt)
                expected, self.last_uid = (at, prompt.total), uid
            else:
                raise Violation(
                    Code.WRONG_UID,
                    f"Forward: a prompt for uid {uid}, which is complete or older than {self.last_uid}",
                )
            if (at, prompt.total) != expected:
                raise Violation(
                    Code.OUT_OF_ORDER,
                    f"Forward: a prompt of uid {uid} at {at} of {prompt.total}, expected {expected[0]} of "
                    f"{expected[1]}",
                )
            end = at + width
            if not width or end > prompt.total or (end < prompt.total and count > 1):
                raise Violation(
                    Code.FIELD_INVALID,
                    f"Forward: {width} tokens of uid {uid} at {at} of its prompt of {prompt.total}",
                )
            if end < prompt.total:
                self.prompts[uid] = end, prompt.total
            else:
                ended[uid] = end
            if prompt.save:
                self._save(prompt.save, end, whole=uid in ended)
            self._cover(forward, prompt.covers, end if prompt.save else 0)
        # Last, so that none of them can start from another one, which this forward has yet to compute.
        self.running |= ended

    def _save(self, uid: int, length: int, *, whole: bool) -> None:
        """Check the uid of a copy, and that it is of a prompt without its end."""
        if uid <= self.last_uid:
            raise Violation(
                Code.WRONG_UID, f"Forward: a KV cache saved as uid {uid} after uid {self.last_uid}"
            )
        if whole:
            raise Violation(
                Code.FIELD_INVALID, f"Forward: a KV cache saved as uid {uid} at the end of its prompt"
            )
        self.last_uid = uid
        self.kept[uid] = length

    def _start(self, uid: int, offset: int, prompt: PromptPart) -> None:
        """Check that a new prompt begins behind the tokens that its source holds, if it has one."""
        source = prompt.source
        if prompt.take and not source:
            raise Violation(Code.FIELD_INVALID, f"Forward: uid {uid} takes over a source of no name")
        if not source:
            if offset:
                raise Violation(Code.OUT_OF_ORDER, f"Forward: uid {uid} starts at {offset}, behind nothing")
            return
        held = self.kept.get(source) or (0 if prompt.take else self.running.get(source, 0))
        if not held:
            raise Violation(
                Code.WRONG_UID, f"Forward: uid {uid} starts from uid {source}, which is not there"
            )
        if not 1 <= offset <= held:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"Forward: uid {uid} starts behind {offset} tokens of uid {source}, which holds {held}",
            )
        if prompt.take:
            del self.kept[source]

    def _choose(self, choice: ChosenTokens, seq: int) -> None:
        if choice.forward <= self.chosen:
            raise Violation(
                Code.OUT_OF_ORDER, f"ChosenTokens of forward {choice.forward} after forward {self.chosen}"
            )
        self.chosen = choice.forward

    def _stop(self, stop: SessionStop, seq: int) -> None:
        held = self.running.pop(stop.uid, None)
        if held is None:
            held, _ = self.prompts.pop(stop.uid, (None, 0))
        if held is None:
            raise Violation(Code.WRONG_UID, f"SessionStop for uid {stop.uid}, which is not live")
        if stop.keep > held:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"SessionStop keeps {stop.keep} tokens of uid {stop.uid}, which holds {held}",
            )
        self._cover(stop, stop.covers, stop.keep)
        if stop.keep:
            self.kept[stop.uid] = stop.keep

    def _cover(self, message: Message, uids: tuple[int, ...], length: int) -> None:
        """Check that a cache of `length` tokens can begin with those of `uids`."""
        for uid in uids:
            if not 0 < self.kept.get(uid, 0) < length:
                raise Violation(
                    Code.WRONG_UID,
                    f"{type(message).__name__}: a KV cache of {length} tokens covers uid {uid}, "
                    f"which holds {self.kept.get(uid, 0)}",
                )

    def _evict(self, evict: Evict, seq: int) -> None:
        for uid in evict.uids:
            if self.kept.pop(uid, None) is None:
                raise Violation(Code.WRONG_UID, f"Evict for uid {uid}, which is not kept")

    def _arrange(self, arrange: Arrange, seq: int) -> None:
        rooms, rows = len(arrange.rooms), len(self.running)
        if 0 < rooms < rows:
            raise Violation(Code.FIELD_INVALID, f"Arrange with {rooms} rooms for {rows} rows")
        if arrange.lanes and len(arrange.lanes) != (rooms or rows):
            raise Violation(
                Code.FIELD_INVALID, f"Arrange with {len(arrange.lanes)} lanes for {rooms or rows} rows"
            )

    def _spill(self, spill: Spill, seq: int) -> None:
        uid, (offset, _) = spill.uid, self.prompts.get(spill.uid, (0, 0))
        held = offset or self.running.get(uid) or self.kept.get(uid, 0)
        if not spill.start < spill.end <= held:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"Spill of tokens {spill.start} to {spill.end} of uid {uid}, which holds {held}",
            )

    def _fetch(self, fetch: FetchBlocks, seq: int) -> None:
        blocks, rest = divmod(len(fetch.digests), DIGEST_BYTES)
        if rest or blocks * fetch.block > MAX_CONTEXT:
            raise Violation(
                Code.FIELD_INVALID,
                f"FetchBlocks of {blocks} blocks of {fetch.block} tokens in {len(fetch.digests)} bytes",
            )
        if fetch.uid <= self.last_uid:
            raise Violation(Code.WRONG_UID, f"FetchBlocks for uid {fetch.uid} after uid {self.last_uid}")
        self.last_uid = fetch.uid
        self.fetches[fetch.uid] = blocks, fetch.block
        self.reading[fetch.uid] = blocks

    def _fetched(self, fetched: FetchedBlocks, seq: int) -> None:
        wanted = self.reading.pop(fetched.uid, None)
        if wanted is None:
            raise Violation(Code.WRONG_UID, f"FetchedBlocks for uid {fetched.uid}, which is not wanted")
        if fetched.blocks > wanted:
            raise Violation(
                Code.FIELD_INVALID,
                f"FetchedBlocks with {fetched.blocks} of {wanted} blocks of uid {fetched.uid}",
            )
        if fetched.uid in self.fetches:  # else a Restore has crossed it
            self.fetches[fetched.uid] = fetched.blocks, self.fetches[fetched.uid][1]

    def _restore(self, restore: Restore, seq: int) -> None:
        blocks, tokens = self.fetches.pop(restore.uid, (None, 0))
        if blocks is None:
            raise Violation(Code.WRONG_UID, f"Restore of uid {restore.uid}, which was not fetched")
        if not restore.blocks:
            return
        if restore.uid in self.reading or restore.blocks > blocks:
            raise Violation(
                Code.OUT_OF_ORDER, f"Restore of {restore.blocks} blocks of uid {restore.uid}, which has fewer"
            )
        self.kept[restore.uid] = restore.blocks * tokens

    def _ack(self, ack: Ack, seq: int) -> None:
        if not self.steps:
            raise Violation(Code.OUT_OF_ORDER, f"Ack of step {ack.step}; no step waits for one")
        expected = self.steps.popleft()
        if ack.step != expected:
            raise Violation(Code.OUT_OF_ORDER, f"Ack of step {ack.step}, expected step {expected}")

    def _command(self, command: Message, seq: int) -> None:
        if self.steps:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"{type(command).__name__} while {len(self.steps)} steps wait for their Ack",
            )


class ControlLedger:
    """No rules: between agents, and with a joiner, the order of messages is enough."""

    outstanding = 0

    def rules(self) -> Rules:
        return {}

    def forget(self) -> None:
        """Do nothing: no command here ends anything."""


Ledger = PipeLedger | DecodeLedger | ControlLedger

LEDGERS: dict[LinkKind, type[Ledger]] = {
    LinkKind.PIPE: PipeLedger,
    LinkKind.PIPE_LEADER: RequestLedger,
    LinkKind.DECODE: DecodeLedger,
    LinkKind.CONTROL: ControlLedger,
    LinkKind.REQUESTS: RequestLedger,
    LinkKind.JOIN: ControlLedger,
}


# --- one end of one link ---------------------------------------------------------------------------------

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
        self._rules = self.ledger.rules()
        self._decoder = Decoder()
        self._received_seq = 0
        self._failure: MlxtpError | None = None
        self._ended_here = False
        self._enter(LinkState.NEW)

    @property
    def closed(self) -> bool:
        """True when the link has ended in order; EOF is then no error."""
        return self.state is LinkState.CLOSED

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
            if self.state in TERMINAL:
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
        where = "in the middle of a frame" if self._decoder.pending else f"in state {self.state}"
        self._fail(LinkError(f"{self.link}: {self.link.who(self._peer)} is gone, {where}"))

    def _advance(self, moves: Moves, sender: Side, message: Message, seq: int) -> None:
        kind: type[Message] = type(message)
        if kind is Error and message.uid:  # type: ignore[attr-defined]
            kind = RequestFailed
        state = moves.get(kind)
        if state is None:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"{self.link.who(sender)} may not send {_name(kind)} in state {self.state}",
            )
        rule = self._rules.get(kind)
        if rule is not None:
            rule(message, seq)
        if state is not self.state:
            if kind is Done and self.state in _FORGETTING:
                self.ledger.forget()
            self._enter(state)
            self._ended_here = state in TERMINAL and sender is self.side

    def _enter(self, state: LinkState) -> None:
        self.state = state  #: Of the link, as far as this end knows.
        moves = table(self.link)[state]
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
