"""`python -m benchmarks.flood HOST PORT PER_SECOND`: connect, send garbage, and count the replies.

For each line on stdin it prints how many connections were closed on it since the last one.
"""

from __future__ import annotations

import asyncio
import os
import sys

GARBAGE = 4096
_PATIENCE_S = 10.0


class Flood:
    """Connections of one stranger after the other, whether or not those before them have ended."""

    def __init__(self, host: str, port: int, per_second: float) -> None:
        self.turned_away = 0
        self._where = host, port
        self._pause_s = 1 / per_second
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        while True:
            task = asyncio.create_task(self._knock())
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            await asyncio.sleep(self._pause_s)

    async def _knock(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_connection(*self._where)
                writer.write(os.urandom(GARBAGE))
                while await reader.read(65536):  # the TLS alert, at most
                    pass
                writer.close()
        except TimeoutError:
            return
        except OSError:
            pass
        self.turned_away += 1


async def main() -> None:
    host, port, per_second = sys.argv[1:]
    flood = Flood(host, int(port), float(per_second))
    flooding = asyncio.create_task(flood.run())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    before = 0
    while await reader.readline():
        print(flood.turned_away - before, flush=True)
        before = flood.turned_away
    flooding.cancel()


if __name__ == "__main__":
    asyncio.run(main())
