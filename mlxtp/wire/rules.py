"""Rules between the messages of a link beyond their order: uids, offsets, indices, one reply each.

Both ends keep a ledger, which sees every message, sent or received, in the link's order. `Session` calls its
rules with a message that the table in `protocol.py` allows and the seq of its frame. They raise `Violation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import gt
from typing import Any

from ..errors import Code
from .messages import (
    Accepted,
    Ack,
    Cancel,
    Delta,
    Error,
    Evict,
    Finished,
    Gathered,
    Generate,
    Message,
    Ping,
    Pong,
    Prefilled,
    PromptBatch,
    PromptTokens,
    SanityCheck,
    ScoredDelta,
    SessionStop,
    Shutdown,
    SideChannel,
    StepToken,
    TimeCollectives,
    Unload,
)
from .protocol import LinkKind, RequestFailed

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
            Finished: self._end,
            RequestFailed: self._end,
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

    def _end(self, end: Finished | Error, seq: int) -> None:
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
        #: Uids that a StepToken may name, each with the token limit of its KV cache.
        self.running: dict[int, int] = {}
        #: Uids of ended sequences whose KV cache is still held, with its length in tokens.
        self.kept: dict[int, int] = {}
        self.steps: deque[int] = deque()  #: Seqs of the steps that wait for their Ack, oldest first.

    @property
    def outstanding(self) -> int:
        """Steps whose Ack has not come."""
        return len(self.steps)

    def rules(self) -> Rules:
        return {
            PromptTokens: self._prompt,
            PromptBatch: self._prompts,
            StepToken: self._step,
            SessionStop: self._stop,
            Evict: self._evict,
            Ack: self._ack,
            **dict.fromkeys(_COMMANDS, self._command),
        }

    def forget(self) -> None:
        """Forget all sequences, after the reply to the command that ends them."""
        self.prompts.clear()
        self.running.clear()
        self.kept.clear()

    def _prompt(self, prompt: PromptTokens, seq: int) -> None:
        uid = prompt.uid
        if uid in self.prompts:
            offset, total = self.prompts.pop(uid)
            if prompt.source or prompt.take:
                raise Violation(
                    Code.OUT_OF_ORDER, f"PromptTokens of uid {uid} names a source in a later chunk"
                )
        elif uid > self.last_uid:
            self._start(prompt, uid, prompt.offset, prompt.source, take=prompt.take)
            offset, total = prompt.offset, prompt.total
            self.last_uid = uid
        else:
            raise Violation(
                Code.WRONG_UID, f"PromptTokens for uid {uid}, which is complete or older than {self.last_uid}"
            )
        if (prompt.offset, prompt.total) != (offset, total):
            raise Violation(
                Code.OUT_OF_ORDER,
                f"PromptTokens of uid {uid} at {prompt.offset} of {prompt.total}, "
                f"expected {offset} of {total}",
            )
        end = offset + len(prompt.tokens)
        if end > total:
            raise Violation(
                Code.FIELD_INVALID, f"PromptTokens of uid {uid} ends at {end}, past its prompt of {total}"
            )
        if end < total:
            self.prompts[uid] = (end, total)
        else:
            self.running[uid] = total
        self.steps.append(seq)

    def _prompts(self, batch: PromptBatch, seq: int) -> None:
        count = len(batch.uids)
        columns = (batch.totals, batch.offsets, batch.sources, batch.takes, batch.samplings)
        if any(len(column) != count for column in columns):
            raise Violation(Code.FIELD_INVALID, "PromptBatch with fields of different lengths")
        rests = [total - offset for total, offset in zip(batch.totals, batch.offsets, strict=True)]
        if min(rests) < 1 or sum(rests) != len(batch.tokens):
            raise Violation(
                Code.FIELD_INVALID, f"PromptBatch of {rests} tokens by its prompts, {len(batch.tokens)} here"
            )
        starts = zip(batch.uids, batch.offsets, batch.sources, batch.takes, strict=True)
        for uid, offset, source, take in starts:
            if uid <= self.last_uid:
                raise Violation(Code.WRONG_UID, f"PromptBatch with uid {uid} after uid {self.last_uid}")
            self.last_uid = uid
            self._start(batch, uid, offset, source, take=bool(take))
        # Last, so that none of them can start from another one, which this forward has yet to compute.
        self.running.update(zip(batch.uids, batch.totals, strict=True))
        self.steps.append(seq)

    def _start(self, message: Message, uid: int, offset: int, source: int, *, take: bool) -> None:
        """Check that a new prompt begins behind the tokens that its source holds, if it has one."""
        kind = type(message).__name__
        if take and not source:
            raise Violation(Code.FIELD_INVALID, f"{kind}: uid {uid} takes over a source of no name")
        if not source:
            if offset:
                raise Violation(Code.OUT_OF_ORDER, f"{kind} starts uid {uid} at {offset}, behind nothing")
            return
        held = self.kept.get(source) or (0 if take else self.running.get(source, 0))
        if not held:
            raise Violation(Code.WRONG_UID, f"{kind}: uid {uid} starts from uid {source}, which is not there")
        if not 1 <= offset <= held:
            raise Violation(
                Code.OUT_OF_ORDER,
                f"{kind}: uid {uid} starts behind {offset} tokens of uid {source}, which holds {held}",
            )
        if take:
            del self.kept[source]

    def _step(self, step: StepToken, seq: int) -> None:
        rows = step.rows
        if len(step.positions) != len(rows) or (step.widths and len(step.widths) != len(rows)):
            raise Violation(
                Code.FIELD_INVALID, "StepToken with rows, positions and widths of different lengths"
            )
        if sum(step.widths) != len(step.tokens):
            raise Violation(
                Code.FIELD_INVALID,
                f"StepToken of {sum(step.widths)} tokens by its widths, {len(step.tokens)} here",
            )
        running = self.running
        if not running.keys() >= set(rows):
            strangers = sorted(set(rows) - running.keys())
            raise Violation(Code.WRONG_UID, f"StepToken for uid {strangers[0]}, which is not running")
        if len(rows) > 1 and len(set(rows)) != len(rows):
            raise Violation(Code.WRONG_UID, "StepToken names a uid twice")
        if any(map(gt, step.positions, map(running.__getitem__, rows))):
            raise Violation(
                Code.OUT_OF_ORDER, f"StepToken at positions {step.positions}, past what its rows hold"
            )
        widths = step.widths or (1,) * len(rows)
        for uid, at, width in zip(rows, step.positions, widths, strict=True):
            running[uid] = at + (width or 1)
        self.steps.append(seq)

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
        if stop.keep:
            self.kept[stop.uid] = stop.keep

    def _evict(self, evict: Evict, seq: int) -> None:
        for uid in evict.uids:
            if self.kept.pop(uid, None) is None:
                raise Violation(Code.WRONG_UID, f"Evict for uid {uid}, which is not kept")

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
