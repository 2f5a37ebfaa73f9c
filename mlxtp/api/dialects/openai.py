"""The OpenAI dialect: `POST /v1/chat/completions` and `GET /v1/models`.

Also shapes of answers that OpenAI's other dialects share, and of the cluster's health.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import MlxtpError
from ...text.tokenizer import Name
from ...text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    Scored,
    WholeAnswer,
)
from ..adapter import SSE, About, AnswerWriter, Json, Operation
from ..backend import Health, ModelInfo, StoredModelInfo, StreamEnd
from ..generation import Generation
from ..http_errors import error_body_of
from ..streaming import COMMENT
from . import anthropic
from .openai_request import ChatRequest, OpenAIAnswerOptions, parse_chat
from .request_parts import TextReader, text_of

# --- answers ----------------------------------------------------------------------------------------------


Names = Callable[[int], Name]

TOO_LONG = (
    "This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
    "tokens. Please reduce the length of the messages."
)
LEAST_LOGPROB = -9999.0  # OpenAI's value for next to impossible tokens; JSON has no minus infinity


def usage(about: About, ends: Sequence[StreamEnd]) -> Json:
    """Return the usage of all answers. A prompt token is cached only if no answer had to compute it."""
    prompt, n = sum(about.prompt_tokens), about.ask.options.n
    completion = sum(end.generated for end in ends)
    accepted = sum(end.accepted for end in ends)
    cached = sum(min(end.cached for end in ends[first : first + n]) for first in range(0, len(ends), n))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(end.drafted for end in ends) - accepted,
        },
    }


def first_open(about: About, ends: Container[int]) -> int:
    """Return the first choice that has not ended."""
    return next(choice for choice in range(about.choices) if choice not in ends)


def finishes(wholes: Sequence[WholeAnswer]) -> list[Finish]:
    """Return the end of each choice."""
    return [whole.finish for whole in wholes if whole.finish is not None]


def completion_body(about: About, wholes: Sequence[WholeAnswer], custom: Collection[str] = ()) -> Json:
    """Return the whole answer to a request that does not stream. `custom`: names of plain-text tools."""
    ends = finishes(wholes)
    scored = about.ask.options.logprobs >= 0
    rows = [
        {
            "index": index,
            "message": _message(whole, custom),
            "logprobs": logprobs(whole.scores, about.names) if scored else None,
            "finish_reason": end.reason,
        }
        for index, (whole, end) in enumerate(zip(wholes, ends, strict=True))
    ]
    counts = usage(about, [end.end for end in ends])
    return head(about, "chatcmpl", "chat.completion") | {"choices": rows, "usage": counts}


def _message(whole: WholeAnswer, custom: Collection[str]) -> Json:
    message: Json = {"role": "assistant", "content": whole.text, "refusal": None}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["content"] = whole.text or None
        message["tool_calls"] = [
            _tool_call(call.id, call.name, call.arguments, call.name in custom) for call in whole.calls
        ]
    return message


def _tool_call(id_: str, name: str, arguments: str, custom: bool) -> Json:
    if custom:
        return {"id": id_, "type": "custom", "custom": {"name": name, "input": text_of(arguments)}}
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def logprobs(scores: Sequence[Scored], names: Names) -> Json:
    """Return scores in OpenAI's shape. A token without bytes has no text in the answer."""
    content = [
        _logprob(token, score.logprob, names)
        | {"top_logprobs": [_logprob(other, logprob, names) for other, logprob in score.top]}
        for token, score in scores
    ]
    return {"content": content, "refusal": None}


def _logprob(token: int, logprob: float, names: Names) -> Json:
    name, bytes_ = names(token)
    return {"token": name, "logprob": bounded(logprob), "bytes": bytes_}


def bounded(logprob: float) -> float:
    """Return a logprob that JSON has."""
    return min(max(logprob, LEAST_LOGPROB), 0.0)


def head(about: About, prefix: str, object_: str) -> Json:
    """Return the fields that an answer and its chunks begin with."""
    return {
        "id": f"{prefix}-{about.id}",
        "object": object_,
        "created": int(about.created),
        "model": about.model,
    }


def end_of_stream(about: About, head: Json, ends: Mapping[int, StreamEnd], include_usage: bool) -> bytes:
    """Return the usage of all choices if the request includes it, and `[DONE]`."""
    last = b""
    if include_usage:
        in_order = [ends[index] for index in range(about.choices)]
        last = sse(head | {"choices": [], "usage": usage(about, in_order)})
    return last + b"data: [DONE]\n\n"


