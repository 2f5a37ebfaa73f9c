"""`python -m benchmarks.http_server RATE`: an agent's HTTP side before tokens that come by the clock.

It prints its URL. For each line on stdin it prints the CPU seconds that this process has taken so far.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from mlxtp.admin.metrics import observed
from mlxtp.agent import build_parts
from mlxtp.api.app import create_app
from mlxtp.api.backend import ModelInfo
from mlxtp.api.server import bind, serve
from mlxtp.cluster.node import ClusterNode
from mlxtp.config import Settings, embedded_model_path
from mlxtp.identity.store import Store
from mlxtp.placement import hardware
from mlxtp.text.tokenizer import Text
from mlxtp.wire.codecs import Message
from mlxtp.wire.messages import Accepted, Cancel, Delta, Finished, Generate, RequestEvent

SAYS = "The quick brown fox jumps over the lazy dog, and counts: one, two, three, four, five. "
CONTEXT = 8192


class Pace:
    """A desk whose requests all have a token at each step, `rate` tokens per second in all."""

    def __init__(self, rate: float, says: tuple[int, ...], emit: Callable[[RequestEvent], None]) -> None:
        self._step_s = 1 / rate
        self._says = says
        self._emit = emit
        self._open: dict[int, list[int]] = {}  #: Tokens so far and in all, by uid.
        self._asked = asyncio.Event()

    def send(self, message: Message) -> None:
        if isinstance(message, Generate):
            self._open[message.uid] = [0, message.max_tokens]
            asyncio.get_running_loop().call_soon(self._emit, Accepted(message.uid))
            self._asked.set()
        elif isinstance(message, Cancel):
            self._open.pop(message.uid, None)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._asked.wait()
            due = time.monotonic()
            while self._open:
                due += self._step_s * len(self._open)
                await asyncio.sleep(max(due - time.monotonic(), 0))
                self._step()
            self._asked.clear()

    def _step(self) -> None:
        uids = tuple(self._open)
        indices = tuple(self._open[uid][0] for uid in uids)
        if not uids:
            return
        self._emit(Delta(uids, indices, tuple(self._says[i % len(self._says)] for i in indices)))
        for uid in uids:
            if (progress := self._open.get(uid)) is None:
                continue
            progress[0] += 1
            if progress[0] == progress[1]:
                del self._open[uid]
                self._emit(Finished(uid, "length", progress[1], progress[1]))


async def main() -> None:
    rate, folder = float(sys.argv[1]), embedded_model_path()
    text = await asyncio.to_thread(Text.load, folder)
    with TemporaryDirectory(prefix="mlxtp-") as home:
        store = Store(Path(home))
        identity = store.found_cluster()
        settings = Settings(Path(home), "", 0, 1, str(folder), name="bench")
        node = ClusterNode(settings, identity, await hardware.probe(settings.loopback))
        parts = build_parts(node, store)
    gateway = parts.gateway
    says = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SAYS, add_special_tokens=False).ids
    pace = Pace(rate, tuple(says), gateway.on_event)
    model = ModelInfo("paced", ("default",), folder, CONTEXT, int(time.time()), text.eos, 1 << 20)
    gateway.serve("paced#0", "paced", pace, model, text)
    app = observed(create_app(gateway), parts)
    sock, stop = bind("127.0.0.1", 0), asyncio.Event()
    tasks = [asyncio.create_task(work) for work in (pace.run(), serve(app, sock, stop, grace_s=1))]
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.readline():
        print(time.process_time(), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
