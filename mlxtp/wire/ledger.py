"""What must hold between the messages of a link beyond their order: uids, offsets, indices, one reply each.

A ledger is kept at both ends and sees every message, sent or received, in the link's order. Its rules are
called with a message that the table in `order.py` allows and the seq of its frame; they raise `Violation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import Code
from .messages import (
    Abort,
    Ack,
    Cancel,
    ClearCache,
    Delta,
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
from .order import LinkKind, RequestFailed

Rules = dict[type[Message], Callable[[Any, int], None]]


class Violation(Exception):
    """A rule was broken. `Protocol` turns it into a local or a remote error, depending on who did it."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class PipeLedger:
    """Pings and their Pongs, between an agent and a rank that does not speak."""

    def __init__(self) -> None:
        self.outstanding = 0
        """Pings whose Pong has not come."""

    def rules(self) -> Rules:
        return {Ping: self._ping, Pong: self._pong}

    def forget(self) -> None:
        """The command that ends every request before it has been answered."""

    def _ping(self, ping: Ping, seq: int) -> None:
        self.outstanding += 1

    def _pong(self, pong: Pong, seq: int) -> None:
        if not self.outstanding:
            raise Violation(Code.OUT_OF_ORDER, "Pong without a Ping that waits for it")
        self.outstanding -= 1


class RequestLedger(PipeLedger):
    """Requests between an agent and rank 0, and the tokens that came back."""

    def __init__(self) -> None:
        super().__init__()
        self.last_uid = 0
        self.tokens: dict[int, int] = {}
        """Of each live uid, how many tokens have been delivered: the index of its next one."""
        self._over = 0

    def rules(self) -> Rules:
        requests: Rules = {
            Generate: self._generate,
            Cancel: self._cancel,
            Delta: self._delta,
            Finished: self._end,
            RequestFailed: self._end,
            **dict.fromkeys((Abort, Unload, Shutdown), self._end_all),
        }
        return super().rules() | requests

    def forget(self) -> None:
        self.tokens = {uid: count for uid, count in self.tokens.items() if uid > self._over}

    def _generate(self, generate: Generate, seq: int) -> None:
        if generate.uid <= self.last_uid:
            raise Violation(Code.WRONG_UID, f"Generate for uid {generate.uid} after uid {self.last_uid}")
        self.last_uid = generate.uid
        self.tokens[generate.uid] = 0

    def _cancel(self, cancel: Cancel, seq: int) -> None:
        # The request may have ended while this was on its way.
        if cancel.uid > self.last_uid:
            raise Violation(Code.WRONG_UID, f"Cancel for uid {cancel.uid}, which no Generate named")

    def _delta(self, delta: Delta, seq: int) -> None:
        if not len(delta.uids) == len(delta.indices) == len(delta.tokens):
            raise Violation(Code.FIELD_INVALID, "Delta with uids, indices and tokens of different lengths")
        tokens = self.tokens
        for uid, index in zip(delta.uids, delta.indices, strict=True):
            expected = tokens.get(uid)
            if expected is None:
                raise Violation(Code.WRONG_UID, f"Delta for uid {uid}, which is not live")
            if index != expected:
                raise Violation(
                    Code.OUT_OF_ORDER, f"Delta with token {index} of uid {uid}, expected token {expected}"
                )
            tokens[uid] = index + 1

    def _end_all(self, command: Message, seq: int) -> None:
        # Requests that follow the command outlive its answer.
        self._over = self.last_uid

    def _end(self, end: Finished | Error, seq: int) -> None:
        if self.tokens.pop(end.uid, None) is None:
            raise Violation(Code.WRONG_UID, f"{type(end).__name__} for uid {end.uid}, which is not live")


class DecodeLedger:
    """Sequences and steps between rank 0 and another rank."""

    def __init__(self) -> None:
        self.last_uid = 0
        self.prompts: dict[int, tuple[int, int]] = {}
        """Of each uid whose prompt is incomplete: (offset of its next chunk, length of the prompt)."""
        self.running: set[int] = set()
        """Uids that a StepToken may name."""
        self.steps: deque[int] = deque()
        """Seqs of the steps that wait for their Ack, oldest first."""

    @property
    def outstanding(self) -> int:
        """Steps whose Ack has not come."""
        return len(self.steps)

    def rules(self) -> Rules:
        return {
            PromptTokens: self._prompt,
            StepToken: self._step,
            SessionStop: self._stop,
            Ack: self._ack,
            **dict.fromkeys((ClearCache, Abort, Unload, Shutdown), self._command),
        }

    def forget(self) -> None:
        """The command that ends every sequence has been answered."""
        self.prompts.clear()
        self.running.clear()

    def _prompt(self, prompt: PromptTokens, seq: int) -> None:
        uid = prompt.uid
        if uid in self.prompts:
            offset, total = self.prompts.pop(uid)
        elif uid > self.last_uid:
            offset, total = 0, prompt.total
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
            self.running.add(uid)
        self.steps.append(seq)

    def _step(self, step: StepToken, seq: int) -> None:
        rows = step.rows
        if not self.running.issuperset(rows):
            strangers = sorted(set(rows) - self.running)
            raise Violation(Code.WRONG_UID, f"StepToken for uid {strangers[0]}, which is not running")
        if len(rows) > 1 and len(set(rows)) != len(rows):
            raise Violation(Code.WRONG_UID, "StepToken names a uid twice")
        self.steps.append(seq)

    def _stop(self, stop: SessionStop, seq: int) -> None:
        if stop.uid in self.running:
            self.running.remove(stop.uid)
        elif self.prompts.pop(stop.uid, None) is None:
            raise Violation(Code.WRONG_UID, f"SessionStop for uid {stop.uid}, which is not live")

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


Ledger = PipeLedger | DecodeLedger

LEDGERS: dict[LinkKind, type[Ledger]] = {
    LinkKind.PIPE: PipeLedger,
    LinkKind.PIPE_LEADER: RequestLedger,
    LinkKind.DECODE: DecodeLedger,
}
