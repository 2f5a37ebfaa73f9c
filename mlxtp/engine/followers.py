"""Rank 0's view of ranks 1..N-1: frames go to all of them, replies and Acks come from each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping

from ..errors import Code, GroupError, LinkError
from ..wire.blocking import BlockingLink
from ..wire.messages import Ack, Message
from .executor import Result
from .mailbox import Mailbox


class Followers:
    """Decode links to ranks 1..N-1. Every message goes to all of them; every reply is read from all."""

    def __init__(self, links: Mapping[int, BlockingLink], mail: Mailbox) -> None:
        self._links = dict(sorted(links.items()))
        self._mail = mail
        self._step = 0
        self._acknowledged: set[int] = set()

    def send(self, message: Message) -> int:
        """Send to every rank; returns the frame's seq, which is the same on all links.

        Frames are numbered even without other ranks.
        """
        self._step += 1
        for link in self._links.values():
            self._step = link.send(message)
        return self._step

    def replies(self, deadline_s: float | None) -> dict[int, Message]:
        """Read one reply of each rank, all within `deadline_s` seconds. An Error reply ends nothing early.

        Raises LinkError (LINK_TIMEOUT) that names all silent ranks, after the other replies are read.
        """
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        replies: dict[int, Message] = {}
        for rank in self._links:
            left_s = None if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            with contextlib.suppress(LinkError):
                replies[rank] = self._mail.receive(rank, left_s).message
        if silent := self._links.keys() - replies.keys():
            words = f"nothing came from {_names(silent)} within {deadline_s:g} s"
            raise LinkError(words, Code.LINK_TIMEOUT)
        return replies

    def acknowledged(self, result: Result) -> bool:
        """Return True once every rank has acknowledged `result`'s step; only then check the next step.

        Raises GroupError (DESYNC) when a rank ran or chose something else.
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
        """Return the names of the ranks that have not acknowledged the last step."""
        return _names(self._links.keys() - self._acknowledged)


def _names(ranks: Iterable[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in sorted(ranks))


def _compare(rank: int, ack: Ack, result: Result) -> None:
    for what in ("step", "forwards", "collectives", "digest"):
        theirs, ours = getattr(ack, what), getattr(result, what)
        if theirs != ours:
            raise GroupError(
                f"step {result.step}: rank {rank} reports {what} {theirs}, rank 0 has {ours}", Code.DESYNC
            )
