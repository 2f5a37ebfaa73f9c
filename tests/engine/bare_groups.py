"""Bare groups of processes, each of which is a member as `members.py` says: no agent, no links."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..live_cluster import WAIT_S

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Group:
    """Notes of the members of a group, in rank order, and the folders of their models."""

    facts: list[dict[str, Any]]
    arrays: list[dict[str, Any]]
    folder: Path


def free_hosts(count: int) -> str:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = ",".join("{}:{}".format(*sock.getsockname()) for sock in sockets)
    for sock in sockets:
        sock.close()
    return hosts


def run_group(root: Path, ranks: int, models: Sequence[str | Path], member: str) -> Group:
    """Run one member a rank. MLX goes through a graph in another order on rank 0 than on the others."""
    hosts = free_hosts(ranks)
    folders = [str(root / model) for model in models]
    command = [sys.executable, "-m", member]
    members = [
        subprocess.Popen(
            [*command, str(rank), hosts, str(root / f"rank-{rank}"), *folders],
            cwd=ROOT,
            env={**os.environ, "MLX_BFS_MAX_WIDTH": "1" if rank else "20"},
        )
        for rank in range(ranks)
    ]
    try:
        assert [each.wait(WAIT_S) for each in members] == [0] * ranks
    finally:
        for each in members:
            each.kill()
            each.wait()
    facts = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    arrays = [dict(np.load(root / f"rank-{rank}.npz")) for rank in range(ranks)]
    return Group(facts, arrays, root)
