"""How a spare rank process is told which rank it is: over the socket that becomes its pipe, before any frame.

The spare says READY once it has imported what a rank needs. The agent then sends the arguments of a worker,
with the listening socket for decode links where there is one. The spare answers TAKEN, and is that rank from
then on.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence

from ..errors import LinkError

READY = b"r"
TAKEN = b"t"
MAX_ARGUMENTS = 8000
"""Bytes of all arguments. A socket pair of macOS holds 8192 at once."""

_LENGTH = struct.Struct(">I")
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|KEY|PASS|CREDENTIAL|AUTH|COOKIE|^MLXTP_JOIN$", re.IGNORECASE)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that reads what models bring: none whose name tells of a secret."""
    return {name: value for name, value in environment.items() if not _SECRET.search(name)}


def hand_over(sock: socket.socket, arguments: Sequence[str], listener: socket.socket | None) -> None:
    """Tell a spare that said READY who it is. Never blocks. Raises OSError when it cannot be told."""
    data = b"\0".join(map(os.fsencode, arguments))
    if len(data) > MAX_ARGUMENTS:
        raise OSError(f"{len(data)} bytes of arguments are too many for a spare")
    fds = [listener.fileno()] if listener is not None else []
    message = _LENGTH.pack(len(data)) + data
    if socket.send_fds(sock, [message], fds) != len(message):
        raise OSError("a spare's socket does not take its arguments")


def take_over(sock: socket.socket) -> tuple[list[str], int | None] | None:
    """The spare's side: say READY and wait, without end, for the arguments and the listener's descriptor.

    None when the agent has gone, or has no use for it any more. Raises LinkError for what no agent sends.
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
            raise LinkError("a spare was told more than its arguments")
        sock.sendall(TAKEN)
    except ConnectionError:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    return [os.fsdecode(each) for each in data[_LENGTH.size :].split(b"\0")], fds[0] if fds else None


def _size(data: bytes) -> int:
    """Of the whole message that begins so."""
    (length,) = _LENGTH.unpack_from(data)
    if not 0 < length <= MAX_ARGUMENTS:
        raise LinkError(f"a spare was told arguments of {length} bytes")
    return _LENGTH.size + int(length)
