"""Access control by Host, Origin and API key, before any route.

A web page can make a browser send cross-site requests to 127.0.0.1; Origin or Sec-Fetch-Site reveals them. Or
its own name resolves to 127.0.0.1 (DNS rebinding), which Host reveals. Host must be a name of this Mac or the
address of the connection. Origin must match this server's scheme, host and port, or be on the list.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import Code, RequestError
from ..verbs import VERBS
from .api_keys import KeyRing
from .key_limits import CHAT, METRICS, Refusal
from .request_context import RequestContext, answering, current, note

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"
ADMIN = "/admin"  # Paths below it require the key in `agent.json`.
#: Paths below it that also accept an API key, each with the scope that the key needs.
SHARED_ADMIN = {f"{ADMIN}/{each.path}": each.key_scope for each in VERBS.values() if each.key_scope}
PERMITTED = "mlxtp.permitted"  #: ASGI scope entry: the key scope that admitted the request.
#: ASGI state entry: a function that takes the hash of an admitted request's key, and returns why that key may
#: not take another connection, or "".
ADMITTED = "mlxtp.admitted"
#: First parts of the paths where models are used.
USES = (
    "v1", "v2", "api", "chat", "completions", "responses", "messages", "models", "embeddings", "rerank",
    "tokenize", "detokenize", "apply-template", "tokenizer_info",
)  # fmt: skip
#: Origins of programs on this Mac: pages of its own servers, and schemes of desktop apps, which no web page
#: has. `null` is none of them: any page gets it for a sandboxed frame.
OWN_APPS = r"(app|file|tauri|vscode-webview)://.*|https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
#: Paths without data, which need no key: the page, its files (below `/page/`), and `/health`.
PUBLIC = ("/", "/health", "/page/")

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
#: Response headers that scripts of a page may read.
EXPOSED = ("Retry-After", "WWW-Authenticate", "X-Request-Id", "Request-Id", "X-Should-Retry", "X-Mlxtp-Group")
PREFLIGHT_S = 600
_PORTS = {"http": 80, "https": 443}
_PROXIES = ("forwarded", "via", "x-real-ip")
#: Bytes of a refused request's body to read and discard: a client reads no answer while it is sending.
UNREAD_BYTES = 16 * 1024 * 1024

#: Maker of the response to an error, with these headers added.
RefusalResponse = Callable[[Scope, RequestError, Mapping[str, str]], Response]


@dataclass(frozen=True, slots=True)
class Access:
    """Rules of access to the endpoint.

    `hosts`: names of this Mac in addition to loopback's; `*` for any. `origins`: other pages that may use it,
    such as `http://localhost:3000`; `*` for any. `keys`: None if no client needs one.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    keys: KeyRing | None = None


def guards(access: Access, answer: RefusalResponse) -> list[Middleware]:
    """Return the middleware of an app, the first one outermost. `answer` builds refusals."""
    found = [
        Middleware(HostGuard, access=access, answer=answer),
        Middleware(  # inside `HostGuard`, which stops requests of other pages
            CORSMiddleware,
            allow_origins=tuple(access.origins),
            allow_origin_regex=OWN_APPS,
            allow_methods=METHODS,
            allow_headers=(ANY,),  # any: client libraries send a dozen of their own
            expose_headers=EXPOSED,
            allow_private_network=True,
            max_age=PREFLIGHT_S,
        ),
    ]
    if access.keys is not None:
        found.append(Middleware(KeyGuard, keys=access.keys, answer=answer))
    return found


class HostGuard:
    """Middleware that admits requests for this Mac, from allowed pages or from no page."""

    def __init__(self, app: ASGIApp, access: Access, answer: RefusalResponse) -> None:
        self._app = app
        self._access = access
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = misdirected(self._access, scope) if scope["type"] == "http" else None
        if refusal is not None:
            await _refuse(refusal, self._answer, scope, receive, send)
        else:
            if self._access.keys is None:
                _admit(scope)
            await self._app(scope, receive, send)


