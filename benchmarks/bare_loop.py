"""The peer: mlx-lm's `generate_step` on the same two-rank group, with nothing around it.

As a program it is one rank of such a group: it forms the ring, loads the model, and answers each line on
stdin, a JSON list of prompt tokens and a count, with the tokens it chose and their rate.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from .pinning import pin

FORM_S = 60.0


class BareGroup:
    """The rank processes of the peer, one pinned to each core."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        ports = []
        for _ in range(self._ranks):
            with socket.create_server(("127.0.0.1", 0)) as sock:
                ports.append(sock.getsockname()[1])
        hosts = [f"127.0.0.1:{port}" for port in ports]
        for rank in range(self._ranks):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.bare_loop", str(rank), json.dumps(hosts), str(self._folder),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            pin(process.pid, rank)
            self._processes.append(process)
        await self._lines()

    async def run(self, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], float]:
        """Decode `tokens` tokens; returns them and tokens per second after the first."""
        request = json.dumps([list(prompt), tokens]).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(request)
        answer = json.loads((await self._lines())[0])
        return answer["tokens"], answer["tokens_per_second"]

    async def stop(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _lines(self) -> list[bytes]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                raise RuntimeError("a rank of the bare loop ended")
            lines.append(line)
        return lines


def _main(rank: int, hosts: list[str], folder: Path) -> None:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from mlxtp.engine.group import form
    from mlxtp.engine.loader import load

    group = form(
        "ring", rank, len(hosts), tuple(hosts), folder=Path(tempfile.gettempdir()), deadline_s=FORM_S
    )
    model = load(folder, group, lambda: None).model
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, count = json.loads(line)
        times, chosen = [], []
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
            times.append(time.perf_counter())
            chosen.append(token)
        print(
            json.dumps({"tokens": chosen, "tokens_per_second": (count - 1) / (times[-1] - times[0])}),
            flush=True,
        )
    os._exit(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
