"""Start of a warm rank process, and time limits at the end of any: shared by a rank and its agent."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence

from ..errors import LinkError

# --- start: arguments over the socket that becomes the pipe, before any frame ----------------------------

READY = b"r"  #: from the warm process, after it imports a rank's modules
TAKEN = b"t"  #: its reply to a worker's arguments and listening socket: it is now that rank
MAX_ARGUMENTS = 8000  #: Bytes of all arguments. A socket pair on macOS holds 8192 at once.

_LENGTH = struct.Struct(">I")
#: Variables that a rank may need: of the system, Python, MLX, the Hub's cache, and mlxtp itself.
_NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LANGUAGE|LC_\w+|__CF_USER_TEXT_ENCODING|Malloc\w+|MALLOC_\w+|VIRTUAL_ENV|"
    r"XDG_CACHE_HOME|(DY)?LD_\w+|\w+_NUM_THREADS|RUST_\w+|"
    r"(PYTHON|MLX_|MLXTP_|JACCL_|METAL_|MTL_|CUDA_|HF_HOME|HF_HUB_|TRANSFORMERS_|TOKENIZERS_|COVERAGE_)\w*"
)
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|KEY|PASS|CREDENTIAL|AUTH|COOKIE|^MLXTP_JOIN$", re.IGNORECASE)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process needs to read models, and none that may be a secret."""
    needed = [name for name in environment if _NEEDED.fullmatch(name) and not _SECRET.search(name)]
    return {name: environment[name] for name in needed}


def hand_over(sock: socket.socket, arguments: Sequence[str], listener: socket.socket | None) -> None:
    """Send a READY warm process its arguments, without blocking. Raises OSError."""
    data = b"\0".join(map(os.fsencode, arguments))
    if len(data) > MAX_ARGUMENTS:
        raise OSError(f"{len(data)} bytes of arguments; a warm process takes at most {MAX_ARGUMENTS}")
    fds = [listener.fileno()] if listener is not None else []
    message = _LENGTH.pack(len(data)) + data
    if socket.send_fds(sock, [message], fds) != len(message):
        raise OSError("the socket of a warm process did not take all of its arguments")


def take_over(sock: socket.socket) -> tuple[list[str], int | None] | None:
    """Send READY, and wait for arguments and the listener's descriptor; None if the agent closes the socket.
    Raises LinkError for anything else.
    """
    data, fds = b"", []
    try:
        sock.sendall(READY)
        while len(data) < _LENGTH.size or len(data) < _size(data):
            piece, more, _, _ = socket.recv_fds(sock, _LENGTH.size + MAX_ARGUMENTS, 1)
            if not piece:
                return None
            data += piece
            fds += more
        if len(data) != _size(data):
            raise LinkError("the agent sent a warm process more than its arguments")
        sock.sendall(TAKEN)
    except ConnectionError:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    return [os.fsdecode(each) for each in data[_LENGTH.size :].split(b"\0")], fds[0] if fds else None


def _size(data: bytes) -> int:
    (length,) = _LENGTH.unpack_from(data)
    if not 0 < length <= MAX_ARGUMENTS:
        raise LinkError(f"the agent sent {length} bytes of arguments; 1 to {MAX_ARGUMENTS} are allowed")
    return _LENGTH.size + int(length)


# --- end: time limits, the same for a rank and its agent -------------------------------------------------

PATIENCE_S = 10.0  #: seconds for the main thread to return from its work
PATIENCE_FORWARDS = 4  #: the same in forwards, if that is longer
FREE_S = 20.0  #: seconds to free memory
ANSWER_S = 2.0  #: seconds for any sign of a rank after SIGTERM; without one, its interpreter hangs


def patience_s(forward_s: float) -> float:
    """Return the seconds that a main thread may take to return, if forwards take `forward_s`."""
    return max(PATIENCE_S, PATIENCE_FORWARDS * forward_s)
