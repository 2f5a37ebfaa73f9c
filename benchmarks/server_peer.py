"""The peer: `mlx_lm.server` on the same two ranks, one pinned to each core.

Its ranks spin while they have no request, so they stand still (SIGSTOP) whenever they are not measured.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from . import child
from .errors import Unmeasured
from .http_client import Ask, Client, Endpoint, user
from .ring import environments, free_ports

START_S = 300.0
_POLL_S = 0.1
_SETTLE_S = 0.3  #: Seconds in which the server tidies up after a client has its last byte.


class ServerPeer:
    """Stopped after `start`; runs within `awake`."""

    def __init__(self, model: Path, ranks: int, folder: Path) -> None:
        (port,) = free_ports(1)
        self._arguments = (
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"),
        )
        self._environments = environments(ranks, folder, "server")
        self._log = folder / "server.log"
        self._processes: list[asyncio.subprocess.Process] = []
        self.endpoint = Endpoint("mlx_lm.server", f"http://127.0.0.1:{port}", "default_model")

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    async def start(self, client: Client) -> None:
        """Start the ranks and have a first answer, which is when the model is loaded."""
        with self._log.open("wb") as log:
            for rank, environment in enumerate(self._environments):
                self._processes.append(
                    await child.start(
                        rank, "benchmarks.server_rank", *self._arguments, environment=environment, output=log
                    )
                )
        async with asyncio.timeout(START_S):
            await self._listening()
            await client.ask(self.endpoint, [Ask(user("Hello"), 4)] * 2)
        self._signal(signal.SIGSTOP)

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[Endpoint]:
        self._signal(signal.SIGCONT)
        try:
            yield self.endpoint
            await asyncio.sleep(_SETTLE_S)
        finally:
            self._signal(signal.SIGSTOP)

    async def stop(self) -> None:
        await child.end(*self._processes)

    def _signal(self, number: signal.Signals) -> None:
        self._check()
        for process in self._processes:
            os.kill(process.pid, number)

    async def _listening(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                self._check()
                try:
                    await http.get(f"{self.endpoint.url}/health")
                except httpx.TransportError:
                    await asyncio.sleep(_POLL_S)  # nothing can tell when a port opens
                else:
                    return

    def _check(self) -> None:
        if any(process.returncode is not None for process in self._processes):
            raise Unmeasured(f"mlx_lm.server ended: {self._log.read_text()[-1000:]}")
