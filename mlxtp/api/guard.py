"""Refuses requests that a web page sent to this server behind its user's back.

A page on the internet can make a browser talk to 127.0.0.1, by a plain cross-site request (its Origin
gives it away) or by letting its own name resolve to 127.0.0.1 (DNS rebinding: the Host gives it away).
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_body

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class HostGuard:
    """Lets through what names one of `hosts` (without port, IPv6 without brackets), or `*` for any."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "*" not in self._hosts:
            headers = Headers(scope=scope)
            refusal = self._refusal(headers.getlist("host"), headers.getlist("origin"))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, hosts: list[str], origins: list[str]) -> JSONResponse | None:
        for host in hosts or [""]:
            if host_name(f"//{host}") not in self._hosts:
                return _refuse(421, "host_not_allowed", f"this server does not answer to the name {host!r}")
        for origin in origins:
            if host_name(origin) not in self._hosts:
                return _refuse(403, "origin_not_allowed", f"pages from {origin!r} may not use this server")
        return None


def host_name(url: str) -> str | None:
    """The host in `scheme://host:port` or `//host:port`, in lower case; None if there is none."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError for a port that is no number
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        return None
    return parts.hostname


def _refuse(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(error_body(message, code, status), status)
