"""Middleware around the whole app: request ids, one log line per request, HTTP metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections import Counter
from collections.abc import Callable
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.types import Message, Receive, Scope, Send

from .. import audit
from ..errors import Code
from ..verbs import VERBS
from .guard import ADMIN, address_of, source_of
from .request_context import RequestContext, answering
from .request_metrics import OTHER, RequestMetrics

log = logging.getLogger(__name__)

HEADER = b"x-request-id"
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_APP = re.compile(rb"[A-Za-z][\w.-]{0,39}")
_SHOWN_PATH = 200
_NO_READER = 499
#: Paths that programs poll every few seconds. Their log lines are at DEBUG.
_PROBES = frozenset(("/health", "/metrics"))


#: Paths that a waiting command polls. Only their failures are logged at INFO.
_POLLS = frozenset(f"{ADMIN}/{each.path}" for each in VERBS.values() if each.polled)


FOREIGN_S = 60.0
#: In that time: log lines for refused requests of one source, and sources counted separately.
FOREIGN_LINES = 10
FOREIGN_SOURCES = 32


class ForeignLines:
    """Limiter of log lines about refused clients. At the end, it logs how many it held back."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def admit(self, address: str) -> bool:
        """Return True if the next event from this address gets a log line."""
        if not self._counts:
            asyncio.get_running_loop().call_later(FOREIGN_S, self._sum_up)
        source = source_of(address)[0]
        if source not in self._counts and len(self._counts) >= FOREIGN_SOURCES:
            source = "other addresses"
        self._counts[source] += 1
        return self._counts[source] <= FOREIGN_LINES

    def _sum_up(self) -> None:
        for source, count in self._counts.items():
            if (more := count - FOREIGN_LINES) > 0:
                log.info("%s: %d more requests or connections without a valid key, not logged", source, more)
        self._counts.clear()


class AccessLog:
    """Outermost ASGI middleware. `epoch` returns the epoch for the log."""

    def __init__(self, app: Starlette, metrics: RequestMetrics, epoch: Callable[[], int] = lambda: 0) -> None:
        self._app = app
        self._routes = app.router.routes
        self._metrics = metrics
        self._epoch = epoch
        self._foreign = ForeignLines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = self._metrics.clock
        began = clock()
        origin = f"address {address_of(scope.get('client'))}"
        account = RequestContext(request_id(scope["headers"]), began, origin)
        account.app = app_of(scope["headers"])
        exchange = _Exchange(account, clock, receive, send)
        with answering(account):
            try:
                await self._app(scope, exchange.receive, exchange.send)
            finally:
                self._close(scope, account, exchange, clock() - began)

    def _close(self, scope: Scope, account: RequestContext, exchange: _Exchange, took_s: float) -> None:
        status = exchange.status or _NO_READER
        probe = scope["path"] in _PROBES
        account.settle(delivered=exchange.complete and status < 400 and not account.code)
        path = self._path(scope)
        is_error = status >= 400 and status != _NO_READER and not probe
        code = account.code or (f"http_{status}" if is_error else "")
        self._metrics.over(scope["method"], path, status, code)
        fields = described(account) | {
            "method": scope["method"],
            "path": quote(scope["path"][:_SHOWN_PATH], safe="/:@!$&'()*+,;=~", errors="replace"),
            "status": status,
            "duration_s": round(took_s, 4),
        }
        if status == 401 or code == Code.NOT_PERMITTED:
            about = {"code": code, "path": fields["path"], "address": address_of(scope.get("client"))}
            words = f"{fields['method']} {fields['path']} is refused with {status} {code}"
            audit.record("key_refused", words, about, foreign=True, logged=True)
        if not (account.admitted or probe or self._foreign.admit(address_of(scope.get("client")))):
            return
        log.log(
            logging.DEBUG if probe or (scope["path"] in _POLLS and status < 400) else logging.INFO,
            "%s",
            sentence(fields),
            extra={"epoch": self._epoch(), "fields": fields},
        )

    def _path(self, scope: Scope) -> str:
        """Return the route's path, also for a request that was refused before the router saw it."""
        route = scope.get("route")
        if route is None:
            routes = (each for each in self._routes if each.matches(scope)[0] is not Match.NONE)
            route = next(routes, None)
        return route.path if isinstance(route, Route | Mount) else OTHER


class _Exchange:
    """Wrapper of one request's `receive` and `send` that records status and times."""

    def __init__(
        self, account: RequestContext, clock: Callable[[], float], receive: Receive, send: Send
    ) -> None:
        self.status = 0  # 0 before headers went out
        self.complete = False  # True once the whole answer was sent
        self._account = account
        self._clock = clock
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._account.arrived = self._clock()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kept = [header for header in message.get("headers", ()) if header[0].lower() != HEADER]
            message = {**message, "headers": [*kept, (HEADER, self._account.id.encode())]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.complete = True


def request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the client's own id, if it sent one of 1 to 128 visible ASCII characters; else a new one."""
    given = [value for name, value in headers if name == HEADER]
    if len(given) == 1 and _ID.fullmatch(given[0]):
        return given[0].decode()
    return uuid.uuid4().hex


def app_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the first name in the client's User-Agent, such as "python-httpx"; empty without one."""
    given = next((value for name, value in headers if name == b"user-agent"), b"")
    found = _APP.match(given)
    name = found[0].decode() if found is not None else ""
    return "a browser" if name == "Mozilla" else name


def described(account: RequestContext) -> dict[str, object]:
    """Return a request's log fields other than HTTP's. They never contain message text."""
    fields: dict[str, object] = {}
    if account.answers:
        fields |= {"prompt_tokens": account.prompt_tokens, "generated_tokens": account.generated_tokens}
        fields["reason"] = account.reason
        if account.cached_tokens is not None:
            fields["cached_tokens"] = account.cached_tokens
        if account.first_s is not None:
            fields["first_token_s"] = round(account.first_s, 4)
    if account.code:
        fields["code"] = account.code
    return fields


def sentence(fields: dict[str, object]) -> str:
    parts = [f"{fields['method']} {fields['path']} {fields['status']} in {fields['duration_s']} s"]
    if "prompt_tokens" in fields:
        cached = f", {fields['cached_tokens']} cached" if "cached_tokens" in fields else ""
        parts.append(f"{fields['prompt_tokens']} prompt tokens{cached}")
        first = f", the first after {fields['first_token_s']} s" if "first_token_s" in fields else ""
        parts.append(f"{fields['generated_tokens']} generated{first}")
        parts.append(str(fields["reason"]))
    if "code" in fields:
        parts.append(str(fields["code"]))
    return "; ".join(parts)


def metrics_route(collect: Callable[[], tuple[bytes, str]]) -> Route:
    """Return the route of `GET /metrics`. `collect` returns the text and its media type."""

    async def metrics(_request: Request) -> Response:
        body, media_type = collect()
        return Response(body, headers={"content-type": media_type})

    return Route("/metrics", metrics, methods=["GET"])
