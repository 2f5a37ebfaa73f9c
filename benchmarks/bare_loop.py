"""The peer: mlx-lm's `generate_step` on the same two-rank group, with nothing around it.

As a program it is one rank of such a group: it forms the ring, loads the model with mlx-lm's own sharding,
and answers each line on stdin, a JSON list of prompt tokens and a count, with the tokens it chose and when.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from . import child
from .decoded import Decoded
from .errors import Unmeasured
from .ring import environments


class BareGroup:
    """The rank processes of the peer, one pinned to each core. Between two runs they wait on their stdin."""

    def __init__(self, model: Path, ranks: int, folder: Path) -> None:
        self._model = model
        self._environments = environments(ranks, folder, "bare-loop")
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        for rank, environment in enumerate(self._environments):
            self._processes.append(
                await child.start(rank, "benchmarks.bare_loop", str(self._model), environment=environment)
            )
        await self._lines()

    async def run(self, prompt: tuple[int, ...], tokens: int) -> Decoded:
        """Decode `tokens` tokens after `prompt`."""
        request = json.dumps([list(prompt), tokens]).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(request)
        answer = json.loads((await self._lines())[0])
        return Decoded.timed(answer["tokens"], answer["began"], answer["times"])

    async def stop(self) -> None:
        await child.end(*self._processes)

    async def _lines(self) -> list[bytes]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                raise Unmeasured("a rank of the bare loop ended")
            lines.append(line)
        return lines


def _main(folder: Path) -> None:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    group = mx.distributed.init(strict=True, backend="ring")
    model, _ = load_model(folder, lazy=True)
    model.shard(group)
    mx.eval(model.parameters())
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        prompt, count = json.loads(line)
        times, chosen = [], []
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
            times.append(time.perf_counter())
            chosen.append(token)
        print(json.dumps({"tokens": chosen, "began": began, "times": times}), flush=True)
    os._exit(0)  # destructors could wait for the other rank


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
