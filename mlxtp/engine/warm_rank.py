"""A rank process that was started ahead: it has imported everything and waits to be told which rank it is.

Nothing here may depend on an epoch, form a group, or touch the GPU: what MLX reads of its environment, it
reads when it is first used, and `Bootstrap` has a say in that.
"""

from __future__ import annotations

import importlib
import socket
import sys

from ..wire.warm_start import take_over
from .mlx_lm_shim import import_mlx_lm

_IMPORTS = (
    *(f"mlxtp.engine.{name}" for name in ("group", "agreement", "logit_shaping", "executor")),
    *(f"mlxtp.engine.{name}" for name in ("decode_loop", "followers", "serve_loop")),
    "mlx_lm.models.llama",
)
"""What every rank imports on its way, nearly all of the time that it takes to start."""


def import_all() -> None:
    """Import what a rank will need, whatever it has to do."""
    import_mlx_lm()
    for name in _IMPORTS:
        importlib.import_module(name)


def wait_for_arguments(fd: int) -> list[str]:
    """Wait for the arguments of a rank on the socket `fd`, which stays open: it is this rank's pipe.

    Ends the process when there is no agent any more.
    """
    sock = socket.socket(fileno=fd)
    told = take_over(sock)
    sock.detach()
    if told is None:
        sys.exit()
    arguments, listener = told
    return [*arguments, *(() if listener is None else ("--listen-fd", str(listener)))]
