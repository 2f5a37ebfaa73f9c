"""`python -m benchmarks.delayed_worker FLAG <arguments of mlxtp.engine.worker>`: a rank behind a slow link.

While the file FLAG exists, what this end of a decode link sends is delivered `DELAY_S` later, in order, and
the sender does not wait for it. Every decode link is made in `engine/decode_links.py`, as `BlockingLink`,
and gets such a socket there. Create and remove FLAG only while nothing is sent.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from mlxtp.engine import decode_links, worker
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.session import Session

DELAY_S = 0.001


class DelayedSocket:
    """A socket whose bytes leave later. Everything else is the socket's own."""

    def __init__(self, sock: socket.socket, flag: Path) -> None:
        self._sock = sock
        self._flag = flag
        self._due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, name="delay", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        if self._flag.exists():
            self._due.put((time.monotonic() + DELAY_S, data))
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


def delay_links(flag: Path) -> None:
    """Delay every decode link that this process opens from now on."""

    class DelayedLink(BlockingLink):
        def __init__(self, sock: Any, protocol: Session, send_timeout_s: float) -> None:
            super().__init__(cast(socket.socket, DelayedSocket(sock, flag)), protocol, send_timeout_s)

    assert decode_links.BlockingLink is BlockingLink
    vars(decode_links)["BlockingLink"] = DelayedLink


def main() -> None:
    delay_links(Path(sys.argv[1]))
    worker.main(sys.argv[2:])


if __name__ == "__main__":
    main()
