"""An agent in a process of its own, which can be ended in order, and killed.

As a program, `python -m benchmarks.served JSON`: an agent with these settings, `home` and `model` among
them. It prints its URL once it is ready, and ends in order when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from asyncio.subprocess import Process
from pathlib import Path

from mlxtp.agent import running_agent
from mlxtp.config import Settings

from . import child
from .errors import Unmeasured
from .http_client import Endpoint

START_S = 120.0
END_S = 30.0


class Served:
    """Settings of an agent that is started again and again in the same home."""

    def __init__(self, home: Path, model: Path, ranks: int, **settings: object) -> None:
        self._settings = {"home": str(home), "model": str(model), "ranks": ranks} | settings
        self._process: Process | None = None

    async def start(self) -> Endpoint:
        """Start it; returns once its model is ready."""
        self._process = await child.start(None, "benchmarks.served", json.dumps(self._settings))
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            url = (await self._process.stdout.readline()).decode().strip()
        if not url:
            raise Unmeasured("the agent did not start")
        return Endpoint("the agent", url, "default")

    async def end(self) -> None:
        """End it in order."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(END_S):
            await self._process.wait()

    async def kill(self) -> None:
        """Send it SIGKILL."""
        if self._process is not None:
            await child.end(self._process)


async def _run(settings: dict[str, object]) -> None:
    home = Path(str(settings.pop("home")))
    chosen = Settings(home=home, http_host="127.0.0.1", http_port=0, **settings)  # type: ignore[arg-type]
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def until_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    async with running_agent(chosen, spares=False) as agent:
        await agent.wait_ready()
        print(agent.url, flush=True)
        threading.Thread(target=until_end, daemon=True).start()
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(_run(json.loads(sys.argv[1])))