class KeyGuard:
    """Middleware that admits a request if it has a valid API key or needs none."""

    def __init__(self, app: ASGIApp, keys: KeyRing, answer: RefusalResponse) -> None:
        self._app = app
        self._keys = keys
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needed = scope_of(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if needed is None:
            if scope["type"] == "http" and is_public(scope["path"]) and is_local(scope):
                _admit(scope)
            await self._app(scope, receive, send)
            return
        request = current() or RequestContext("", 0.0)
        with answering(request):
            own = not is_admin(scope["path"]) or is_local(scope)
            refusal = self._keys.refusal(keys_in(Headers(scope=scope)), needed, own=own)
            if refusal is None and request.key:
                scope[PERMITTED] = needed
            try:
                if refusal is None and (crowded := _admit(scope, request.key_hash)):
                    refusal = Refusal(503, Code.OVERLOADED, crowded, {"retry-after": "5"})
                if refusal is not None:
                    await _refuse(refusal, self._answer, scope, receive, send)
                else:
                    await self._app(scope, receive, send)
            finally:
                self._keys.end(request)


# --- decisions --------------------------------------------------------------------------------------------


def misdirected(access: Access, scope: Scope) -> Refusal | None:
    """Check Host, Origin and the connection's address. Return a refusal; None to admit the request."""
    headers, path = Headers(scope=scope), scope["path"]
    here = address_of(scope.get("server"))
    shared = access.keys is not None and path in SHARED_ADMIN
    if is_admin(path) and not shared and not is_local(scope):
        return Refusal(403, Code.BAD_REQUEST, "only commands on this Mac itself may do that")
    hosts = headers.getlist("host") or [""]
    known = {*LOOPBACK_HOSTS, *access.hosts, here}
    for host in hosts:
        name = host_name(f"//{host}")
        if ANY not in access.hosts and name not in known:
            return Refusal(421, Code.HOST_NOT_ALLOWED, _unknown_host(host, name))
    pages, origins = () if is_admin(path) else access.origins, headers.getlist("origin")
    unlisted = [] if ANY in pages else [origin for origin in origins if origin not in pages]
    if _admits_apps(scope, access):
        unlisted = [origin for origin in unlisted if not re.fullmatch(OWN_APPS, origin)]
    for origin in unlisted:
        if is_preflight(scope["method"], headers) or not _is_own(origin, hosts, scope):
            return Refusal(403, Code.ORIGIN_NOT_ALLOWED, _unknown_page(origin))
    listed = ANY in pages or (origins and not unlisted)
    site = headers.get("sec-fetch-site", "none")
    if not (site in ("none", "same-origin") or listed or _is_link(scope)):
        words = f"pages of another origin ({site!r:.40}) may not use this server; --allowed-origin lets them"
        return Refusal(403, Code.ORIGIN_NOT_ALLOWED, words)
    return None


def _admits_apps(scope: Scope, access: Access) -> bool:
    """Return True for a use of a model over loopback while no key is needed."""
    keyless = access.keys is None or not access.keys.needed
    over_loopback = address_of(scope.get("client")) in LOOPBACK_HOSTS and is_local(scope)
    return keyless and over_loopback and uses_models(scope["path"])


def uses_models(path: str) -> bool:
    return path == "/" or path[1:].partition("/")[0] in USES


def is_local(scope: Scope) -> bool:
    """Return True if a program on this Mac sent the request and no proxy forwarded it."""
    here, peer = address_of(scope.get("server")), address_of(scope.get("client"))
    return peer in (here, *LOOPBACK_HOSTS) and not is_forwarded(Headers(scope=scope))


def is_forwarded(headers: Headers) -> bool:
    return any(name in _PROXIES or name.startswith("x-forwarded-") for name in headers)


def is_stranger(access: Access, scope: Scope) -> bool:
    """Return True for a client on another machine without a key; it gets no details."""
    if is_local(scope):
        return False
    return access.keys is None or not access.keys.admits(keys_in(Headers(scope=scope)))


def origin_of(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of `scheme://host:port`; None if it is no such origin."""
    if (name := host_name(url)) is None or (parts := urlsplit(url)).scheme not in _PORTS:
        return None
    return parts.scheme, name, _PORTS[parts.scheme] if parts.port is None else parts.port


def _is_own(origin: str, hosts: Sequence[str], scope: Scope) -> bool:
    """Return True if the request was sent to this origin.

    A proxy may have another scheme and port; then the browser's Sec-Fetch-Site has to confirm the origin.
    """
    page, scheme = origin_of(origin), scope.get("scheme", "http")
    if page is None:
        return False
    headers = Headers(scope=scope)
    if is_forwarded(headers) and headers.get("sec-fetch-site") == "same-origin":
        return all(host_name(f"//{host}") == page[1] for host in hosts)
    return all(origin_of(f"{scheme}://{host}") == page for host in hosts)


def _is_link(scope: Scope) -> bool:
    """Return True if a user follows a link to this server's page, which itself contains no data."""
    headers = Headers(scope=scope)
    how = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return scope["path"] == "/" and scope["method"] == "GET" and how == ("navigate", "document")


def is_preflight(method: str, headers: Headers) -> bool:
    return method == "OPTIONS" and "access-control-request-method" in headers


def scope_of(method: str, path: str) -> str | None:
    """Return the scope that a key needs for a request, "" for any; None if it needs no API key."""
    if is_public(path) or is_admin(path):
        return SHARED_ADMIN.get(path)
    if path == "/metrics":
        return METRICS
    stops = "/responses/" in path and (method == "DELETE" or path.endswith("/cancel"))
    return "" if stops or method in ("GET", "HEAD", "OPTIONS") else CHAT


def is_admin(path: str) -> bool:
    return path == ADMIN or path.startswith(f"{ADMIN}/")


def is_public(path: str) -> bool:
    return any(
        path == each or (each != "/" and each.endswith("/") and path.startswith(each)) for each in PUBLIC
    )


def keys_in(headers: Headers) -> list[str]:
    """Return the API keys of a request: `Authorization: Bearer KEY`, `x-api-key: KEY`, or both."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    bearer = credentials if scheme.lower() == "bearer" else ""
    return [key for key in (bearer.strip(), headers.get("x-api-key", "").strip()) if key]


def host_name(url: str) -> str | None:
    """Return the host in `scheme://host:port` or `//host:port`, in lower case; None if there is none."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError for a port that is not a number
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        return None
    return parts.hostname


def address_of(end: Sequence[Any] | None) -> str:
    """Return the address of one end of a connection without a zone, IPv4 as such; empty if unknown."""
    if not end:
        return ""
    text = str(end[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def source_of(address: str) -> tuple[str, bool]:
    """Return the source that limits count this address as, and True for loopback. IPv6 counts by /64."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address or "?", False
    if found.version == 6 and not found.is_loopback:
        return str(ipaddress.ip_network((found, 64), strict=False)), False
    return address, found.is_loopback


def _unknown_host(host: str, name: str | None) -> str:
    said = f"this server does not answer to the name {host!r:.120}"
    if name is None:
        return f"{said}, which is not a valid host name"
    return f"{said}; if that is this Mac, start `mlxtp node` with --allowed-host {name:.100}"


def _unknown_page(origin: str) -> str:
    said = f"pages from {origin!r:.120} may not use this server"
    if host_name(origin) is None:
        return said
    return f"{said}; to let them, start `mlxtp node` with --allowed-origin {origin:.100}"


# --- answers ----------------------------------------------------------------------------------------------


def _admit(scope: Scope, key: str = "") -> str:
    """Report an admitted request to its connection. Return why that refuses it, or ""."""
    if (request := current()) is not None:
        request.admitted = True
    report: Callable[[str], str] = scope.get("state", {}).get(ADMITTED, lambda _key: "")
    return report(key)


async def _refuse(
    refusal: Refusal, answer: RefusalResponse, scope: Scope, receive: Receive, send: Send
) -> None:
    note(refusal.code)
    error = RequestError(refusal.message, refusal.code, status=refusal.status)
    headers = dict(refusal.headers)
    if not await _read_away(scope, receive):
        headers["connection"] = "close"  # the rest is not a request
    await answer(scope, error, headers)(scope, receive, send)


async def _read_away(scope: Scope, receive: Receive) -> bool:
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
