"""Embeddings in OpenAI's and Ollama's shapes, and rankings in Cohere's and Jina's."""

from __future__ import annotations

import asyncio
import math
import struct
import time
import uuid
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from ...text.conversation import Prompt
from .. import field_names
from ..adapter import Json, Operation, compact
from ..answer_shapes import NULL, TEXT, fields, rules
from ..backend import ModelInfo
from ..generation import Generation, Handler
from ..request_body import MOST_TOKENS, BodySchema, Integer, in_range, missing, parsed, wrong
from ..streaming import AnswerStream
from ..vectors import MOST_TEXTS, TASK, VectorAnswer, VectorRequest, check_count
from .ollama_request import KeepAlive, served_name
from .request_parts import prompt_of, token_ids

MOST_WIDTH = 1 << 20
PIECE_BYTES = 1 << 16  # of vectors that are encoded at a time: 220 KB of JSON, in 3 ms


def texts_of(given: object, field: str = "input") -> tuple[Prompt, ...]:
    """Return the texts of a string, strings, token ids or lists of them. Raises RequestError."""
    match given:
        case None:
            raise missing(field)
        case str(text):
            return (text,)
        case [int() | float(), *_]:
            return (token_ids(given, field),)
        case list():
            check_count(given, field)
            return tuple([prompt_of(each, f"{field}[{place}]") for place, each in enumerate(given)])
        case _:
            raise wrong(field, "a string, strings, token ids or lists of token ids", given)


def _document(given: object, where: str) -> str:
    match given:
        case str(text) | {"text": str(text)}:
            return text
        case _:
            raise wrong(where, "a string, or an object with text", given)


# --- requests ---------------------------------------------------------------------------------------------


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}, "minItems": 1}
_MANY = {"type": "array", "minItems": 1, "maxItems": MOST_TEXTS}
_INPUT = {"anyOf": [TEXT, _IDS, _MANY | {"items": {"anyOf": [TEXT, _IDS]}}]}
_DOCUMENTS = _MANY | {"items": {"anyOf": [TEXT, fields({"text": TEXT})]}}


class EmbeddingsBody(BodySchema):
    """The body of `POST /v1/embeddings`."""

    api = "embeddings"
    model_config = rules(({"input": _INPUT},))

    model: str | None = None
    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer, in_range(1, MOST_WIDTH)] | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    user: str | None = None

    def asked(self) -> VectorRequest:
        return VectorRequest(
            self.model,
            texts_of(self.input),
            prompt=self.prompt_name or self.input_type,
            strict=self.prompt_name is not None,
            dimensions=self.dimensions or 0,
            user=self.user or "",
        )


class OllamaEmbed(BodySchema):
    """The body of `POST /api/embed`, and with `prompt` of `POST /api/embeddings`."""

    api = "ollama_embed"
    model_config = rules(({"input": _INPUT}, {"input": NULL, "prompt": _INPUT}))

    model: str | None = None
    input: Any = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: Annotated[Integer, in_range(0, MOST_WIDTH)] | None = None
    keep_alive: KeepAlive = None

    def asked(self, models: Sequence[ModelInfo]) -> VectorRequest:
        older = self.input is None
        return VectorRequest(
            served_name(self.model or "", models),
            texts_of(self.prompt if older else self.input, "prompt" if older else "input"),
            dimensions=self.dimensions or 0,
            cut=self.truncate is not False,
            keep_s=self.keep_alive,
        )


