"""What arrives at a rank: reader threads put it here, the one MLX thread takes it out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import Code, GroupError, LinkError, MlxtpError
from ..wire.blocking import BlockingLink
from ..wire.session import Received

AGENT = -1
"""The sender that is this rank's own agent; senders from 0 on are ranks."""
COMPILER = -2
"""The sender of compiled grammars."""
LEADER = 0
"""The sender whose frames ranks above 0 obey."""

Failure = Callable[[MlxtpError], None]
"""Called by a reader thread whose link broke."""


class Terminated(BaseException):
    """SIGTERM: the step that runs is finished, then the process ends."""


class Mailbox:
    """Messages sorted by sender, each sender's in order."""

    def __init__(self) -> None:
        self._arrived: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._by_sender: dict[int, deque[Any]] = {}

    def post(self, sender: int, received: Any) -> None:
        """Any thread or signal handler: hand over one message, or Terminated, to be raised in its turn."""
        self._arrived.put((sender, received))

    def take(self, sender: int) -> Any:
        """The sender's oldest message that is here, or None. Raises Terminated in its turn."""
        self._sort()
        waiting = self._by_sender.get(sender)
        received = waiting.popleft() if waiting else None
        if received is Terminated:
            raise Terminated
        return received

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until another message arrives; False when the time is up."""
        try:
            sender, received = self._arrived.get(timeout=timeout_s)
        except Empty:
            return False
        self._by_sender.setdefault(sender, deque()).append(received)
        return True

    def receive(self, sender: int, deadline_s: float | None) -> Any:
        """The sender's next message. Raises LinkError (LINK_TIMEOUT) when none comes in time."""
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        while (received := self.take(sender)) is None:
            left_s = None if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            if not self.wait(left_s):
                raise LinkError(
                    f"nothing came from {name_of(sender)} within {deadline_s:g} s", Code.LINK_TIMEOUT
                )
        return received

    def _sort(self) -> None:
        while not self._arrived.empty():
            self.wait(0)


def name_of(sender: int) -> str:
    """How a sender is called in messages to people."""
    return "the agent" if sender == AGENT else f"rank {sender}"


def read_in_background(
    link: BlockingLink,
    sender: int,
    deliver: Callable[[Received], None],
    fail: Failure,
    over: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Start the thread that reads `link` until it ends in order; `fail` gets anything else.

    Calls `over` when nothing more will come, however the link ended.
    """

    def read() -> None:
        try:
            while batch := link.receive():
                for received in batch:
                    deliver(received)
        except LinkError as error:
            fail(GroupError(f"lost {name_of(sender)}: {error.detail}", Code.RANK_LOST))
        except MlxtpError as error:
            fail(type(error)(f"{name_of(sender)}: {error.detail}", error.code))
        over()

    thread = threading.Thread(target=read, name=f"read-{name_of(sender)}", daemon=True)
    thread.start()
    return thread