class ChunkWriter:
    """Writer of the events of one stream, as bytes. The part that all chunks share is encoded once."""

    def __init__(self, about: About, include_usage: bool, custom: Collection[str] = ()) -> None:
        self._about = about
        self._custom = custom
        self._texts: dict[tuple[int, int], TextReader] = {}  # of the custom calls, by choice and number
        self._head = head(about, "chatcmpl", "chat.completion.chunk")
        self._before = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage
        self._silent = set(range(about.choices))  # Choices of which nothing was sent yet, not even the role.
        self._ends: dict[int, StreamEnd] = {}

    def open(self) -> bytes:
        return COMMENT

    def idle(self, more: Json) -> bytes:
        """Return an empty chunk of the first open choice, with its role in its first chunk."""
        index = first_open(self._about, self._ends)
        delta = {"role": "assistant", "content": ""} if index in self._silent else {}
        self._silent.discard(index)
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        usage: Json = {"usage": None} if self._include_usage else {}
        return sse(self._head | {"choices": [choice]} | usage | more)

    def begin(self) -> bytes:
        return b""

    def write(self, event: AnswerEvent) -> bytes:
        return self._role(event.choice) + self._rest(event)

    def close(self) -> bytes:
        return end_of_stream(self._about, self._head, self._ends, self._include_usage)

    def fail(self, error: MlxtpError) -> bytes:
        return sse(error_body_of(error))

    def _role(self, index: int) -> bytes:
        """Return the first chunk of a choice, once."""
        if index not in self._silent:
            return b""
        self._silent.remove(index)
        return self._chunk(index, b'{"role":"assistant","content":""}')

    def _rest(self, event: AnswerEvent) -> bytes:
        index = event.choice
        match event:
            case ContentDelta(text=text, scores=scores):
                known = _encode(logprobs(scores, self._about.names)) if scores else b"null"
                return self._chunk(index, b'{"content":%b}' % json.dumps(text).encode(), known)
            case ReasoningDelta(text=text):
                return self._chunk(index, b'{"reasoning_content":%b}' % json.dumps(text).encode())
            case CallBegan() | CallArguments():
                return self._call(event)
            case Finish(reason=reason, end=end):
                self._ends[index] = end
                return self._chunk(index, b"{}", reason=json.dumps(reason).encode())

    def _call(self, event: CallBegan | CallArguments) -> bytes:
        at = event.choice, event.index
        call: Json = {"index": event.index}
        if isinstance(event, CallBegan):
            custom = event.name in self._custom
            if custom:
                self._texts[at] = TextReader()
            call |= _tool_call(event.id, event.name, "", custom)
        elif at in self._texts:
            more = self._texts[at].push(event.text)
            if not more:
                return b""
            call["custom"] = {"input": more}
        else:
            call["function"] = {"arguments": event.text}
        return self._chunk(event.choice, _encode({"tool_calls": [call]}))

    def _chunk(self, index: int, delta: bytes, scores: bytes = b"null", reason: bytes = b"null") -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before, index, delta, scores, reason, self._after,
        )  # fmt: skip


def _encode(data: Json) -> bytes:
    """Encode as ASCII, so that no client breaks lines at U+2028."""
    return json.dumps(data, separators=(",", ":")).encode()


def sse(data: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def model_body(model: ModelInfo | StoredModelInfo) -> Json:
    known: Json = {"supported_features": list(model.features)} if isinstance(model, ModelInfo) else {}
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mlxtp",
        "context_length": model.context,
        "max_model_len": model.context,
    } | known


def models_body(models: Sequence[ModelInfo | StoredModelInfo]) -> Json:
    return {"object": "list", "data": [model_body(model) for model in models]}


def health_body(health: Health) -> Json:
    return {
        "status": "ok" if health.ready else "unavailable",
        "state": health.state,
        "epoch": health.epoch,
        "world_size": health.world_size,
        "backend": health.backend,
        "model": health.model,
        "reason": health.reason,
        "ready": health.ready,
        "open_requests": health.open_requests,
        "ranks": [dict(rank) for rank in health.ranks],
    }


# --- the adapter ------------------------------------------------------------------------------------------


MODELS = "/v1/models"


class OpenAIChat:
    """The adapter of chats, and of all paths that no other dialect owns."""

    prefixes: tuple[str, ...] = ("/v1/", "/")
    names: Mapping[str, str] = {}
    too_long = TOO_LONG
    media_type = SSE
    operations = (
        Operation("GET", "/health", "The state of the cluster"),
        Operation(
            "GET",
            "/v1/models",
            "The models that can be served, the loaded one first",
        ),
        Operation("GET", "/v1/models/{id}", "One model"),
        Operation("POST", "/v1/chat/completions", "Answer a chat", ChatRequest, SSE),
    )

    def routes(self, generation: Generation) -> Sequence[Route]:
        async def chat(request: Request) -> Response:
            return await generation.answer(self, request, parse_chat)

        async def models(request: Request) -> Response:
            shape = anthropic.models_body if speaks_anthropic(request.headers) else models_body
            return JSONResponse(shape(await generation.catalog.listed()))

        async def model(request: Request) -> Response:
            shape = anthropic.model_body if speaks_anthropic(request.headers) else model_body
            return JSONResponse(shape(await generation.catalog.find(request.path_params["id"])))

        return [
            Route("/v1/chat/completions", generation.endpoint(self, chat), methods=["POST"]),
            # `app.py` handles their errors, since it knows the client's dialect
            Route(MODELS, models, methods=["GET"]),
            Route(f"{MODELS}/", models, methods=["GET"]),
            Route(f"{MODELS}/{{id:path}}", model, methods=["GET"]),
        ]

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        asked: OpenAIAnswerOptions = about.ask.dialect
        return completion_body(about, wholes, asked.custom)

    def writer(self, about: About) -> AnswerWriter:
        asked: OpenAIAnswerOptions = about.ask.dialect
        return ChunkWriter(about, asked.include_usage, asked.custom)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body_of(error)


def speaks_anthropic(headers: Headers) -> bool:
    """Return True for a client of Anthropic's dialect. Two dialects list models at the same path."""
    return "anthropic-version" in headers
