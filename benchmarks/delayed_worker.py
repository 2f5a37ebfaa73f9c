"""`python -m benchmarks.delayed_worker WHAT FILE <a worker's arguments>`: a rank behind a slow link.

What this end of a decode link sends is delivered later by the seconds in FILE, in order, and the sender does
not wait for it; see `delay`. Every decode link is made in `engine/decode_links.py`, as `BlockingLink`, and
gets such a socket there. Where WHAT is `all` and not `frames`, MLX's ring has the same delay: this rank
connects to the next one through a relay.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from mlxtp.engine import decode_links, worker
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.session import Session

from .delay import Delay


class DelayedSocket:
    """A socket whose bytes leave later. Everything else is the socket's own."""

    def __init__(self, sock: socket.socket, delay: Delay) -> None:
        self._sock = sock
        self._delay = delay
        self._due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._put = self._delivered = 0
        threading.Thread(target=self._deliver, name="delay", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        if (delay_s := self._delay.seconds) or self._put > self._delivered:
            self._put += 1
            self._due.put((time.monotonic() + delay_s, data))
        else:
            self._sock.sendall(data)

    def _deliver(self) -> None:
        while True:
            due_at, data = self._due.get()
            if (left_s := due_at - time.monotonic()) > 0:
                time.sleep(left_s)
            try:
                self._sock.sendall(data)
            except OSError:
                return  # the link's reader reports its end
            self._delivered += 1


def delay_links(delay: Delay) -> None:
    """Delay every decode link that this process opens from now on."""

    class DelayedLink(BlockingLink):
        def __init__(self, sock: Any, protocol: Session, send_timeout_s: float) -> None:
            super().__init__(cast(socket.socket, DelayedSocket(sock, delay)), protocol, send_timeout_s)

    assert decode_links.BlockingLink is BlockingLink
    vars(decode_links)["BlockingLink"] = DelayedLink


def delay_ring(file: Path) -> None:
    """Delay what goes over MLX's ring between this rank and the next one, in both directions."""
    from mlxtp.engine import executor

    form = executor.form

    def behind_a_relay(backend: str, rank: int, size: int, hosts: tuple[str, ...], **more: Any) -> Any:
        if backend == "ring":
            after = (rank + 1) % size
            hosts = (*hosts[:after], _relayed(file, hosts[after]), *hosts[after + 1 :])
        return form(backend, rank, size, hosts, **more)

    vars(executor)["form"] = behind_a_relay


def _relayed(file: Path, address: str) -> str:
    """Start a relay to an address, ip:port; returns the address of the relay."""
    host, _, port = address.rpartition(":")
    module = ("benchmarks.child", "-", "benchmarks.relay")
    command = (sys.executable, "-m", *module, str(file), host, port)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # it ends with the connection
    assert process.stdout is not None
    return f"127.0.0.1:{int(process.stdout.readline())}"


def main() -> None:
    what, file = sys.argv[1], Path(sys.argv[2])
    delay_links(Delay(file))
    if what == "all":
        delay_ring(file)
    worker.main(sys.argv[3:])


if __name__ == "__main__":
    main()
