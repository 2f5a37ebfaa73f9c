"""OpenAI's endpoints that mlxtp does not serve. Each refusal says so, so that users need not search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...errors import Code, RequestError
from ..adapter import Operation
from ..generation import Handler

UNSERVED = {
    "/v1/embeddings": "embeddings are not served: mlxtp runs models that write text",
    "/v1/audio/{rest:path}": "audio is not served: mlxtp runs models that read and write text",
    "/v1/images/{rest:path}": "images are not served: mlxtp runs models that read and write text",
    "/v1/moderations": "moderations are not served: mlxtp has no model that judges texts",
}
PREFIXES = ("/v1/embeddings", "/v1/audio", "/v1/images", "/v1/moderations")
STATUS = 404  # status after which client libraries do not retry
OPERATIONS = tuple(
    Operation("POST", path.replace(":path", ""), "Not served", always=STATUS) for path in UNSERVED
)


def routes(endpoint: Callable[[Handler], Handler]) -> Sequence[Route]:
    """Return the routes. `endpoint` gives errors their shape."""
    return [Route(path, endpoint(_refusing(detail)), methods=["POST"]) for path, detail in UNSERVED.items()]


def _refusing(detail: str) -> Handler:
    async def refuse(_request: Request) -> Response:
        raise RequestError(detail, Code.NOT_SUPPORTED, status=STATUS)

    return refuse
