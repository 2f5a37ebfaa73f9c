"""The HTTP endpoints. `create_app` is all that the agent needs of this package besides `serve`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import Code, MlxtpError, RequestError
from . import answers, openai, settings
from .admin import Administration
from .admin import routes as admin_routes
from .backend import DRAINING, Backend, End, ModelInfo
from .backend import Request as Wanted
from .choices import Answers, Piece, collect
from .guard import LOOPBACK_HOSTS, HostGuard
from .pages import Observed
from .pages import routes as page_routes
from .stops import TextStream
from .streaming import ClientGone, EventStream, unless_gone
from .text import Name, Text

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 1024 * 1024
BODY_S = 60.0
_LARGE_BYTES = 64 * 1024  # from here on, parsing and tokenizing happen in a thread
_NO_READER = 499  # what nobody will read, as proxies log it


def create_app(
    backend: Backend,
    *,
    admin: Administration | None = None,
    observed: Observed | None = None,
    allowed_hosts: Collection[str] = LOOPBACK_HOSTS,
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_s: float = 3.0,
    retry_after_s: int = 5,
    body_s: float = BODY_S,
) -> Starlette:
    """The HTTP side of one agent.

    `admin` answers the commands of this Mac, `observed` is what the page shows.

    `allowed_hosts`: names in Host and Origin that are answered, `*`
    for any. `keep_alive_s`: the longest silence in a stream. `retry_after_s`: what a client is told while the
    model is not ready. `body_s`: the time to send a body.
    """
    endpoints = _Endpoints(backend, max_body_bytes, keep_alive_s, retry_after_s, body_s)
    app = Starlette(
        routes=[
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/", endpoints.models, methods=["GET"]),
            Route("/v1/models/{id:path}", endpoints.model, methods=["GET"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            *(admin_routes(admin) if admin is not None else ()),
            *(page_routes(observed) if observed is not None else ()),
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
    """A chat request that passed every check: one request to the backend for each choice."""

    text: Text
    model: ModelInfo
    requests: tuple[Wanted, ...]
    stops: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return len(self.requests[0].prompt)

    @property
    def scored(self) -> bool:
        return self.requests[0].logprobs >= 0

    def streams(self) -> list[TextStream]:
        return [
            TextStream(self.text.detokenizer(skip=self.model.eos), self.stops, self.scored)
            for _ in self.requests
        ]

    def name(self, token: int) -> Name:
        name, bytes_ = self.text.name(token)
        return name, None if token in self.model.eos else bytes_


class _Endpoints:
    def __init__(
        self, backend: Backend, max_body_bytes: int, keep_alive_s: float, retry_after_s: int, body_s: float
    ) -> None:
        self._backend = backend
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        self._retry_after_s = retry_after_s
        self._body_s = body_s

    async def health(self, _request: Request) -> Response:
        health = self._backend.health()
        return self._json(answers.health_body(health), 200 if health.ready else 503)

    async def models(self, _request: Request) -> Response:
        return JSONResponse(answers.models_body(self._backend.models()))

    async def model(self, request: Request) -> Response:
        return JSONResponse(
            answers.model_body(openai.find_model(request.path_params["id"], self._backend.models()))
        )

    async def chat(self, request: Request) -> Response:
        body = await self._read_body(request)
        chat = await _in_thread_if(len(body) > _LARGE_BYTES, lambda: openai.parse_chat(body))
        address = request.client.host if request.client is not None else ""
        job = await self._job(chat, len(body), settings.client_of(chat, address))
        completion = answers.Completion(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), job.model.id)
        async with AsyncExitStack() as open_:
            asked = Answers()
            open_.push_async_callback(asked.aclose)
            for wanted in job.requests:
                asked.add(self._backend.generate(wanted))
            try:
                await unless_gone(request.receive, asked.accepted())
            except RequestError as error:
                if chat.response_format is not None and error.code is Code.BAD_REQUEST:
                    error.param = error.param or "response_format"
                raise
            pieces = asked.pieces(job.streams())
            if chat.stream:
                writer = answers.ChunkWriter(completion, chat.include_usage, job.name)
                events = _events(pieces, writer, len(asked), job.prompt_tokens)
                open_.pop_all()  # from here on the stream closes them
                return EventStream(events, asked, self._keep_alive_s)
            choices = await unless_gone(request.receive, collect(pieces, len(asked), job.scored))
        return await _in_thread_if(
            job.scored,
            lambda: JSONResponse(answers.completion_body(completion, job.prompt_tokens, choices, job.name)),
        )

    async def _read_body(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(self._body_s):
                return await _read_body(request, self._max_body_bytes)
        except TimeoutError:
            raise RequestError(f"the body was not complete within {self._body_s:g} s", status=408) from None

    async def _job(self, chat: openai.ChatRequest, size: int, client: str) -> _Job:
        models, text = self._backend.models(), self._backend.text()
        if not models or text is None:
            raise self._not_ready()
        model = openai.find_model(chat.model, models)
        seed = secrets.randbits(63) if chat.seed is None else settings.seed_of(chat.seed)
        sampling = settings.sampling(chat, model.defaults, seed)
        shaping = settings.shaping(chat, model.vocabulary)
        stops = settings.stop_strings(chat)
        messages = openai.chat_messages(chat.messages)
        openai.check_may_fit(messages, text.longest_token, model)
        prompt = await _in_thread_if(size > _LARGE_BYTES, lambda: text.prompt_ids(messages))
        max_tokens = openai.token_budget(chat.budget, prompt, model)
        settings.check_min_tokens(shaping.min_tokens, max_tokens)
        if self._backend.text() is not text:  # another model was loaded while we were in the thread
            raise self._not_ready()
        first = Wanted(
            prompt,
            max_tokens,
            sampling,
            shaping,
            settings.logprobs(chat),
            bool(chat.ignore_eos),
            client,
            chat.deadline_s or 0.0,
        )
        return _Job(text, model, settings.choices(first, chat.n or 1), stops)

    def _not_ready(self) -> RequestError:
        health = self._backend.health()
        why = f": {health.reason}" if health.reason else ""
        if health.state == DRAINING:
            return RequestError(f"no new requests{why}; try again", Code.SHUTTING_DOWN, status=503)
        return RequestError(f"no model is ready (state {health.state}){why}", Code.NOT_READY, status=503)

    # --- errors -------------------------------------------------------------------------------------------

    async def refuse(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, MlxtpError)
        status = answers.error_status(error)
        if not isinstance(error, RequestError):
            log.warning("request failed with %s: %s", error.code, error.detail)
        return self._json(answers.error_body_of(error), status)

    async def refuse_http(self, request: Request, error: Exception) -> Response:
        """No such path, or not with this method."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, Code.BAD_REQUEST.value)
        body = answers.error_body(message, code, error.status_code)
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def nobody(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=_NO_READER)

    async def fail(self, _request: Request, _error: Exception) -> Response:
        """A bug. Starlette raises the error again after this answer, and the server logs its traceback."""
        return self._json(_internal_error(), 500)

    def _json(self, body: answers.Json, status: int) -> Response:
        headers = {}
        if status in (429, 503):
            headers["retry-after"] = str(self._retry_after_s)
        elif status == 504:  # what took too long once will do so again
            headers["x-should-retry"] = "false"
        elif status == 408:  # the rest of the body must not be taken for another request
            headers["connection"] = "close"
        return JSONResponse(body, status, headers=headers)


