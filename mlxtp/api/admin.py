"""Routes for people who run this agent: commands below `/admin`, and the page at `/`.

Commands need a key that only this user can read. The endpoint's rules about Host and Origin apply to them
too, so that no web page can use them.

The page is read-only. It consists of the files in `page/`, unchanged: no build, nothing from elsewhere. Those
in `page/vendor/` are libraries of other projects. Its data are at `/cluster` and `/cluster/events`. It shows
output of models and names of other Macs, so its headers forbid the browser to run anything but these files.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import Code, RequestError, UserError
from ..short_names import stands_for
from .adapter import SSE
from .catalog import not_permitted
from .guard import PERMITTED, SHARED_ADMIN, Keys, is_local, keys_in
from .request_context import current, own_models
from .streaming import COMMENT, AnswerStream

# --- commands ---------------------------------------------------------------------------------------------


Json = Mapping[str, Any]
MAX_BODY_BYTES = 16 * 1024
_OF_MODELS = ("model", "until_then")  # fields of replies that are names of models


class ModelCommands(Protocol):
    """Operations on models."""

    async def on_disk(self) -> Json: ...
    async def serve(
        self, model: str, nodes: str, *, replicas: str, on: str, keep: str, only: str
    ) -> Json: ...
    def unload(self, model: str, everything: str) -> Json: ...
    async def pull(self, model: str, everywhere: str) -> Json: ...
    def pulling(self, model: str) -> Json: ...
    def stored(self) -> Json: ...
    def removable(self, model: str, repair: str) -> Json: ...
    def removed(self, model: str) -> Json: ...


class MemberCommands(Protocol):
    """Operations on the members of a cluster."""

    def roster(self) -> Json: ...
    async def token(self) -> Json: ...
    def let_in(self, node: str) -> Json: ...
    async def remove(self, node: str, with_admitted: str) -> Json: ...
    def leave(self, force: str) -> Json: ...
    async def hand_over(self, node: str, move: str, sure: str) -> Json: ...


class CacheCommands(Protocol):
    """Operations on caches of earlier prompts."""

    async def kept(self) -> Json: ...
    async def clear(self, model: str, where: str) -> Json: ...


class Administration(Protocol):
    """Operations of an agent for holders of `key`. Each raises UserError with the problem and its remedy."""

    key: str

    @property
    def models(self) -> ModelCommands: ...
    @property
    def members(self) -> MemberCommands: ...
    @property
    def caches(self) -> CacheCommands: ...
    def status(self) -> Json: ...
    def drain(self, within: str) -> Json: ...
    async def drain_progress(self) -> Json: ...
    def keys(self) -> Json: ...
    def settings(self) -> Json: ...
    def plan(self) -> Json: ...
    async def doctor(self) -> Json: ...
    async def bench_fabric(self, model: str) -> Json: ...


def admin_routes(admin: Administration) -> list[Route]:
    """Return the routes of the administration, for `create_app`."""

    def route(path: str, method: str, act: Callable[[Mapping[str, Any]], Json | Awaitable[Json]]) -> Route:
        async def answer(request: Request) -> Response:
            _check_key(request, admin.key)
            body = await _body(request) if method == "POST" else {}
            if method == "POST":
                _check_models(body)
            try:
                found = act(body)
                return JSONResponse(_without_others(await found if isinstance(found, Awaitable) else found))
            except UserError as error:
                words = error.detail.partition(" Deployed models:")[0] if own_models() else error.detail
                raise RequestError(words, error.code) from None

        return Route(f"/admin/{path}", answer, methods=[method])

    return [
        route("status", "GET", lambda _: admin.status()),
        route("drain", "POST", lambda body: admin.drain(_text(body, "within", ""))),
        route("progress", "GET", lambda _: admin.drain_progress()),
        route("keys", "GET", lambda _: admin.keys()),
        route("caches", "GET", lambda _: admin.caches.kept()),
        route(
            "caches/clear",
            "POST",
            lambda body: admin.caches.clear(_text(body, "model", ""), _text(body, "where", "")),
        ),
        route("settings", "GET", lambda _: admin.settings()),
        route("plan", "GET", lambda _: admin.plan()),
        route("models", "GET", lambda _: admin.models.on_disk()),
        route("doctor", "GET", lambda _: admin.doctor()),
        route("members", "GET", lambda _: admin.members.roster()),
        route("token", "POST", lambda _: admin.members.token()),
        route("bench/fabric", "POST", lambda body: admin.bench_fabric(_text(body, "model", ""))),
        route(
            "serve",
            "POST",
            lambda body: admin.models.serve(
                _text(body, "model"),
                _text(body, "nodes", ""),
                **{
                    name: _text(body, name, "")
                    for name in ("replicas", "on", "keep", "parallel", "split", "only")
                },
            ),
        ),
        route(
            "unload",
            "POST",
            lambda body: admin.models.unload(_text(body, "model", ""), _text(body, "everything", "")),
        ),
        route(
            "pull",
            "POST",
            lambda body: admin.models.pull(_text(body, "model"), _text(body, "everywhere", "")),
        ),
        route("pulling", "POST", lambda body: admin.models.pulling(_text(body, "model"))),
        route("stored", "GET", lambda _: admin.models.stored()),
        route(
            "removable",
            "POST",
            lambda body: admin.models.removable(_text(body, "model"), _text(body, "repair", "")),
        ),
        route("removed", "POST", lambda body: admin.models.removed(_text(body, "model"))),
        route("let_in", "POST", lambda body: admin.members.let_in(_text(body, "node"))),
        route(
            "remove",
            "POST",
            lambda body: admin.members.remove(_text(body, "node"), _text(body, "with_admitted", "")),
        ),
        route("leave", "POST", lambda body: admin.members.leave(_text(body, "force", ""))),
        route(
            "authority",
            "POST",
            lambda body: admin.members.hand_over(
                _text(body, "node"), _text(body, "move", ""), _text(body, "sure", "")
            ),
        ),
    ]


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


def _check_models(body: Mapping[str, Any]) -> None:
    """Refuse a key that is for some models to change others."""
    request = current()
    if request is not None and request.models:
        if body.get("only") or body.get("everything"):
            raise not_permitted(request, "all models")
        name = str(body.get("model") or "all models")
        if name not in request.models and stands_for(name) not in request.models:
            raise not_permitted(request, name)


def _without_others(found: Json) -> Json:
    """Return a reply without the models that the request's key is not for."""
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


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise RequestError(f"{name}: a string is expected", param=name)
    return value


# --- the page ---------------------------------------------------------------------------------------------


FOLDER = Path(__file__).parent / "page"
LOOK_S = 0.5  # seconds between two updates of a watcher, at least
KEEP_ALIVE_S = 3.0
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
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


def page_routes(observed: Observed, keys: Keys | None = None) -> list[Route]:
    """Return the routes of the page, for `create_app`. A watcher whose key ends is let go."""
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

    A viewer with an API key sees its own open requests: the lengths of others tell about their prompts.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._until = float("-inf")
        self._shown: Json = {}
        self._texts: dict[str | None, bytes] = {}  # by viewer

    def now(self, viewer: str | None, *, fresh: bool = False) -> bytes:
        """Return the snapshot as JSON, the same bytes as long as nothing changes; all of it for None."""
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
    """Return the route of one file, read once. `index.html` is at `/`, others below `/page/`."""
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag, "content-type": _TYPES[path.suffix]}

    async def answer(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    name = path.relative_to(FOLDER).as_posix()
    return Route("/" if name == "index.html" else f"/page/{name}", answer, methods=["GET"])
