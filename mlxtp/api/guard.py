"""Who may ask this server at all: by Host, by Origin, and by API key. It stands before all routes.

A page on the internet can make a browser talk to 127.0.0.1, by a plain cross-site request (its Origin
gives it away) or by letting its own name resolve to 127.0.0.1 (DNS rebinding: the Host gives it away). So
Host has to be a name of this Mac, or the very address that the connection came in at, which no page can have
for a name; and Origin a page of this server, or one that is on the list.

Pages on the list get what CORS wants from starlette's middleware, which does that right: it stands behind
`HostGuard`, and so never hears of a page that is not on the list.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import Code, RequestError
from .account import note

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"
ADMIN = "/admin"
"""Below it everything asks for the key in `agent.json`, and API keys count for nothing."""
PUBLIC = ("/", "/health", "/page/")
"""What nobody needs a key for, as it holds no data: the page, its files (below `/page/`), and `/health`."""

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
EXPOSED = ("Retry-After", "WWW-Authenticate", "X-Request-Id", "Request-Id", "X-Should-Retry")
"""Headers of answers that a page's program may read."""
PREFLIGHT_S = 600
UNREAD_BYTES = 16 * 1024 * 1024
"""So much of a refused request's body is read and thrown away: who is still sending hears no answer."""

Answer = Callable[[Scope, RequestError, Mapping[str, str]], Response]
"""What is answered to a request to say an error, with these headers on top."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is answered instead. `headers` come on top of those that every answer has."""

    status: int
    code: Code
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Keys(Protocol):
    """The API keys."""

    def refusal(self, given: Sequence[str]) -> Refusal | None:
        """Why a request that shows the keys `given` gets no answer; None when it does."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the endpoint.

    `hosts`: names of this Mac, beside those of loopback; `*` for any. `origins`: other pages that may use it,
    such as `http://localhost:3000`; `*` for any. `keys`: None where nobody needs one.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    keys: Keys | None = None


def guards(access: Access, answer: Answer) -> list[Middleware]:
    """The middleware of an app, in its order: the first is asked first. `answer` says refusals."""
    found = [Middleware(HostGuard, access=access, answer=answer)]
    if access.origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=tuple(access.origins),
                allow_methods=METHODS,
                allow_headers=(ANY,),  # whatever it asks for: client libraries send a dozen of their own
                expose_headers=EXPOSED,
                allow_private_network=True,
                max_age=PREFLIGHT_S,
            )
        )
    if access.keys is not None:
        found.append(Middleware(KeyGuard, keys=access.keys, answer=answer))
    return found


class HostGuard:
    """Lets through what is meant for this Mac, and comes from no page or from one that may ask."""

    def __init__(self, app: ASGIApp, access: Access, answer: Answer) -> None:
        self._app = app
        self._access = access
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = misdirected(self._access, scope) if scope["type"] == "http" else None
        if refusal is not None:
            await _refuse(refusal, self._answer, scope, receive, send)
        else:
            await self._app(scope, receive, send)


class KeyGuard:
    """Lets through what shows a good API key, and what needs none."""

    def __init__(self, app: ASGIApp, keys: Keys, answer: Answer) -> None:
        self._app = app
        self._keys = keys
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http" and not (is_public(scope["path"]) or is_admin(scope["path"])):
            refusal = self._keys.refusal(keys_in(Headers(scope=scope)))
        if refusal is not None:
            await _refuse(refusal, self._answer, scope, receive, send)
        else:
            await self._app(scope, receive, send)


# --- decisions --------------------------------------------------------------------------------------------


def misdirected(access: Access, scope: Scope) -> Refusal | None:
    """Why a request is not for this server, judged by Host, Origin and where it comes from."""
    headers, path = Headers(scope=scope), scope["path"]
    here, peer = address_of(scope.get("server")), address_of(scope.get("client"))
    if is_admin(path) and peer not in (here, *LOOPBACK_HOSTS):
        return Refusal(403, Code.BAD_REQUEST, "only commands on this Mac itself may do that")
    named = [host_name(f"//{host}") for host in headers.getlist("host") or [""]]
    known = {*LOOPBACK_HOSTS, *access.hosts, here}
    for host, name in zip(headers.getlist("host") or [""], named, strict=True):
        if ANY not in access.hosts and name not in known:
            return Refusal(421, Code.HOST_NOT_ALLOWED, _unknown_host(host, name))
    pages = () if is_admin(path) else access.origins
    for origin in headers.getlist("origin"):
        listed = ANY in pages or origin in pages
        name = host_name(origin)
        own = name in known or (ANY in access.hosts and name is not None and {name} == {*named})
        if not listed and (is_preflight(scope["method"], headers) or not own):
            return Refusal(403, Code.ORIGIN_NOT_ALLOWED, _unknown_page(origin))
    return None


def is_preflight(method: str, headers: Headers) -> bool:
    """Whether a browser asks by it what a page of another origin may do."""
    return method == "OPTIONS" and "access-control-request-method" in headers


def is_admin(path: str) -> bool:
    """Whether only this Mac's own commands may ask for it."""
    return path == ADMIN or path.startswith(f"{ADMIN}/")


def is_public(path: str) -> bool:
    """Whether it is answered without a key."""
    return any(
        path == each or (each != "/" and each.endswith("/") and path.startswith(each)) for each in PUBLIC
    )


def keys_in(headers: Headers) -> list[str]:
    """The API keys that a request shows: `Authorization: Bearer KEY`, `x-api-key: KEY`, or both."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    bearer = credentials if scheme.lower() == "bearer" else ""
    return [key for key in (bearer.strip(), headers.get("x-api-key", "").strip()) if key]


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


def address_of(end: Sequence[Any] | None) -> str:
    """The address of one end of a connection as URLs have it; empty where it is not known.

    Without the zone of an IPv6 address. An IPv4 one that came in at an IPv6 socket is an IPv4 one.
    """
    if not end:
        return ""
    text = str(end[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _unknown_host(host: str, name: str | None) -> str:
    said = f"this server does not answer to the name {host!r:.120}"
    if name is None:
        return f"{said}, which is none"
    return f"{said}; if that is this Mac, start `mlxtp node` with --allowed-host {name:.100}"


def _unknown_page(origin: str) -> str:
    said = f"pages from {origin!r:.120} may not use this server"
    if host_name(origin) is None:
        return said
    return f"{said}; to let them, start `mlxtp node` with --allowed-origin {origin:.100}"


# --- answers ----------------------------------------------------------------------------------------------


async def _refuse(refusal: Refusal, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
    note(refusal.code)
    error = RequestError(refusal.message, refusal.code, status=refusal.status)
    headers = dict(refusal.headers)
    if not await _read_away(scope, receive):
        headers["connection"] = "close"  # what else comes is no request
    await answer(scope, error, headers)(scope, receive, send)


async def _read_away(scope: Scope, receive: Receive) -> bool:
    """Whether nothing is left of the body. None of it is kept."""
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdecimal() and len(declared) <= 20 and int(declared) > UNREAD_BYTES:
        return False
    left = UNREAD_BYTES
    while left >= 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return True
        left -= len(message.get("body", b""))
    return False