async def _events(
    pieces: AsyncGenerator[Piece], writer: answers.ChunkWriter, count: int, prompt_tokens: int
) -> AsyncGenerator[bytes]:
    """`count` answers as server-sent events. A failure is the last one: the status is long gone."""
    openings = [writer.role(index) for index in range(count)]
    ends: list[End] = []
    try:
        async with aclosing(pieces):
            async for index, text, scores, end in pieces:
                event = openings[index]
                openings[index] = b""
                if text or scores:
                    event += writer.text(index, text, scores)
                if end is not None:
                    ends.append(end)
                    event += writer.finish(index, end.reason)
                    if len(ends) == count:
                        event += writer.close(prompt_tokens, ends)
                yield event
    except MlxtpError as error:
        log.warning("stream failed with %s: %s", error.code, error.detail)
        yield answers.sse(answers.error_body_of(error))
    except Exception:  # the request ends here, the server goes on
        log.exception("stream failed")
        yield answers.sse(_internal_error())


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


async def _in_thread_if(slow: bool, work: Callable[[], T]) -> T:
    """What takes long would hold up everybody else's tokens."""
    return await asyncio.to_thread(work) if slow else work()


def _internal_error() -> answers.Json:
    return answers.error_body("internal error; the server's log has the details", Code.INTERNAL.value, 500)
