"""Incoming messages of a rank: reader threads put them in, and the MLX thread takes them out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import Code, GroupError, LinkError, MlxtpError
from ..wire.blocking import BlockingLink
from ..wire.session import Received

AGENT = -1  # this rank's own agent; senders from 0 on are ranks
COMPILER = -2  # sends compiled grammars
DISK = -3  # sends results of disk reads and writes
SIGNALS = -4  # messages that only wake a thread that waits
LEADER = 0  # rank 0, whose frames the other ranks execute


class Terminated(BaseException):
    """SIGTERM: the running step finishes, then the process ends."""


class Mailbox:
    """Messages by sender, in order. If `warm` is set, an idle rank waits through it."""

    def __init__(self) -> None:
        self.warm: KeepWarm | None = None
        self._arrived: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._by_sender: dict[int, deque[Any]] = {}

    def post(self, sender: int, received: Any) -> None:
        """Add a message, or Terminated, which `take` raises in order. For any thread or signal handler."""
        self._arrived.put((sender, received))

    def take(self, sender: int) -> Any:
        """Return the sender's oldest message, or None. Raises Terminated if it is next."""
        while not self._arrived.empty():
            self.wait(0)
        waiting = self._by_sender.get(sender)
        received = waiting.popleft() if waiting else None
        if received is Terminated:
            raise Terminated
        return received

    def wait(self, timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        """Block until a message arrives, unless a sender in `of` has one. False after `timeout_s`."""
        if any(self._by_sender.get(sender) for sender in of):
            return True
        try:
            sender, received = self._arrived.get(timeout=timeout_s)
        except Empty:
            return False
        self._by_sender.setdefault(sender, deque()).append(received)
        return True

    def idle(self, timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        return (self.warm or self).wait(timeout_s, of)

    def receive(self, sender: int, deadline_s: float | None) -> Any:
        """Wait for the sender's next message. Raises LinkError (LINK_TIMEOUT)."""
        ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        while (received := self.take(sender)) is None:
            left_s = None if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            if not self.wait(left_s, (sender,)):
                detail = f"nothing came from {name_of(sender)} within {deadline_s:g} s"
                raise LinkError(detail, Code.LINK_TIMEOUT)
        return received


def name_of(sender: int) -> str:
    return "the agent" if sender == AGENT else f"rank {sender}"


def read_in_background(
    link: BlockingLink,
    sender: int,
    deliver: Callable[[Received], None],
    fail: Callable[[MlxtpError], None],
    over: Callable[[], None] = lambda: None,
) -> threading.Thread:
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


# --- an idle rank with a model ---------------------------------------------------------------------------
# By MLX issue 4609, as docs/engine.md says; llama.cpp 17766 has the same remedy.

EVERY_S = 1.0
POWER_S = 60.0  #: Seconds between two readings of the power supply.


def touch_gpu() -> None:
    import mlx.core as mx

    mx.eval(mx.zeros(8) + 1)


def runs_on_battery() -> bool:
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):  # a system without sensors
        return False
    return battery is not None and battery.power_plugged is False


@dataclass(eq=False, repr=False)
class KeepWarm:
    """Idle waits of the MLX thread that keep weights wired by giving the GPU a little work."""

    mail: Mailbox
    loaded: Callable[[], bool]  # True while a model is loaded
    touch: Callable[[], None] = touch_gpu  # gives the GPU something short to run
    on_battery: Callable[[], bool] = runs_on_battery
    clock: Callable[[], float] = time.monotonic

    def wait(self, timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        """Wait like `Mailbox.wait`, and touch the GPU each second, unless this Mac runs on battery."""
        now = self.clock()
        ends_at = float("inf") if timeout_s is None else now + timeout_s
        read_at, pause_s = now, EVERY_S
        while self.loaded() and ends_at - now > pause_s:
            if self.mail.wait(pause_s, of):
                return True
            now = self.clock()
            if now >= read_at:
                read_at, pause_s = now + POWER_S, POWER_S if self.on_battery() else EVERY_S
            if pause_s == EVERY_S:
                with suppress(RuntimeError):  # if the failure lasts, the next forward reports it
                    self.touch()
        return self.mail.wait(None if timeout_s is None else max(ends_at - now, 0.0), of)
