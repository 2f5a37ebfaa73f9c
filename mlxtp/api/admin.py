"""Routes for people who run this agent: commands below `/admin`, and the page at `/`.

Commands need a key that only this user can read. The page is read-only and is served from `page/` unchanged.
It gets its data from `/cluster`. Its headers forbid the browser to run anything else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import Code, RequestError, UserError
from ..short_names import stands_for
from ..verbs import VERBS, Verb
from .adapter import SSE, Operation
from .api_keys import KeyRing
from .catalog import not_permitted
from .guard import ADMIN, PERMITTED, SHARED_ADMIN, is_local, keys_in
from .request_context import current, own_models
from .streaming import COMMENT, AnswerStream

# --- commands ---------------------------------------------------------------------------------------------


Json = Mapping[str, Any]
MAX_BODY_BYTES = 16 * 1024
_OF_MODELS = ("model", "until_then")  # fields of replies that are names of models


class Administration(Protocol):
    """Handlers of an agent's commands, for holders of `key`."""

    key: str

    async def carry_out(self, verb: Verb) -> Json:
        """Return the reply. Raises UserError with the problem and its remedy."""


def admin_operations() -> list[Operation]:
    def operation(verb: type[Verb]) -> Operation:
        summary, body = (verb.__doc__ or "").partition("\n")[0], verb if fields(verb) else None
        return Operation(verb.method, f"{ADMIN}/{verb.path}", summary, body)

    return list(map(operation, VERBS.values()))


def admin_routes(admin: Administration) -> list[Route]:
    def route(kind: type[Verb]) -> Route:
        async def answer(request: Request) -> Response:
            _check_key(request, admin.key)
            verb = kind.read(await _body(request) if kind.method == "POST" else {})
            _check_models(verb)
            try:
                return JSONResponse(_without_others(await admin.carry_out(verb)))
            except UserError as error:
                words = error.detail.partition(" Deployed models:")[0] if own_models() else error.detail
                raise RequestError(words, error.code) from None

        return Route(f"{ADMIN}/{kind.path}", answer, methods=[kind.method])

    return list(map(route, VERBS.values()))


def _check_key(request: Request, key: str) -> None:
    permitted = request.scope.get(PERMITTED)
    if permitted and permitted == SHARED_ADMIN.get(request.scope["path"]):
        return
    if not is_local(request.scope):
        raise RequestError("only commands on this Mac itself may do that", status=403)
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise RequestError(
            "only commands of this user on this Mac may do that; they read the key in the home folder",
            Code.BAD_REQUEST,
            status=401,
        )
    if (context := current()) is not None:
        context.origin, context.admitted = "commands of this Mac", True


def _check_models(verb: Verb) -> None:
    """Refuse to let a key that is limited to some models change others."""
    request, body = current(), verb.body()
    if request is not None and request.models and verb.method == "POST":
        if body.get("only") or body.get("everything"):
            raise not_permitted(request, "all models")
        name = body.get("model") or "all models"
        if name not in request.models and stands_for(name) not in request.models:
            raise not_permitted(request, name)


def _without_others(found: Json) -> Json:
    """Return a reply with only the models that the request's key may use."""
    if not (models := own_models()):
        return found
    names = {*models, *map(stands_for, models)}
    own = {
        key: [each for each in value if (each["name"] if isinstance(each, Mapping) else each) in names]
        for key, value in found.items()
        if key in ("models", "unloaded", "left", "replaced")
    }
    texts = {key: value if value in names else "" for key, value in found.items() if key in _OF_MODELS}
    return {**found, **own, **texts}


async def _body(request: Request) -> Mapping[str, Any]:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


# --- the page ---------------------------------------------------------------------------------------------


FOLDER = Path(__file__).parent / "page"
LOOK_S = 0.5  # least time between two updates of a watcher
KEEP_ALIVE_S = 3.0
_SCRIPT = "text/javascript; charset=utf-8"
_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": _SCRIPT, ".mjs": _SCRIPT,
    ".svg": "image/svg+xml", ".woff2": "font/woff2",
}  # fmt: skip
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


def page_routes(observed: Observed, keys: KeyRing | None = None) -> list[Route]:
    """Return the routes of the page. A watcher is disconnected when its key is revoked or expires."""
    shared = _Shared(observed)

    async def moment(request: Request) -> Response:
        headers = {"cache-control": "no-store"}
        return Response(shared.now(_viewer(request)), media_type="application/json", headers=headers)

    async def events(request: Request) -> Response:
        given = keys_in(request.headers)
        look = partial(shared.now, _viewer(request))
        watching = _watch(look, observed.over, lambda: keys is None or keys.admits(given))
        return AnswerStream(watching, watching, KEEP_ALIVE_S, lambda: COMMENT, SSE)

    return [
        Route("/cluster", moment, methods=["GET"]),
        Route("/cluster/events", events, methods=["GET"]),
        *(_file(path) for path in sorted(FOLDER.rglob("*")) if path.suffix in _TYPES),
    ]


class _Shared:
    """One snapshot for all simultaneous watchers, never older than `LOOK_S` / 2.

    A viewer with an API key sees only its own open requests, since lengths reveal something about prompts.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._until = float("-inf")
        self._shown: Json = {}
        self._texts: dict[str | None, bytes] = {}  # by viewer

    def now(self, viewer: str | None, *, fresh: bool = False) -> bytes:
        """Return the snapshot as JSON, the same bytes until something changes. Viewer None sees all."""
        clock = time.monotonic()
        if fresh or clock >= self._until:
            self._until = clock + LOOK_S / 2
            self._shown, self._texts = self._observed.snapshot(), {}
        if viewer not in self._texts:
            rows = [dict(each) for each in self._shown.get("running", ())]
            own = [each for each in rows if each.pop("owner", "") == viewer or viewer is None]
            shown = {name: own if name == "running" else each for name, each in self._shown.items()}
            self._texts[viewer] = json.dumps(shown, separators=(",", ":")).encode()
        return self._texts[viewer]


def _viewer(request: Request) -> str | None:
    """Return the hash of a viewer's key; None for this Mac without one, which sees all."""
    context = current()
    if context is not None and context.key_hash:
        return context.key_hash
    return None if is_local(request.scope) else "none"


async def _watch(
    look: Callable[..., bytes], over: asyncio.Event, admitted: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """Yield a snapshot at once, then another after each change, until `over` or not `admitted`."""
    told = b""
    while admitted():
        last = over.is_set()
        if (now := look(fresh=last)) != told:
            told = now
            yield b"data: " + now + b"\n\n"
        if last:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await over.wait()


def _file(path: Path) -> Route:
    """Return the route of one file, read once. `index.html` is at `/`, others below `/page/`.

    Clients of Ollama that look whether it is there get its words at `/`.
    """
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag, "vary": "accept", "content-type": _TYPES[path.suffix]}

    async def answer(request: Request) -> Response:
        asked = request.headers.get("accept", "")
        if path.name == "index.html" and request.method == "GET" and "text/html" not in asked:
            return Response("Ollama is running", headers={"vary": "accept"}, media_type="text/plain")
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    name = path.relative_to(FOLDER).as_posix()
    return Route("/" if name == "index.html" else f"/page/{name}", answer, methods=["GET"])
