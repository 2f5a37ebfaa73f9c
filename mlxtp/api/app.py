"""The HTTP endpoints. The agent needs only `create_app` and `serve` of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from ..errors import Code, MlxtpError, RequestError
from .adapter import SSE, Operation, document, internal_error
from .admin import Administration, Observed, admin_operations, admin_routes, page_routes
from .backend import Backend
from .catalog import UNNAMED, unknown_model
from .dialects import openai as answers
from .dialects.anthropic import ANTHROPIC
from .dialects.completions import Completions
from .dialects.ollama import Ollama
from .dialects.openai import MODELS, OpenAIChat, speaks_anthropic
from .dialects.responses import Responses
from .generation import Adapter, Generation
from .guard import Access, guards, is_stranger, keys_in
from .request_body import BODY_S, MAX_BODY_BYTES
from .streaming import ClientGone
from .wrong_paths import advice, meant

_NO_READER = 499  # client gone before the answer, as proxies log it
HEALTH = Operation("GET", "/health", "The state of the cluster")
_WATCHED = (
    Operation("GET", "/cluster", "Snapshot of the cluster"),
    Operation("GET", "/cluster/events", "Snapshots as they change", media=SSE),
    Operation("GET", "/metrics", "Metrics for Prometheus", media="text/plain"),
)


def adapters() -> tuple[Adapter, ...]:
    """Return all dialects. The last one owns the paths that no other dialect owns."""
    return (ANTHROPIC, Ollama(), Completions(), Responses(), OpenAIChat())


def create_app(
    backend: Backend,
    *,
    admin: Administration | None = None,
    access: Access | None = None,
    observed: Observed | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_s: float = 3.0,
    retry_after_s: int = 5,
    body_s: float = BODY_S,
) -> Starlette:
    """Return the HTTP app of one agent.

    `admin` handles this Mac's commands. `observed` feeds the page. `access`: who may use the rest; without
    it, clients on this Mac. `keep_alive_s`: the longest silence in a stream. `retry_after_s`: the
    `Retry-After` while the model is not ready. `body_s`: the time to send a body.
    """
    access = access or Access()
    generation = Generation(
        backend,
        max_body_bytes=max_body_bytes,
        keep_alive_s=keep_alive_s,
        retry_after_s=retry_after_s,
        body_s=body_s,
    )
    dialects = adapters()
    refusals = _Refusals(generation, dialects)

    async def health(_generation: Generation, request: Request) -> Response:
        name = request.query_params.get("model")
        models = access.keys.models_for(keys_in(request.headers)) if access.keys is not None else ()
        now, strange = generation.catalog.health(name, models), is_stranger(access, request.scope)
        found, own = generation.catalog.deployment(name), generation.catalog.health(None, models).deployments
        if name not in UNNAMED and (found is None or found.name not in {each.name for each in own}):
            raise unknown_model(name, () if strange else [each.model or each.name for each in own])
        if strange:  # a reason names Macs, models and folders
            now = replace(now, model=None, reason=None, ranks=(), deployments=())
        headers = {} if now.ready else {"retry-after": str(retry_after_s)}
        return JSONResponse(answers.health_body(now), 200 if now.ready else 503, headers=headers)

    endpoints = [(HEALTH, health), *(each for dialect in dialects for each in dialect.endpoints.items())]

    async def openapi(request: Request) -> Response:
        there = {route.path for route in request.app.routes if isinstance(route, Route)}
        described = [each for each, _ in endpoints]
        described += [each for each in (*_WATCHED, *admin_operations()) if each.path in there]
        return JSONResponse(document(described, version("mlxtp")))

    app = Starlette(
        routes=[
            Route("/openapi.json", openapi, methods=["GET"]),
            *(
                Route(path, partial(handler, generation), methods=[at.method])
                for at, handler in endpoints
                for path in spellings(at)
            ),
            *(admin_routes(admin) if admin is not None else ()),
            *(page_routes(observed, access.keys) if observed is not None else ()),
        ],
        middleware=guards(access, refusals.answer),
        exception_handlers={
            MlxtpError: refusals.refuse,
            HTTPException: refusals.refuse_http,
            ClientGone: refusals.drop,
            ClientDisconnect: refusals.drop,
            Exception: refusals.fail,
        },
    )
    app.router.redirect_slashes = False
    return app


def spellings(operation: Operation) -> tuple[str, ...]:
    """Return the paths of an operation. Many clients leave out `/v1`."""
    short = operation.path.removeprefix("/v1")
    return (operation.path,) if operation.always or short == operation.path else (operation.path, short)


class _Refusals:
    """Refusals outside of an endpoint, in the shape of the dialect that the client speaks."""

    def __init__(self, generation: Generation, dialects: Sequence[Adapter]) -> None:
        self._generation = generation
        self._dialects = dialects

    async def refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, MlxtpError)
        return self._generation.refusal(self._dialect(request.scope), error)

    async def refuse_http(self, request: Request, error: Exception) -> Response:
        """Refuse an unknown path, or a method that the path does not have."""
        assert isinstance(error, HTTPException)
        path, method = request.scope["path"], request.method
        message, end, headers = f"{method} {path}: {error.detail}", "", dict(error.headers or {})
        routes = [each for each in request.app.routes if isinstance(each, Route)]
        if error.status_code == 405:  # several routes may have the path
            first = next(each for each in routes if each.path_regex.match(path))
            there = [each.methods or () for each in routes if each.path == first.path]
            headers["Allow"] = ", ".join(sorted({*chain(*there)}))
        if error.status_code == 404:
            end = meant(path, lambda other: any(each.path_regex.match(other) for each in routes))
            message = "; ".join(filter(None, (message, advice(path, end))))
        codes = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED}
        code = codes.get(error.status_code, Code.BAD_REQUEST)
        refusal = RequestError(message, code, status=error.status_code)
        scope = {**request.scope, "path": end or path}
        return self._generation.refusal(self._dialect(scope), refusal, headers)

    async def drop(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=_NO_READER)

    async def fail(self, request: Request, _error: Exception) -> Response:
        """Answer after a bug. Starlette raises the error again afterwards, for the server's log."""
        return self._generation.refusal(self._dialect(request.scope), internal_error())

    def answer(self, scope: Scope, error: MlxtpError, headers: Mapping[str, str]) -> Response:
        return self._generation.refusal(self._dialect(scope), error, headers)

    def _dialect(self, scope: Scope) -> Adapter:
        paths = scope["path"], f"/v1{scope['path']}"
        if any(path.startswith(MODELS) for path in paths) and speaks_anthropic(Headers(scope=scope)):
            return ANTHROPIC
        owned = ((len(prefix), dialect) for dialect in self._dialects for prefix in dialect.prefixes
                 if any(path.startswith(prefix) for path in paths))  # fmt: skip
        everything_else = 0, self._dialects[-1]  # such as `*`, which begins with no slash
        return max(owned, key=lambda pair: pair[0], default=everything_else)[1]
