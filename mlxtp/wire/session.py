"""One end of one link: messages to bytes and back, without I/O.

It raises for anything that breaks the rules of `messages.py`, of `protocol.py` or of the ledgers below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ..errors import Code, LinkError, LocalProtocolError, MlxtpError, RemoteProtocolError
from . import messages as msg
from .frames import MAX_FRAME, Decoder, encode
from .protocol import OPENING, TERMINAL, LinkKind, LinkState, Moves, RequestFailed, Side, table

__all__ = ["LinkKind", "LinkState", "Received", "Session", "Side"]

# --- rules between the messages of a link beyond their order: uids, offsets, indices, one reply each -----
# Both ends keep a ledger. For every message, sent or received, that the table in `protocol.py` allows,
# `Session` calls its rule with the message and the seq of its frame. A rule raises `Violation`, which
# `Session` turns into a local or a remote error, depending on the sender.

Rules = dict[type[msg.Message], Callable[[Any, int], None]]


class Violation(Exception):
    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(detail)
        self.code = code


_disorder = partial(Violation, Code.OUT_OF_ORDER)
_bad_field = partial(Violation, Code.FIELD_INVALID)
_wrong_uid = partial(Violation, Code.WRONG_UID)


class LinkLedger:
    """Base of all ledgers. Control and join links use it as it is: their only rule is the order."""

    outstanding = 0  #: replies that have not arrived

    def rules(self) -> Rules:
        return {}

    def forget(self) -> None: ...


class PipeLedger(LinkLedger):
    """Pings and rounds of the side channel, with their replies, between an agent and any rank."""

    def __init__(self) -> None:
        self.outstanding = 0  #: pings without a Pong yet
        self.round = 0  #: number of the last round of the side channel
        self.round_is_open = False
        self.rounds_are_over = False

    def rules(self) -> Rules:
        return {
            msg.Ping: self._ping,
            msg.Pong: self._pong,
            msg.SideChannel: self._side_channel,
            msg.Gathered: self._gathered,
        }

    def _ping(self, ping: msg.Ping, seq: int) -> None:
        self.outstanding += 1

    def _pong(self, pong: msg.Pong, seq: int) -> None:
        if not self.outstanding:
            raise _disorder("Pong without a Ping that waits for it")
        self.outstanding -= 1

    def _side_channel(self, ours: msg.SideChannel, seq: int) -> None:
        # A round may also cross the error that ends them all; it gets no other reply.
        if self.round_is_open or ours.round != self.round + 1:
            raise _disorder(f"SideChannel with round {ours.round} after round {self.round}")
        self.round = ours.round
        self.round_is_open = True

    def _gathered(self, gathered: msg.Gathered, seq: int) -> None:
        if gathered.error and gathered.data:
            raise _bad_field("Gathered with both bytes and an error")
        if self.rounds_are_over:
            raise _disorder("Gathered after the error that ended all rounds")
        if gathered.error:
            self.rounds_are_over = True
        elif not self.round_is_open or gathered.round != self.round:
            raise _disorder(f"Gathered for round {gathered.round}, which is not open")
        self.round_is_open = False


class RequestLedger(PipeLedger):
    """Requests between an agent and rank 0, and the tokens that come back."""

    def __init__(self) -> None:
        super().__init__()
        self.last_uid = 0
        self.tokens: dict[int, int] = {}  #: Delivered tokens of each live uid: the index of its next token.

    def rules(self) -> Rules:
        requests: Rules = {
            msg.Generate: self._generate,
            msg.Cancel: self._cancel,
            msg.Accepted: self._live,
            msg.Prefilled: self._live,
            msg.Delta: self._delta,
            msg.ScoredDelta: self._scored,
            msg.Vectors: self._vectors,
            msg.Finished: self._finish,
            RequestFailed: self._finish,
        }
        return super().rules() | requests

    def forget(self) -> None:
        self.tokens.clear()

    def _generate(self, generate: msg.Generate, seq: int) -> None:
        if generate.uid <= self.last_uid:
            raise _wrong_uid(f"Generate for uid {generate.uid} after uid {self.last_uid}")
        if generate.answered >= min(len(generate.tokens), generate.max_tokens):
            raise _bad_field(
                f"Generate with {generate.answered} tokens of answer, {len(generate.tokens)} in all and "
                f"{generate.max_tokens} at most"
            )
        if (lengths := generate.pooling.lengths) and sum(lengths) != len(generate.tokens):
            raise _bad_field(f"Generate of {sum(lengths)} tokens by its lengths, {len(generate.tokens)} here")
        self.last_uid = generate.uid
        self.tokens[generate.uid] = generate.answered

    def _cancel(self, cancel: msg.Cancel, seq: int) -> None:
        # The request may have ended while this was on its way.
        if cancel.uid > self.last_uid:
            raise _wrong_uid(f"Cancel for uid {cancel.uid}, which no Generate named")

    def _live(self, report: msg.Accepted | msg.Prefilled | msg.ScoredDelta, seq: int) -> None:
        if report.uid not in self.tokens:
            raise _wrong_uid(f"{type(report).__name__} for uid {report.uid}, which is not live")

    def _vectors(self, vectors: msg.Vectors, seq: int) -> None:
        if len(vectors.data) % (4 * len(vectors.texts)):
            raise _bad_field(f"Vectors of {len(vectors.texts)} texts in {len(vectors.data)} bytes")
        if vectors.uid not in self.tokens:
            raise _wrong_uid(f"Vectors for uid {vectors.uid}, which is not live")

    def _scored(self, scored: msg.ScoredDelta, seq: int) -> None:
        count = len(scored.tokens)
        others = {len(scored.top_tokens), len(scored.top_logprobs)}
        if len(scored.logprobs) != count or others != {count * scored.top}:
            raise _bad_field("ScoredDelta with tokens and log-probabilities that do not fit")
        if scored.prompt:
            self._live(scored, seq)
            return
        self._deliver(scored, scored.uid, scored.index)
        self.tokens[scored.uid] += count - 1

    def _delta(self, delta: msg.Delta, seq: int) -> None:
        if not len(delta.uids) == len(delta.indices) == len(delta.tokens):
            raise _bad_field("Delta with uids, indices and tokens of different lengths")
        for uid, index in zip(delta.uids, delta.indices, strict=True):
            self._deliver(delta, uid, index)

    def _deliver(self, message: msg.Message, uid: int, index: int) -> None:
        expected = self.tokens.get(uid)
        if expected is None:
            raise _wrong_uid(f"{type(message).__name__} for uid {uid}, which is not live")
        if index != expected:
            name = type(message).__name__
            raise _disorder(f"{name} with token {index} of uid {uid}, expected token {expected}")
        self.tokens[uid] = index + 1

    def _finish(self, end: msg.Finished | msg.Error, seq: int) -> None:
        if self.tokens.pop(end.uid, None) is None:
            raise _wrong_uid(f"{type(end).__name__} for uid {end.uid}, which is not live")


class DecodeLedger(LinkLedger):
    def __init__(self) -> None:
        self.last_uid = 0
        #: For each uid with an incomplete prompt: (offset of its next chunk, length of the prompt).
        self.prompts: dict[int, tuple[int, int]] = {}
        #: Uids that a step may name, each with the most tokens that its KV cache may hold.
        self.running: dict[int, int] = {}
        #: Uids of ended sequences whose KV cache is still held, with its length in tokens.
        self.kept: dict[int, int] = {}
        #: For each uid until its Restore: blocks to fetch, then fetched blocks; and tokens of a block.
        self.fetches: dict[int, tuple[int, int]] = {}
        self.reading: dict[int, int] = {}  #: Blocks to fetch for each uid without a reply.
        self.chosen = 0  #: The newest forward with ChosenTokens.
        self.steps: deque[int] = deque()  #: Seqs of the steps that wait for their Ack, oldest first.

    @property
    def outstanding(self) -> int:  # type: ignore[override]
        return len(self.steps)

    def rules(self) -> Rules:
        return {
            msg.Forward: self._forward,
            msg.ChosenTokens: self._choose,
            msg.SessionStop: self._stop,
            msg.Evict: self._evict,
            msg.Arrange: self._arrange,
            msg.Spill: self._spill,
            msg.FetchBlocks: self._fetch,
            msg.FetchedBlocks: self._fetched,
            msg.Restore: self._restore,
            msg.Ack: self._ack,
            **dict.fromkeys((msg.SanityCheck, msg.Unload, msg.TimeCollectives, msg.Shutdown), self._command),
        }

    def forget(self) -> None:
        for held in (self.prompts, self.running, self.kept, self.fetches, self.reading):
            held.clear()
        self.chosen = 0

    def _forward(self, forward: msg.Forward, seq: int) -> None:
        rows, widths = forward.rows, forward.widths
        if len(forward.positions) != len(rows) or (widths and len(widths) != len(rows)):
            raise _bad_field("Forward with rows, positions and widths of different lengths")
        if sum(widths) != len(forward.tokens):
            raise _bad_field(f"Forward of {sum(widths)} tokens by its widths, {len(forward.tokens)} here")
        if len(rows) > 1 and len(set(rows)) != len(rows):
            raise _wrong_uid("Forward names a uid twice")
        if forward.gathered and not set(forward.gathered) <= set(rows):
            raise _wrong_uid(f"Forward gathers uids {forward.gathered} of rows {rows}")
        if forward.prompts:
            self._prompts(forward)
        else:
            self._step(forward)
        self.steps.append(seq)

    def _step(self, step: msg.Forward) -> None:
        rows, widths, running = step.rows, step.widths, self.running
        if widths and max(widths) > msg.MAX_WIDTH:
            raise _bad_field(f"Forward of a row that feeds {max(widths)} tokens")
        for uid, at, width in zip(rows, step.positions, widths or (1,) * len(rows), strict=True):
            held = running.get(uid)
            if held is None:
                raise _wrong_uid(f"Forward for uid {uid}, which is not running")
            if at > held:
                raise _disorder(f"Forward at position {at} of uid {uid}, which holds {held}")
            running[uid] = at + (width or 1)

    def _prompts(self, forward: msg.Forward) -> None:
        count = len(forward.rows)
        if len(forward.prompts) != count or len(forward.widths) != count:
            raise _bad_field(f"Forward with {count} rows and other numbers of prompts")
        ended: dict[int, int] = {}
        parts = zip(forward.rows, forward.positions, forward.widths, forward.prompts, strict=True)
        for uid, at, width, prompt in parts:
            total = prompt.total
            if uid in self.prompts:
                if prompt.source or prompt.take:
                    raise _disorder(f"Forward: uid {uid} names a source in a later part")
                expected = self.prompts.pop(uid)
            elif uid > self.last_uid:
                self._start(uid, at, prompt)
                expected, self.last_uid = (at, total), uid
            else:
                last = self.last_uid
                raise _wrong_uid(f"Forward: a prompt for uid {uid}, which is complete or older than {last}")
            if (at, total) != expected:
                was, length = expected
                raise _disorder(
                    f"Forward: a prompt of uid {uid} at {at} of {total}, expected {was} of {length}"
                )
            end = at + width
            if not width or end > total or (end < total) != forward.unfinished:
                raise _bad_field(f"Forward: {width} tokens of uid {uid} at {at} of its prompt of {total}")
            if end < total:
                self.prompts[uid] = end, total
            else:
                ended[uid] = end
        # Add them last, so that none can start from another prompt of the same forward.
        self.running |= ended
        for at, width, prompt in zip(forward.positions, forward.widths, forward.prompts, strict=True):
            if prompt.save:
                self._save(prompt.save, at + width, whole=bool(ended))
            self._cover(forward, prompt.covers, at + width if prompt.save else 0)

    def _save(self, uid: int, length: int, *, whole: bool) -> None:
        if uid <= self.last_uid:
            raise _wrong_uid(f"Forward: a KV cache saved as uid {uid} after uid {self.last_uid}")
        if whole:
            raise _bad_field(f"Forward: a KV cache saved as uid {uid} at the end of its prompt")
        self.last_uid = uid
        self.kept[uid] = length

    def _start(self, uid: int, offset: int, prompt: msg.PromptPart) -> None:
        source = prompt.source
        if not source:
            if prompt.take:
                raise _bad_field(f"Forward: uid {uid} takes over a source of no name")
            if offset:
                raise _disorder(f"Forward: uid {uid} starts at {offset}, behind nothing")
            return
        held = self.kept.get(source) or (0 if prompt.take else self.running.get(source, 0))
        if not held:
            raise _wrong_uid(f"Forward: uid {uid} starts from uid {source}, which is not there")
        if not 1 <= offset <= held:
            raise _disorder(
                f"Forward: uid {uid} starts behind {offset} tokens of uid {source}, which holds {held}"
            )
        if prompt.take:
            del self.kept[source]

    def _choose(self, choice: msg.ChosenTokens, seq: int) -> None:
        if choice.forward <= self.chosen:
            raise _disorder(f"ChosenTokens of forward {choice.forward} after forward {self.chosen}")
        self.chosen = choice.forward

    def _stop(self, stop: msg.SessionStop, seq: int) -> None:
        held = self.running.pop(stop.uid, None)
        if held is None:
            held, _ = self.prompts.pop(stop.uid, (None, 0))
        if held is None:
            raise _wrong_uid(f"SessionStop for uid {stop.uid}, which is not live")
        if stop.keep > held:
            raise _disorder(f"SessionStop keeps {stop.keep} tokens of uid {stop.uid}, which holds {held}")
        self._cover(stop, stop.covers, stop.keep)
        if stop.keep:
            self.kept[stop.uid] = stop.keep

    def _cover(self, message: msg.Message, uids: tuple[int, ...], length: int) -> None:
        """Check that the caches of `uids` can be prefixes of a cache of `length` tokens."""
        for uid in uids:
            if not 0 < self.kept.get(uid, 0) < length:
                name, held = type(message).__name__, self.kept.get(uid, 0)
                raise _wrong_uid(
                    f"{name}: a KV cache of {length} tokens covers uid {uid}, which holds {held}"
                )

    def _evict(self, evict: msg.Evict, seq: int) -> None:
        for uid in evict.uids:
            if self.kept.pop(uid, None) is None:
                raise _wrong_uid(f"Evict for uid {uid}, which is not kept")

    def _arrange(self, arrange: msg.Arrange, seq: int) -> None:
        rooms, rows = len(arrange.rooms), len(self.running)
        if 0 < rooms < rows:
            raise _bad_field(f"Arrange with {rooms} rooms for {rows} rows")
        if arrange.lanes and len(arrange.lanes) != (rooms or rows):
            raise _bad_field(f"Arrange with {len(arrange.lanes)} lanes for {rooms or rows} rows")

    def _spill(self, spill: msg.Spill, seq: int) -> None:
        uid, (offset, _) = spill.uid, self.prompts.get(spill.uid, (0, 0))
        held = offset or self.running.get(uid) or self.kept.get(uid, 0)
        if not spill.start < spill.end <= held:
            raise _disorder(f"Spill of tokens {spill.start} to {spill.end} of uid {uid}, which holds {held}")

    def _fetch(self, fetch: msg.FetchBlocks, seq: int) -> None:
        blocks, rest = divmod(len(fetch.digests), msg.DIGEST_BYTES)
        if rest or blocks * fetch.block > msg.MAX_CONTEXT:
            raise _bad_field(
                f"FetchBlocks of {blocks} blocks of {fetch.block} tokens in {len(fetch.digests)} bytes"
            )
        if fetch.uid <= self.last_uid:
            raise _wrong_uid(f"FetchBlocks for uid {fetch.uid} after uid {self.last_uid}")
        self.last_uid = fetch.uid
        self.fetches[fetch.uid] = blocks, fetch.block
        self.reading[fetch.uid] = blocks

    def _fetched(self, fetched: msg.FetchedBlocks, seq: int) -> None:
        wanted = self.reading.pop(fetched.uid, None)
        if wanted is None:
            raise _wrong_uid(f"FetchedBlocks for uid {fetched.uid}, which is not wanted")
        if fetched.blocks > wanted:
            raise _bad_field(f"FetchedBlocks with {fetched.blocks} of {wanted} blocks of uid {fetched.uid}")
        if fetched.uid in self.fetches:  # else a Restore crossed it
            self.fetches[fetched.uid] = fetched.blocks, self.fetches[fetched.uid][1]

    def _restore(self, restore: msg.Restore, seq: int) -> None:
        blocks, tokens = self.fetches.pop(restore.uid, (None, 0))
        if blocks is None:
            raise _wrong_uid(f"Restore of uid {restore.uid}, which was not fetched")
        if not restore.blocks:
            return
        if restore.uid in self.reading or restore.blocks > blocks:
            raise _disorder(f"Restore of {restore.blocks} blocks of uid {restore.uid}, which has fewer")
        self.kept[restore.uid] = restore.blocks * tokens

    def _ack(self, ack: msg.Ack, seq: int) -> None:
        if not self.steps:
            raise _disorder(f"Ack of step {ack.step}; no step waits for one")
        expected = self.steps.popleft()
        if ack.step != expected:
            raise _disorder(f"Ack of step {ack.step}, expected step {expected}")

    def _command(self, command: msg.Message, seq: int) -> None:
        if self.steps:
            raise _disorder(f"{type(command).__name__} while {len(self.steps)} steps wait for their Ack")


LEDGERS: dict[LinkKind, type[LinkLedger]] = {
    LinkKind.PIPE: PipeLedger,
    LinkKind.PIPE_LEADER: RequestLedger,
    LinkKind.DECODE: DecodeLedger,
    LinkKind.REQUESTS: RequestLedger,
}


# --- one end of one link ---------------------------------------------------------------------------------

#: The reply to the command of one of these states ends every earlier sequence or request.
_FORGETTING = frozenset((LinkState.UNLOADING, LinkState.CLOSING))


class Received(NamedTuple):
    seq: int
    message: msg.Message


class Session:
    """One end of a link, for one epoch. Not thread-safe.

    Each direction numbers its frames 1, 2, 3 ...; frames of other epochs are dropped and counted. The first
    error is final: every later call raises it again.
    """

    def __init__(self, link: LinkKind, side: Side, epoch: int) -> None:
        self.link = link
        self.side = side
        self.epoch = epoch
        self.seq = 0  #: number of the last sent frame
        self.dropped = 0  #: received frames of other epochs
        self.ledger = LEDGERS.get(link, LinkLedger)()
        self._peer = side.peer
        self._rules = self.ledger.rules()
        self._decoder = Decoder()
        self._received_seq = 0
        self._failure: MlxtpError | None = None
        self._ended_here = False
        self._enter(LinkState.NEW)

    @property
    def closed(self) -> bool:
        """True once the link ended in order, so that EOF is no error."""
        return self.state is LinkState.CLOSED

    @property
    def outstanding(self) -> int:
        return self.ledger.outstanding

    def send(self, message: msg.Message) -> bytes:
        """Return the frame to transmit, numbered `seq`. Raises LinkError (LINK_LOST) once the link has ended,
        LocalProtocolError for an illegal message or one with bad fields.
        """
        self._check_failure()
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
        """Return the messages that `data` completes; none after this end's Error or SessionEnd. Raises
        RemoteProtocolError, and loses the messages before the fault in `data`.
        """
        self._check_failure()
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
                    name, expected = type(message).__name__, self._received_seq + 1
                    raise Violation(Code.WRONG_SEQ, f"{name} is numbered {seq}, expected {expected}")
                self._received_seq = seq
                self._advance(self._receivable, self._peer, message, seq)
                received.append(Received(seq, message))
        except Violation as violation:
            self._fail(RemoteProtocolError(f"{self.link}: {violation}", violation.code))
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.link}: {error.detail}", error.code))
        return received

    def receive_eof(self) -> None:
        """Handle EOF. Raises LinkError (LINK_LOST) unless the link had ended."""
        self._check_failure()
        if self.closed or self._ended_here:
            return
        where = "in the middle of a frame" if self._decoder.pending else f"in state {self.state}"
        self._fail(LinkError(f"{self.link}: {self.link.who(self._peer)} is gone, {where}"))

    def _advance(self, moves: Moves, sender: Side, message: msg.Message, seq: int) -> None:
        kind: type[msg.Message] = type(message)
        if kind is msg.Error and message.uid:  # type: ignore[attr-defined]
            kind = RequestFailed
        state = moves.get(kind)
        if state is None:
            name = "Error with a uid" if kind is RequestFailed else kind.__name__
            raise _disorder(f"{self.link.who(sender)} may not send {name} in state {self.state}")
        if (rule := self._rules.get(kind)) is not None:
            rule(message, seq)
        if state is not self.state:
            if kind is msg.Done and self.state in _FORGETTING:
                self.ledger.forget()
            self._enter(state)
            self._ended_here = state in TERMINAL and sender is self.side

    def _enter(self, state: LinkState) -> None:
        self.state = state  #: The link's state, as far as this end knows.
        moves = table(self.link)[state]
        self._sendable = moves[self.side]
        self._receivable = moves[self._peer]
        if state not in OPENING:
            self._decoder.limit = MAX_FRAME

    def _fail(self, failure: MlxtpError) -> NoReturn:
        self._enter(LinkState.FAILED)
        self._failure = failure
        raise failure from None

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.detail, self._failure.code)
