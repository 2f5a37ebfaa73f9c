"""The HTTP endpoints. `create_app` is all that the agent needs of this package besides `serve`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import Code, GroupError, MlxtpError, RequestError
from . import openai
from .backend import Backend, End, Event
from .guard import LOOPBACK_HOSTS, HostGuard
from .streaming import ClientGone, EventStream, closing, unless_gone
from .text import Detokenizer, Text

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 1024 * 1024
_LARGE_BYTES = 64 * 1024  # from here on, parsing and tokenizing happen in a thread
_NO_READER = 499  # what nobody will read, as proxies log it


def create_app(
    backend: Backend,
    *,
    allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_s: float = 10.0,
    retry_after_s: int = 5,
) -> Starlette:
    """The HTTP side of one agent.

    `allowed_hosts`: names in Host and Origin that are answered, `*` for any. `keep_alive_s`: the longest
    silence in a stream. `retry_after_s`: what a client is told while the model is not ready.
    """
    endpoints = _Endpoints(backend, max_body_bytes, keep_alive_s, retry_after_s)
    app = Starlette(
        routes=[
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/", endpoints.models, methods=["GET"]),
            Route("/v1/models/{id:path}", endpoints.model, methods=["GET"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        ],
        middleware=[Middleware(HostGuard, hosts=allowed_hosts)],
        exception_handlers={
            MlxtpError: endpoints.refuse,
            HTTPException: endpoints.refuse_http,
            ClientGone: endpoints.nobody,
            ClientDisconnect: endpoints.nobody,
            Exception: endpoints.fail,
        },
    )
    app.router.redirect_slashes = False
    return app


@dataclass(frozen=True, slots=True)
class _Job:
    """A chat request that passed every check."""

    text: Text
    model: str
    eos: tuple[int, ...]
    prompt: tuple[int, ...]
    max_tokens: int

    def detokenizer(self) -> Detokenizer:
        return self.text.detokenizer(skip=self.eos)


class _Endpoints:
    def __init__(
        self, backend: Backend, max_body_bytes: int, keep_alive_s: float, retry_after_s: int
    ) -> None:
        self._backend = backend
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        self._retry_after_s = retry_after_s

    async def health(self, _request: Request) -> Response:
        health = self._backend.health()
        return self._json(openai.health_body(health), 200 if health.ready else 503)

    async def models(self, _request: Request) -> Response:
        return JSONResponse(openai.models_body(self._backend.models()))

    async def model(self, request: Request) -> Response:
        return JSONResponse(
            openai.model_body(openai.find_model(request.path_params["id"], self._backend.models()))
        )

    async def chat(self, request: Request) -> Response:
        body = await _read_body(request, self._max_body_bytes)
        chat = await _in_thread_if(len(body) > _LARGE_BYTES, lambda: openai.parse_chat(body))
        job = await self._job(chat, len(body))
        completion = openai.Completion(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), job.model)
        # No await from here to the `closing` around it: an answer once asked for is also closed.
        events = self._backend.generate(job.prompt, job.max_tokens)
        if chat.stream:
            writer = openai.ChunkWriter(completion, chat.include_usage)
            return EventStream(_chunks(job, events, writer), events, self._keep_alive_s)
        async with closing(events):
            text, end = await unless_gone(request.receive, _collect(job, events))
        counts = openai.usage(len(job.prompt), end.generated)
        return JSONResponse(openai.completion_body(completion, text, end.reason, counts))

    async def _job(self, chat: openai.ChatRequest, size: int) -> _Job:
        models, text = self._backend.models(), self._backend.text()
        if not models or text is None:
            raise self._not_ready()
        model = openai.find_model(chat.model, models)
        messages = openai.chat_messages(chat.messages)
        openai.check_may_fit(messages, text.longest_token, model)
        prompt = await _in_thread_if(size > _LARGE_BYTES, lambda: text.prompt_ids(messages))
        max_tokens = openai.token_budget(chat.budget, prompt, model)
        if self._backend.text() is not text:  # another model was loaded while we were in the thread
            raise self._not_ready()
        return _Job(text, model.id, model.eos, prompt, max_tokens)

    def _not_ready(self) -> RequestError:
        health = self._backend.health()
        why = f": {health.reason}" if health.reason else ""
        return RequestError(f"no model is ready (state {health.state}){why}", Code.NOT_READY, status=503)

    # --- errors -------------------------------------------------------------------------------------------

    async def refuse(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, MlxtpError)
        status = openai.error_status(error)
        if not isinstance(error, RequestError):
            log.warning("request failed with %s: %s", error.code, error.detail)
        return self._json(openai.error_body_of(error), status)

    async def refuse_http(self, request: Request, error: Exception) -> Response:
        """No such path, or not with this method."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, Code.BAD_REQUEST.value)
        body = openai.error_body(message, code, error.status_code)
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def nobody(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=_NO_READER)

    async def fail(self, _request: Request, _error: Exception) -> Response:
        """A bug. Starlette raises the error again after this answer, and the server logs its traceback."""
        return self._json(_internal_error(), 500)

    def _json(self, body: openai.Json, status: int) -> Response:
        headers = {"retry-after": str(self._retry_after_s)} if status in (429, 503) else None
        return JSONResponse(body, status, headers=headers)


async def _collect(job: _Job, events: AsyncIterator[Event]) -> tuple[str, End]:
    """The whole answer."""
    detokenizer = job.detokenizer()
    parts: list[str] = []
    async for event in events:
        if isinstance(event, End):
            _check_complete(event)
            return "".join(parts) + detokenizer.finish(), event
        parts.append(detokenizer.push(event.tokens))
    raise _incomplete()


async def _chunks(
    job: _Job, events: AsyncIterator[Event], writer: openai.ChunkWriter
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events. A failure is the last one: the status is long gone."""
    detokenizer, opening = job.detokenizer(), writer.role()
    try:
        async for event in events:
            if isinstance(event, End):
                _check_complete(event)
                rest = detokenizer.finish()
                counts = openai.usage(len(job.prompt), event.generated)
                yield opening + (writer.text(rest) if rest else b"") + writer.end(event.reason, counts)
                return
            if text := detokenizer.push(event.tokens):
                yield opening + writer.text(text)
                opening = b""
        raise _incomplete()
    except MlxtpError as error:
        log.warning("stream failed with %s: %s", error.code, error.detail)
        yield openai.sse(openai.error_body_of(error))
    except Exception:  # the request ends here, the server goes on
        log.exception("stream failed")
        yield openai.sse(_internal_error())


def _incomplete() -> GroupError:
    return GroupError("the answer broke off", Code.INTERNAL)


def _check_complete(end: End) -> None:
    if end.reason == "cancel":
        raise GroupError("the request was cancelled on the server", Code.SHUTTING_DOWN)


async def _read_body(request: Request, limit: int) -> bytes:
    """The body, or RequestError 413. What is too large is not kept, and soon no longer read.

    A client that is still sending would not see the answer, so a body of up to 4 times the limit is read
    to its end and thrown away.
    """
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= 4 * limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > 4 * limit:
                break
    if size > limit:
        raise RequestError(f"the body is larger than {limit} bytes", status=413)
    return b"".join(parts)


async def _in_thread_if(large: bool, work: Callable[[], T]) -> T:
    """What is large would hold up everybody else's tokens."""
    return await asyncio.to_thread(work) if large else work()


def _internal_error() -> openai.Json:
    return openai.error_body("internal error; the server's log has the details", Code.INTERNAL.value, 500)
