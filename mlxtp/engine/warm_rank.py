"""Warm rank process: started ahead, it has imported everything and waits for its rank's arguments.

Nothing here may depend on an epoch, form a group, or touch the GPU. MLX reads its environment at its first
use, and `Bootstrap` sets some of it.
"""

from __future__ import annotations

import importlib
import socket
import sys

from ..wire.rank_process import take_over
from .mlx_lm_shim import import_mlx_lm

#: Modules that every rank imports, which take nearly all of its start.
_IMPORTS = (
    *(f"mlxtp.engine.{name}" for name in ("group", "agreement", "logit_shaping", "executor")),
    *(f"mlxtp.engine.{name}" for name in ("decode_loop", "followers", "serve_loop")),
    "mlx_lm.models.llama",
)


def import_all() -> None:
    """Import everything that any rank will need."""
    import_mlx_lm()
    for name in _IMPORTS:
        importlib.import_module(name)


def wait_for_arguments(fd: int) -> list[str]:
    """Wait for the arguments of a rank on the socket `fd`, which stays open as this rank's pipe.

    Ends the process when the agent has ended.
    """
    sock = socket.socket(fileno=fd)
    told = take_over(sock)
    sock.detach()
    if told is None:
        sys.exit()
    arguments, listener = told
    return [*arguments, *(() if listener is None else ("--listen-fd", str(listener)))]
