"""The loop of rank 0: take requests, decide the next forward, tell the others, run it, emit the confirmed.

send the step's frame on every decode link
queue the same forward here
wait for the forward before it, while this one runs
emit tokens whose step every rank has acknowledged with the same digest
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from ..errors import Code, GroupError
from ..wire.link import Link
from ..wire.messages import (
    Abort,
    Cancel,
    Delta,
    Error,
    Finished,
    Generate,
    Loaded,
    LoadShard,
    Message,
    PromptTokens,
    SessionStop,
    Shutdown,
    StepToken,
    Unload,
)
from .followers import Followers
from .mail import AGENT, Mailbox
from .rank import Forward, Rank, Result
from .scheduler import Decode, End, Move, Outcome, Prefill, Scheduler, Stop, Token

MAX_ROWS = 64
"""Sequences decoded at once. More wait their turn."""


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A settled step that waits for the other ranks' Acks, and what it will emit then."""

    result: Result
    outcomes: tuple[Outcome, ...]
    settled_at: float


class Emitter:
    """The only voice of the group: tokens and ends, to the agent. Other ranks have no such object."""

    def __init__(self, pipe: Link, rank: Rank) -> None:
        self._pipe = pipe
        self._status = rank.status
        self._open: set[int] = set()

    def begin(self, uid: int) -> None:
        self._open.add(uid)

    def emit(self, outcomes: tuple[Outcome, ...]) -> None:
        """Send a step's tokens in one frame, then the ends. What belongs to ended requests is dropped."""
        tokens = [o for o in outcomes if isinstance(o, Token) and o.uid in self._open]
        if tokens:
            self._pipe.send(
                Delta(
                    tuple(t.uid for t in tokens),
                    tuple(t.index for t in tokens),
                    tuple(t.token for t in tokens),
                )
            )
            self._status.emitted += len(tokens)
        for outcome in outcomes:
            if isinstance(outcome, End) and outcome.uid in self._open:
                self._open.remove(outcome.uid)
                self._pipe.send(Finished(outcome.uid, outcome.reason, outcome.generated, outcome.forwards))

    def fail(self, uid: int, code: Code, detail: str) -> None:
        self._open.discard(uid)
        self._pipe.send(Error(code, detail, uid))

    def fail_all(self, code: Code, detail: str) -> None:
        for uid in sorted(self._open):
            self.fail(uid, code, detail)


