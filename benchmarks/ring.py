"""Ports and variables with which the two peers form a ring by themselves."""

from __future__ import annotations

import json
import socket
from pathlib import Path


def environments(ranks: int, folder: Path, name: str) -> list[dict[str, str]]:
    """The variables of each rank of a ring over loopback; its host file is written to `folder`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    return [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(path)} for rank in range(ranks)]


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
