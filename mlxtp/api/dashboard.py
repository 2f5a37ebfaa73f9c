"""The page at `/` and its data, `/cluster` and `/cluster/events`. Read-only.

The page consists of the files in `page/`, unchanged: no build, nothing from elsewhere. It shows output of
models and names of other Macs, so its headers forbid the browser to run anything but these files.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .adapter import SSE
from .streaming import COMMENT, AnswerStream

Json = Mapping[str, Any]

FOLDER = Path(__file__).parent / "page"
LOOK_S = 0.5  # seconds between two updates of a watcher, at least
KEEP_ALIVE_S = 3.0
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Observed(Protocol):
    """Source of the page's data. `over` is set when the agent ends, which ends all event streams."""

    over: asyncio.Event

    def snapshot(self) -> Json:
        """Return all current facts; unknown ones are None."""
        ...


def routes(observed: Observed) -> list[Route]:
    """Return the routes of the page, for `create_app`."""
    shared = _Shared(observed)

    async def moment(_request: Request) -> Response:
        headers = {"cache-control": "no-store"}
        return Response(shared.now(), media_type="application/json", headers=headers)

    async def events(_request: Request) -> Response:
        watching = _watch(shared, observed.over)
        return AnswerStream(watching, watching, KEEP_ALIVE_S, lambda: COMMENT, SSE)

    return [
        Route("/cluster", moment, methods=["GET"]),
        Route("/cluster/events", events, methods=["GET"]),
        *(_file(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES),
    ]


class _Shared:
    """One snapshot for all simultaneous watchers, never older than `LOOK_S` / 2."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._until = float("-inf")
        self._text = b""

    def now(self, *, fresh: bool = False) -> bytes:
        """Return the snapshot as JSON, the same bytes as long as nothing changes."""
        clock = time.monotonic()
        if fresh or clock >= self._until:
            self._until = clock + LOOK_S / 2
            self._text = json.dumps(self._observed.snapshot(), separators=(",", ":")).encode()
        return self._text


async def _watch(shared: _Shared, over: asyncio.Event) -> AsyncGenerator[bytes]:
    """Yield a snapshot at once, then another after each change, until `over`."""
    told = b""
    while True:
        last = over.is_set()
        if (now := shared.now(fresh=last)) != told:
            told = now
            yield b"data: " + now + b"\n\n"
        if last:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await over.wait()


def _file(path: Path) -> Route:
    """Return the route of one file, read once. `index.html` is at `/`, the others are below `/page/`."""
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag, "content-type": _TYPES[path.suffix]}

    async def answer(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return Route("/" if path.name == "index.html" else f"/page/{path.name}", answer, methods=["GET"])