class DecodeLoop:
    """Rank 0's loop. `run_ahead` is how many forwards are queued before an earlier one's tokens are known."""

    def __init__(self, rank: Rank, mail: Mailbox, pipe: Link, followers: Followers) -> None:
        self._rank = rank
        self._mail = mail
        self._pipe = pipe
        self._followers = followers
        self._emitter = Emitter(pipe, rank)
        self._run_ahead = rank.bootstrap.run_ahead
        self._scheduler: Scheduler | None = None
        self._prefill_chunk = 0
        self._running: deque[Forward] = deque()
        self._unconfirmed: deque[Unconfirmed] = deque()

    def run(self) -> None:
        """Run until the agent says Shutdown. Raises what ends the epoch."""
        while True:
            while received := self._mail.take(AGENT):
                if isinstance(received.message, Shutdown):
                    self._shutdown()
                    return
                self._obey(received.message)
            moved = self._move()
            settled = self._settle(keep=self._run_ahead if moved else 0)
            self._confirm()
            if not moved and not settled:
                self._rest()

    # --- what the agent asks for ---------------------------------------------------------------------

    def _obey(self, command: Message) -> None:
        match command:
            case Generate():
                self._admit(command)
            case Cancel():
                if self._scheduler is not None and (end := self._scheduler.cancel(command.uid)):
                    self._emitter.emit((end,))
            case LoadShard():
                self._pipe.send(self._load(command))
            case Abort() | Unload():
                self._drop_requests("the model was taken away while this request was running")
                self._pipe.send(self._everywhere(command))
                if isinstance(command, Unload):
                    self._scheduler = None
            case _:
                self._drain()
                self._pipe.send(self._everywhere(command))

    def _admit(self, request: Generate) -> None:
        loaded = self._rank.loaded
        assert loaded is not None, "the pipe's protocol admits requests to a loaded model only"
        assert self._scheduler is not None
        self._emitter.begin(request.uid)
        if max(request.tokens) >= loaded.vocabulary:
            detail = f"token {max(request.tokens)} is not in the model's vocabulary of {loaded.vocabulary}"
            self._emitter.fail(request.uid, Code.BAD_REQUEST, detail)
        elif len(request.tokens) + request.max_tokens > loaded.context:
            detail = (
                f"{len(request.tokens)} prompt tokens and {request.max_tokens} new ones exceed "
                f"the model's context of {loaded.context}"
            )
            self._emitter.fail(request.uid, Code.CONTEXT_OVERFLOW, detail)
        else:
            self._scheduler.add(request.uid, request.tokens, request.max_tokens)

    def _load(self, command: LoadShard) -> Message:
        self._drain()
        reply = self._everywhere(command)
        if isinstance(reply, Loaded):
            self._prefill_chunk = command.prefill_chunk
            self._scheduler = self._new_scheduler()
        return reply

    def _new_scheduler(self) -> Scheduler:
        loaded = self._rank.loaded
        assert loaded is not None
        max_rows = MAX_ROWS if loaded.batches else 1
        return Scheduler(eos=self._rank.eos, prefill_chunk=self._prefill_chunk, max_rows=max_rows)

    def _drop_requests(self, why: str) -> None:
        self._drain()
        self._emitter.fail_all(Code.SHUTTING_DOWN, why)
        if self._scheduler is not None:
            self._scheduler = self._new_scheduler()

    def _everywhere(self, command: Message) -> Message:
        """Carry out a command on every rank; returns this rank's reply, or one Error with everybody's.

        Every rank's reply is read before anything else happens. When some ranks could load a model and others
        could not, those that could let it go again.
        """
        self._followers.send(command)
        replies: dict[int, Message] = {0: self._rank.execute(command)}
        if isinstance(command, LoadShard):
            # A load may take as long as some rank makes progress; the agent judges that by the phase.
            self._rank.status.enter("loading")
            replies |= self._followers.replies(None)
            self._rank.status.enter("idle")
        else:
            replies |= self._followers.replies(self._rank.bootstrap.deadline_s)
        errors = {rank: reply for rank, reply in replies.items() if isinstance(reply, Error)}
        if not errors:
            return replies[0]
        if isinstance(command, LoadShard):
            self._everywhere(Unload())
        detail = "; ".join(f"rank {rank}: {error.detail}" for rank, error in sorted(errors.items()))
        return Error(errors[min(errors)].code, detail, 0)

    def _shutdown(self) -> None:
        self._drop_requests("the cluster is shutting down")
        self._rank.status.enter("closing")
        self._followers.send(Shutdown())
        deadline_s = self._rank.bootstrap.deadline_s
        self._followers.replies(deadline_s)  # Done
        self._followers.replies(deadline_s)  # SessionEnd

    # --- decoding ------------------------------------------------------------------------------------

    def _move(self) -> bool:
        """Make the scheduler's next move on every rank; False when it has none."""
        move = self._scheduler.next() if self._scheduler is not None else None
        if move is None:
            return False
        frame = _frame(move)
        step = self._followers.send(frame)
        if isinstance(frame, SessionStop):
            self._rank.stop(frame.uid, frame.forwards)
        else:
            self._running.append(self._rank.launch(step, frame))
        return True

    def _settle(self, keep: int) -> bool:
        """Wait for all but the newest `keep` forwards and book their tokens; False when there were none."""
        if len(self._running) <= keep:
            return False
        while len(self._running) > keep:
            result = self._rank.settle(self._running.popleft())
            assert self._scheduler is not None
            outcomes = tuple(self._scheduler.record(result.uids, result.tokens))
            self._unconfirmed.append(Unconfirmed(result, outcomes, time.monotonic()))
        return True

    def _confirm(self) -> None:
        """Emit, in order, every settled step that all ranks have acknowledged.

        Raises GroupError when a rank computed something else (DESYNC) or stays silent (ACK_MISSING).
        """
        while self._unconfirmed:
            oldest = self._unconfirmed[0]
            if not self._followers.acknowledged(oldest.result):
                if self._ack_time_left_s() <= 0:
                    raise GroupError(
                        f"{self._followers.silent()} did not acknowledge step {oldest.result.step} "
                        f"within {self._rank.bootstrap.ack_deadline_s:g} s",
                        Code.ACK_MISSING,
                    )
                return
            self._unconfirmed.popleft()
            self._emitter.emit(oldest.outcomes)

    def _ack_time_left_s(self) -> float:
        waited_s = time.monotonic() - self._unconfirmed[0].settled_at
        return self._rank.bootstrap.ack_deadline_s - waited_s

    def _rest(self) -> None:
        """Nothing to run: wait for Acks, or for the agent."""
        if self._unconfirmed:
            self._mail.wait(max(self._ack_time_left_s(), 0.0))
            return
        if self._rank.status.phase != "idle":
            self._rank.status.enter("idle")
        self._mail.wait()

    def _drain(self) -> None:
        """Bring every forward to its end and read every Ack: commands come between steps."""
        self._settle(keep=0)
        self._confirm()
        while self._unconfirmed:
            self._mail.wait(max(self._ack_time_left_s(), 0.0))
            self._confirm()


def _frame(move: Move) -> PromptTokens | StepToken | SessionStop:
    match move:
        case Prefill():
            return PromptTokens(move.uid, move.offset, move.total, move.tokens)
        case Decode():
            return StepToken(move.rows, "broadcast")
        case Stop():
            return SessionStop(move.uid, move.reason, move.forwards)
