"""`mlx_lm.server` as it is, but for its queue of connections: a program, one rank of the peer.

Five may wait to be accepted there; when sixteen come at once, the others are dropped or reset and come again
a second later. What is compared is how requests are served, so the queue is made longer.
"""

from __future__ import annotations

import runpy
import socketserver

_WAITING = 128

if __name__ == "__main__":
    socketserver.TCPServer.request_queue_size = _WAITING
    runpy.run_module("mlx_lm.server", run_name="__main__", alter_sys=True)
