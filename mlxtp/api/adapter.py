"""Interface of an HTTP dialect, from request body to `GenerationRequest` and from events to answer. Pure.

Each dialect is one object (`generation.Adapter`), listed in `app.adapters`. `generation.py` handles the rest:
models, tokens, queues, clients that leave, keep-alive, failures.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from ..errors import Code, GroupError, LinkError, MlxtpError, RequestError
from ..text.conversation import GenerationRequest
from ..text.tokenizer import Name
from ..text.transcript import AnswerEvent, WholeAnswer
from .answer_shapes import ANSWERS, EVENTS, refusal, schema
from .backend import Sampling
from .catalog import TooLong

# --- operations, and /openapi.json ------------------------------------------------------------------------


Json = dict[str, Any]
_JSON = "application/json"
_REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path of a route. An operation with an empty `summary` is left out of the document.

    `body`, `query`: a model or a dataclass, or None if it takes none. `stream` is the media type of a
    streamed answer, `media` of a whole one. `always`: the status of an operation that refuses every request.
    """

    method: str
    path: str
    summary: str
    body: type[Any] | None = None
    stream: str = ""
    media: str = _JSON
    always: int = 0
    query: type[Any] | None = None


def document(operations: Iterable[Operation], version: str) -> Json:
    """Return the OpenAPI document (3.1)."""
    operations = [each for each in operations if each.summary]
    bodies: dict[Any, TypeAdapter[Any]] = {
        each.body: TypeAdapter(each.body) for each in operations if each.body is not None
    }
    references, definitions = TypeAdapter.json_schemas(
        [(body, "validation", adapter) for body, adapter in bodies.items()], ref_template=_REFERENCE
    )
    paths: dict[str, Json] = {}
    for each in operations:
        path = each.path.replace(":path", "")
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxtp", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation, path: str, references: Any) -> Json:
    words = re.sub("[/.]", "_", re.sub("[{}]", "", path).strip("/"))
    described: Json = {"summary": operation.summary, "operationId": f"{operation.method.lower()}_{words}"}
    if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if operation.query is not None:
        fields = TypeAdapter(operation.query).json_schema()["properties"]
        asked = [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
        described.setdefault("parameters", []).extend(asked)
    if operation.body is not None:
        body = {"schema": references[operation.body, "validation"]}
        described["requestBody"] = {"required": True, "content": {_JSON: body}}
    label = f"{operation.method} {path}"
    refused: Json = {_JSON: {"schema": schema(refusal(path))}}
    text: Json = {"schema": {"type": "string"}}
    # No version before 3.2 describes the parts of a stream.
    media: Json = {_JSON: {"schema": schema(ANSWERS.get(label, dict))}, SSE: {}}
    content: Json = {operation.media: media.get(operation.media, text)}
    if operation.stream:  # OpenAPI 3.2 calls an event's schema `itemSchema`
        content[operation.stream] = {"x-itemSchema": schema(EVENTS[label])}
    first = {"200": {"description": "the answer", "content": content}}
    if operation.always:
        first = {str(operation.always): {"description": "refused, always", "content": refused}}
    described["responses"] = {
        **first,
        "4XX": {"description": "refused", "content": refused},
        "5XX": {"description": "not now (503), or a failure", "content": refused},
    }
    return described


# --- dialects ---------------------------------------------------------------------------------------------


SSE = "text/event-stream"
NDJSON = "application/x-ndjson"


def compact(data: Any) -> bytes:
    """Encode as ASCII: a model may write half a character, and some clients break lines at U+2028."""
    return json.dumps(data, separators=(",", ":")).encode()


def named_event(data: Json) -> bytes:
    """Return a server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), compact(data))


@dataclass(slots=True)
class About:
    """Facts that all parts of one answer share.

    `id` is 32 hexadecimal digits. `created` in seconds since 1970. `prompt_tokens`: of each prompt; 0 until
    the model is loaded. `prompts`: the text of each prompt to continue. `prompt_ids`: the tokens of each
    prompt. `names` maps a token to its text when shown alone, and its bytes. `group` is the id of the group
    that began the answer; empty where unknown. `sampling` is what tokens are drawn with, `loaded_ns` the time
    that the model took to load; both as far as they are known.
    """

    id: str
    created: float
    model: str
    prompt_tokens: tuple[int, ...]
    prompts: tuple[str, ...]
    names: Callable[[int], Name]
    ask: GenerationRequest
    group: str = ""
    sampling: Sampling | None = None
    loaded_ns: int = 1
    prompt_ids: tuple[Sequence[int], ...] = ()

    @property
    def choices(self) -> int:
        """Number of answers, ordered by prompt."""
        return len(self.prompt_tokens) * self.ask.options.n


class AnswerWriter(Protocol):
    """Writer of one streamed answer. Each method returns the bytes to send, possibly none."""

    def open(self) -> bytes:
        """Return the part that is sent with the headers. `About` may be incomplete."""

    def begin(self) -> bytes:
        """Return the part before the first event. `About` is complete from here on."""
        return b""

    def write(self, event: AnswerEvent) -> bytes: ...
    def close(self) -> bytes:
        """Return the last part, after every choice has had its `Finish`."""

    def fail(self, error: MlxtpError) -> bytes:
        """Return the last part of a failed answer, instead of `close`. The answer must not look complete."""

    def idle(self, more: Json) -> bytes:
        """Return an event without content, but for the progress in `more`, for clients that count events."""


class Dialect(ABC):
    """Reader and writer of one dialect. The defaults are OpenAI's.

    `names` maps fields of `GenerationRequest`, `GenerationOptions` or `Conversation` to the dialect's own
    names, for errors. `too_long` is its message for a prompt of {tokens} tokens if only {most} fit.
    `media_type` is the media type of its streams.
    """

    names: Mapping[str, str] = {}
    too_long = (
        "This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
        "tokens. Please reduce the length of the messages."
    )
    media_type = SSE

    @abstractmethod
    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        """Return the body of an answer that is not streamed. `wholes` has one entry for each choice."""

    @abstractmethod
    def writer(self, about: About) -> AnswerWriter: ...

    def error(self, error: MlxtpError, status: int) -> Json:
        """Return the body of a refusal with this HTTP status."""
        return error_body_of(error)


# --- errors: status, body in OpenAI's shape, which is the default of all paths, and names of fields ------


def error_status(error: MlxtpError) -> int:
    """Return the HTTP status. After a lost group the client may retry, since the cluster forms a new one."""
    if isinstance(error, RequestError):
        return error.status
    if error.code is Code.DEADLINE:
        return 504
    lost = isinstance(error, GroupError | LinkError)
    return 503 if lost or error.code in (Code.NOT_READY, Code.SHUTTING_DOWN) else 500


def error_body(message: str, code: str, status: int, param: str | None = None, state: str = "") -> Json:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = code if code == Code.QUOTA else "rate_limit_error"
    more = {"state": state} if state else {}
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def error_body_of(error: MlxtpError) -> Json:
    param, state = (error.param, error.state) if isinstance(error, RequestError) else (None, "")
    return error_body(error.detail, error.code.value, error_status(error), param, state)


def internal_error() -> MlxtpError:
    return MlxtpError("internal error; the server's log has the details", Code.INTERNAL)


# --- names of fields --------------------------------------------------------------------------------------


def in_words_of(dialect: Dialect, error: MlxtpError) -> MlxtpError:
    """Return the error with the dialect's name for its field, in `param` and at the start of its text.

    The rest of the text may quote the client and stays unchanged.
    """
    names = dialect.names
    if isinstance(error, TooLong):
        detail = dialect.too_long.format(tokens=error.counted, most=error.most)
        return RequestError(detail, error.code, param=names.get("messages", "messages"))
    if not names or not isinstance(error, RequestError) or not error.param:
        return error
    param, detail = _renamed(names, error.param), error.detail
    if re.match(rf"{re.escape(error.param)}(?!\w)", detail):
        detail = param + detail[len(error.param) :]
    return RequestError(detail, error.code, status=error.status, param=param, state=error.state)


def _renamed(names: Mapping[str, str], path: str) -> str:
    """Rename a field in the core's notation: `stop`, `response_format.pattern`, `tools[0].function.name`."""
    known = "|".join(map(re.escape, names))
    return re.sub(
        rf"^(tools\[\d+\]\.)?({known})(?!\w)", lambda found: (found[1] or "") + names[found[2]], path
    )
