"""Ranks 1..N-1 as rank 0 sees them: frames go to all of them, replies and Acks come from each."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Code, GroupError
from ..wire.link import Link
from ..wire.messages import Ack, Message
from .mail import Mailbox
from .rank import Result


class Followers:
    """The decode links to ranks 1..N-1. What is sent goes to all of them; what is read is read from all."""

    def __init__(self, links: Mapping[int, Link], mail: Mailbox) -> None:
        self._links = dict(sorted(links.items()))
        self._mail = mail
        self._step = 0
        self._acknowledged: set[int] = set()

    def send(self, message: Message) -> int:
        """Send to every rank; returns the frame's seq, which is the same on all links.

        Without other ranks the frames are numbered all the same.
        """
        self._step += 1
        for link in self._links.values():
            self._step = link.send(message)
        return self._step

    def replies(self, deadline_s: float | None) -> dict[int, Message]:
        """One reply of each rank, whatever the others said. Raises LinkError when one stays away."""
        return {rank: self._mail.receive(rank, deadline_s).message for rank in self._links}

    def acknowledged(self, result: Result) -> bool:
        """Whether every rank has acknowledged `result`'s step; ask until it is true, then for the next step.

        Raises GroupError (DESYNC) when a rank did or chose something else.
        """
        for rank in self._links.keys() - self._acknowledged:
            received = self._mail.take(rank)
            if received is None:
                continue
            if not isinstance(received.message, Ack):
                raise GroupError(
                    f"rank {rank} sent {type(received.message).__name__} for an Ack", Code.DESYNC
                )
            _compare(rank, received.message, result)
            self._acknowledged.add(rank)
        if len(self._acknowledged) < len(self._links):
            return False
        self._acknowledged.clear()
        return True

    def silent(self) -> str:
        """The ranks that have not acknowledged the step asked for last, in words."""
        return " and ".join(f"rank {rank}" for rank in sorted(self._links.keys() - self._acknowledged))


def _compare(rank: int, ack: Ack, result: Result) -> None:
    for what in ("step", "forwards", "collectives", "digest"):
        theirs, ours = getattr(ack, what), getattr(result, what)
        if theirs != ours:
            raise GroupError(
                f"step {result.step}: rank {rank} reports {what} {theirs}, rank 0 has {ours}", Code.DESYNC
            )