class RerankBody(BodySchema):
    """The body of `POST /v1/rerank`."""

    api = "rerank"
    model_config = rules(({"query": TEXT, "documents": _DOCUMENTS},))

    model: str | None = None
    query: str | None = None
    documents: list[Any] | None = None
    top_n: Annotated[Integer, in_range(1, MOST_WIDTH)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[Integer, in_range(1, MOST_WIDTH)] | None = None
    instruction: str | None = None
    user: str | None = None

    def asked(self) -> VectorRequest:
        if not self.query:
            raise missing("query")
        return VectorRequest(
            self.model,
            self._texts(),
            "documents",
            self.query,
            self.instruction or TASK,
            cut=self.max_tokens_per_doc is not None,
            most=self.max_tokens_per_doc or 0,
            user=self.user or "",
        )

    def _texts(self) -> tuple[str, ...]:
        given = self.documents or []
        check_count(given, "documents")
        return tuple([_document(each, f"documents[{place}]") for place, each in enumerate(given)])

    def ranked(self, answer: VectorAnswer) -> Json:
        """Return the results, best first. A score is the probability of yes rather than no."""
        pairs = [struct.unpack("<2f", vector) for vector in answer.vectors]
        scores = [_probability(yes - no) for no, yes in pairs]
        texts, results = self._texts() if self.return_documents else (), list[Json]()
        for place in sorted(range(len(scores)), key=lambda each: (-scores[each], each))[: self.top_n]:
            text: Json = {"document": {"text": texts[place]}} if texts else {}
            results.append({"index": place, "relevance_score": scores[place]} | text)
        used = {"total_tokens": answer.tokens, "prompt_tokens": answer.tokens}
        meta = {"tokens": {"input_tokens": answer.tokens, "output_tokens": 0}}
        return {
            "id": uuid.uuid4().hex,
            "model": answer.model,
            "results": results,
            "usage": used,
            "meta": meta,
        }


# --- answers ----------------------------------------------------------------------------------------------


def numbers(vector: bytes) -> bytes:
    """Return float32 as a JSON list, with the digits that they need."""
    found = struct.unpack(f"<{len(vector) // 4}f", vector)
    return f"[{','.join(['%.9g'] * len(found))}]".encode() % found


async def _pieces(
    head: bytes, vectors: Sequence[bytes], row: Callable[[int, bytes], bytes], tail: bytes
) -> AsyncGenerator[bytes]:
    """Yield the JSON of an answer, some rows at a time, as they are sent."""
    step = max(PIECE_BYTES // len(vectors[0]), 1)

    def rows(begin: int) -> bytes:
        return b",".join([row(at, each) for at, each in enumerate(vectors[begin : begin + step], begin)])

    for begin in range(0, len(vectors), step):
        # Numbers take long to encode; a thread keeps other requests' tokens moving.
        yield (b"," if begin else head) + await asyncio.to_thread(rows, begin)
    yield tail


def _quoted(vector: bytes) -> bytes:
    return b'"%b"' % b64encode(vector)


def _probability(odds: float) -> float:
    return 1 / (1 + math.exp(-odds)) if odds > 0 else 1 - 1 / (1 + math.exp(odds))


# --- endpoints --------------------------------------------------------------------------------------------


def _answered(
    generation: Generation, body: BodySchema, pieces: AsyncGenerator[bytes], room: AsyncExitStack
) -> Response:
    """Return the response of these pieces. It keeps the room until it is sent."""
    headers = field_names.headers(body.ignored)
    return AnswerStream(
        pieces, room, generation.keep_alive_s, lambda: b"", "application/json", headers=headers
    )


async def _embed(generation: Generation, request: Request) -> Response:
    asked = generation.vectors(request, partial(parsed, EmbeddingsBody), EmbeddingsBody.asked)
    body, answer, room = await asked
    write = _quoted if body.encoding_format == "base64" else numbers

    def row(place: int, vector: bytes) -> bytes:
        return b'{"object":"embedding","index":%d,"embedding":%b}' % (place, write(vector))

    usage = {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens}
    tail = b"]," + compact({"model": answer.model, "usage": usage})[1:]
    return _answered(generation, body, _pieces(b'{"object":"list","data":[', answer.vectors, row, tail), room)


async def _rerank(generation: Generation, request: Request) -> Response:
    body, answer, room = await generation.vectors(request, partial(parsed, RerankBody), RerankBody.asked)
    async with room:
        found = await asyncio.to_thread(lambda: compact(body.ranked(answer)))
    return Response(found, headers=field_names.headers(body.ignored), media_type="application/json")


async def ollama_embed(generation: Generation, request: Request) -> Response:
    arrived_ns, models = time.perf_counter_ns(), generation.catalog.models()
    asked = partial(OllamaEmbed.asked, models=models)
    body, answer, room = await generation.vectors(request, partial(parsed, OllamaEmbed), asked)
    took_ns = max(time.perf_counter_ns() - arrived_ns, 1)
    counts = {"load_duration": answer.loaded_ns, "prompt_eval_count": answer.tokens}
    told, vectors = {"model": body.model or answer.model, "total_duration": took_ns, **counts}, answer.vectors
    head, tail = compact(told)[:-1] + b',"embeddings":[', b"]}"
    if request.url.path == "/api/embeddings":
        head, vectors, tail = b'{"embedding":', vectors[:1], b"}"
    return _answered(
        generation, body, _pieces(head, vectors, lambda _place, vector: numbers(vector), tail), room
    )


#: In OpenAI's dialect.
ENDPOINTS: Mapping[Operation, Handler] = {
    Operation("POST", "/v1/embeddings", "Make embeddings of texts", EmbeddingsBody): _embed,
    **{
        Operation("POST", path, "Rank documents by a query", RerankBody): _rerank
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
}
