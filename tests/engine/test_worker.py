"""How a rank process ends when its agent wants it to."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from mlxtp.errors import WEDGED_STATUS

from ..cluster import WAIT_S

RANK = """
import ctypes, sys
from mlxtp.engine import worker

def run(*_):
    mutex = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    try:
        print("here", flush=True)
        libc.pthread_mutex_lock(mutex)  # for ever, whatever signal comes
    except worker.Terminated:  # just before
        libc.pthread_mutex_lock(mutex)

worker.run = run
worker.TERM_PATIENCE_S = 0.1
worker.main(sys.argv[1:])
"""


def test_a_rank_whose_interpreter_hangs_ends_itself_at_sigterm() -> None:
    ours, theirs = socket.socketpair()
    arguments = ["--rank", "0", "--epoch", "1", "--folder", ".", "--pipe-fd", str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "here\n"
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_S) == WEDGED_STATUS
            finally:
                process.kill()
