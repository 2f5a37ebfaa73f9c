"""HTTP routes below `/admin` for this Mac's commands, with a key that only this user can read.

The endpoint's rules about Host and Origin apply here too, so that no web page can use them.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import Code, RequestError, UserError

Json = Mapping[str, Any]
MAX_BODY_BYTES = 16 * 1024


class Administration(Protocol):
    """Operations of an agent for holders of `key`. Each raises UserError with the problem and its remedy."""

    key: str

    def status(self) -> Json: ...

    def drain(self, within: str) -> Json: ...

    async def progress(self) -> Json: ...

    def keys(self) -> Json: ...

    def settings(self) -> Json: ...

    def plan(self) -> Json: ...

    async def models(self) -> Json: ...

    async def doctor(self) -> Json: ...

    async def token(self) -> Json: ...

    async def bench_fabric(self) -> Json: ...

    async def serve(self, model: str, nodes: str) -> Json: ...

    def unload(self) -> Json: ...

    async def pull(self, model: str, everywhere: str) -> Json: ...

    def pulling(self, model: str) -> Json: ...

    def stored(self) -> Json: ...

    def removable(self, model: str) -> Json: ...

    async def repairable(self, model: str) -> Json: ...

    def removed(self, model: str) -> Json: ...

    def members(self) -> Json: ...

    def let_in(self, node: str) -> Json: ...

    async def remove(self, node: str, with_admitted: str) -> Json: ...

    def leave(self, force: str) -> Json: ...


def routes(admin: Administration) -> list[Route]:
    """Return the administration's routes, for `create_app`."""

    def route(path: str, method: str, act: Callable[[Mapping[str, Any]], Json | Awaitable[Json]]) -> Route:
        async def answer(request: Request) -> Response:
            _check_key(request, admin.key)
            body = await _body(request) if method == "POST" else {}
            try:
                found = act(body)
                return JSONResponse(await found if isinstance(found, Awaitable) else found)
            except UserError as error:
                raise RequestError(error.detail, error.code) from None

        return Route(f"/admin/{path}", answer, methods=[method])

    return [
        route("status", "GET", lambda _: admin.status()),
        route("drain", "POST", lambda body: admin.drain(_text(body, "within", ""))),
        route("progress", "GET", lambda _: admin.progress()),
        route("keys", "GET", lambda _: admin.keys()),
        route("settings", "GET", lambda _: admin.settings()),
        route("plan", "GET", lambda _: admin.plan()),
        route("models", "GET", lambda _: admin.models()),
        route("doctor", "GET", lambda _: admin.doctor()),
        route("members", "GET", lambda _: admin.members()),
        route("token", "POST", lambda _: admin.token()),
        route("bench/fabric", "POST", lambda _: admin.bench_fabric()),
        route("serve", "POST", lambda body: admin.serve(_text(body, "model"), _text(body, "nodes", ""))),
        route("unload", "POST", lambda _: admin.unload()),
        route("pull", "POST", lambda body: admin.pull(_text(body, "model"), _text(body, "everywhere", ""))),
        route("pulling", "POST", lambda body: admin.pulling(_text(body, "model"))),
        route("stored", "GET", lambda _: admin.stored()),
        route("removable", "POST", lambda body: admin.removable(_text(body, "model"))),
        route("repairable", "POST", lambda body: admin.repairable(_text(body, "model"))),
        route("removed", "POST", lambda body: admin.removed(_text(body, "model"))),
        route("let_in", "POST", lambda body: admin.let_in(_text(body, "node"))),
        route(
            "remove",
            "POST",
            lambda body: admin.remove(_text(body, "node"), _text(body, "with_admitted", "")),
        ),
        route("leave", "POST", lambda body: admin.leave(_text(body, "force", ""))),
    ]


def _check_key(request: Request, key: str) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise RequestError(
            "only commands of this user on this Mac may do that; they read the key in the home folder",
            Code.BAD_REQUEST,
            status=401,
        )


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
