"""`python -m benchmarks.relay FILE HOST PORT`: a slow link, one connection to HOST:PORT.

Prints the port to connect to. What either end sends arrives the seconds in FILE later, in order; see `delay`.
It ends with the connection.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from .delay import Delay, Underway

_BLOCK_BYTES = 1 << 18
_MOST_WAITING = 1 << 24  #: bytes for an end that does not read
_CONNECT_S = 60.0


@dataclass(slots=True)
class _Way:
    """One direction."""

    source: socket.socket
    sink: socket.socket
    underway: Underway = field(default_factory=Underway)
    waiting: bytearray = field(default_factory=bytearray)  # arrived, but not taken by the sink


def relay(one: socket.socket, other: socket.socket, delay: Delay) -> None:
    """Forward in both directions until either end closes."""
    ways = [_Way(one, other), _Way(other, one)]
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setblocking(False)
    while True:
        now = time.monotonic()
        for way in ways:
            way.waiting += way.underway.arrived(now)
        full = [way.sink for way in ways if not _sent(way)]
        due = [at for way in ways if (at := way.underway.next_at()) is not None]
        readable, _, _ = select.select(
            [way.source for way in ways if len(way.waiting) < _MOST_WAITING],
            full,
            [],
            max(min(due) - time.monotonic(), 0.0) if due else None,
        )
        for way in ways:
            if way.source in readable:
                data = way.source.recv(_BLOCK_BYTES)
                if not data:
                    return
                way.underway.push(data, time.monotonic() + delay.seconds)


def _sent(way: _Way) -> bool:
    """Send what the sink takes now; True if nothing is left."""
    if way.waiting:
        try:
            del way.waiting[: way.sink.send(way.waiting)]
        except BlockingIOError:
            return False
    return not way.waiting


def _connected(address: tuple[str, int]) -> socket.socket:
    """Connect, also to a port on which its process does not listen yet."""
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _main() -> None:
    delay, host, port = Delay(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        near, _ = listening.accept()
    with near, _connected((host, port)) as far:
        try:
            relay(near, far, delay)
        except OSError:
            return  # an end is gone, and both ranks see that


if __name__ == "__main__":
    _main()
