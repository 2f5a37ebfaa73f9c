"""Loop of every rank above 0: execute rank 0's frames, and reply to each with one message.

Such a rank cannot emit a token, because its pipe has no message for that.
"""

from __future__ import annotations

from collections import deque

from ..wire.blocking import BlockingLink
from ..wire.messages import Ack, ChosenTokens, Done, FetchedBlocks, Forward, SessionEnd, Shutdown
from .executor import RankExecutor, RunningForward
from .mailbox import DISK, LEADER, Mailbox
from .steps import CacheFrame

#: Seconds to wait for the next frame before waiting for the running forward. While rank 0 runs ahead, that
#: frame is only microseconds away, and its graph can be built while the forward runs.
NEXT_FRAME_WAIT_S = 0.002


class ServeLoop:
    """Loop that reads frames in order; at most one forward runs while the next is queued."""

    def __init__(self, rank: RankExecutor, mail: Mailbox, leader: BlockingLink) -> None:
        self._rank = rank
        self._mail = mail
        self._leader = leader
        self._running: deque[RunningForward] = deque()

    def run(self) -> None:
        """Serve until rank 0 sends Shutdown. Raises the error that ends the epoch."""
        while True:
            while word := self._mail.take(DISK):
                if read := self._rank.from_disk(word):
                    self._leader.send(FetchedBlocks(*read))
            received = self._mail.take(LEADER)
            if received is None:
                self._wait()
                continue
            match received.message:
                case Forward() as frame:
                    self._running.append(self._rank.launch(received.seq, frame))
                    self._settle(keep=1)
                case ChosenTokens() as chosen:
                    self._rank.runner.border.supply(chosen.forward, chosen.tokens)
                case frame if isinstance(frame, CacheFrame):
                    self._rank.apply(frame)
                case Shutdown():
                    self._settle(keep=0)
                    self._leader.send(Done())
                    self._leader.send(SessionEnd())
                    return
                case command:
                    self._settle(keep=0)
                    self._leader.send(self._rank.execute(command))

    def _wait(self) -> None:
        if self._running:
            computes = self._is_submitted(self._running[0])
            if not self._mail.wait(NEXT_FRAME_WAIT_S if computes else None, (DISK, LEADER)):
                self._settle(keep=0)
            return
        if self._rank.status.phase in ("prefill", "decode"):
            self._rank.status.enter("idle")
        self._mail.idle(of=(DISK, LEADER))

    def _is_submitted(self, forward: RunningForward) -> bool:
        return self._rank.runner.border.tokens.known(forward.forwards)

    def _settle(self, keep: int) -> None:
        while len(self._running) > keep and self._is_submitted(self._running[0]):
            did = self._rank.settle(self._running.popleft())
            ack = Ack(did.step, did.forwards, did.collectives, did.digest, did.step_us, did.wait_us)
            self._leader.send(ack)
