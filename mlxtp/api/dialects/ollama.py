"""The Ollama dialect: `/api/chat`, `/api/generate`, and the model facts that its clients request first."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import MlxtpError
from ...text.conversation import Call, GenerationRequest
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
from ...vector_files import EMBED
from ..adapter import NDJSON, About, AnswerWriter, Json, Operation, compact
from ..backend import GREEDY, DeploymentHealth, Health, ModelInfo, Sampling, StoredModelInfo
from ..catalog import ModelCard, load_defaults, read_card
from ..generation import Adapter, Generation, Handler
from ..request_body import not_supported, parsed, shown
from .embeddings import OllamaEmbed, ollama_embed
from .ollama_request import (
    Arrival,
    NoPrompt,
    OllamaAnswerOptions,
    OllamaChat,
    OllamaGenerate,
    OllamaShow,
    parse_chat,
    parse_generate,
    served_name,
)
from .openai import logprobs

FOREVER = "9999-12-31T23:59:59Z"  # expiry that clients see for a model that stays loaded

# --- from events to lines ---------------------------------------------------------------------------------


class LineWriter(AnswerWriter):
    """Writer of one answer as lines of JSON. A tool call is sent when complete, as an object."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._call: CallBegan | None = None
        self._arguments: list[str] = []
        self._finish: Finish | None = None

    def open(self) -> bytes:
        """Return nothing: clients take the first line for the first token."""
        return b""

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(text=text, scores=scores):
                # Scores without text may arrive in the middle of a call.
                before = self._end_call() if text else b""
                more = {"done": False} | _logprobs(scores, self._about)
                return before + (self._line(text, more) if text or scores else b"")
            case ReasoningDelta(text=text):
                return self._end_call() + self._line("", {"done": False}, text)
            case CallBegan():
                before, self._call = self._end_call(), event
                return before
            case CallArguments(text=text):
                self._arguments.append(text)
                return b""
            case Finish():
                self._finish = event
                return self._end_call()

    def close(self) -> bytes:
        assert self._finish is not None
        return self._line("", _counts(self._about, self._finish))

    def fail(self, error: MlxtpError) -> bytes:
        return compact({"error": error.detail}) + b"\n"

    def idle(self, more: Json) -> bytes:
        """Return an empty piece of the answer: clients parse every line, so none can be blank."""
        return self._line("", {"done": False} | more)

    def _end_call(self) -> bytes:
        if self._call is None:
            return b""
        call = Call(self._call.id, self._call.name, "".join(self._arguments))
        text, calls = _told_apart([call], self._call.index)
        self._call = None
        self._arguments.clear()
        return self._line(text, {"done": False}, calls=calls)

    def _line(self, text: str, more: Json, thinking: str = "", calls: Sequence[Json] = ()) -> bytes:
        return compact(_piece(self._about, text, thinking, calls) | more) + b"\n"


def no_answer(asked: OllamaAnswerOptions, model: ModelInfo | StoredModelInfo, reason: str) -> Json:
    """Return the answer to a request without a prompt, with `reason` "load" or "unload"."""
    head = {"model": asked.model or model.id, "created_at": _rfc3339(time.time())}
    return head | _message(asked, "") | {"done": True, "done_reason": reason}


def _piece(about: About, text: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json:
    """Return a piece of an answer, or all of it, without the fields that mark the last one."""
    asked: OllamaAnswerOptions = about.ask.dialect
    head = {"model": asked.model or about.model, "created_at": _rfc3339(time.time())}
    return head | _message(asked, text, thinking, calls)


def _message(asked: OllamaAnswerOptions, text: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json:
    """Return the words in the shape of their endpoint."""
    more: Json = {"thinking": thinking} if thinking else {}
    if calls:
        more["tool_calls"] = list(calls)
    if asked.chat:
        return {"message": {"role": "assistant", "content": text} | more}
    return {"response": text} | more


def _counts(about: About, finish: Finish) -> Json:
    """Return the counts of an answer. Clients divide by some of them, so these are never 0.

    The prompt's time, in ns, is from arrival to the first token, including the load of the model.
    """
    now_ns = time.perf_counter_ns()
    began_ns = finish.began_ns or now_ns
    arrived_ns = about.ask.dialect.arrived_ns
    return {
        "done": True,
        "done_reason": "length" if finish.reason == "length" else "stop",
        "total_duration": max(now_ns - arrived_ns, 1),
        "load_duration": about.loaded_ns,
        "prompt_eval_count": about.prompt_tokens[0],
        "prompt_eval_duration": max(began_ns - arrived_ns, 1),
        "eval_count": finish.end.generated,
        "eval_duration": max(now_ns - began_ns, 1),
    }


def _told_apart(calls: Sequence[Call], first: int = 0) -> tuple[str, list[Json]]:
    """Return complete calls in Ollama's shape, and the text of calls with cut-off arguments."""
    texts, whole = [], []
    for index, call in enumerate(calls, first):
        arguments = _object(call.arguments)
        if arguments is None:
            texts.append(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}')
        else:
            function = {"index": index, "name": call.name, "arguments": arguments}
            whole.append({"id": call.id, "function": function})
    return "\n".join(texts), whole


def _object(text: str) -> Json | None:
    try:
        value = json.loads(text or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _logprobs(scores: Sequence[Scored], about: About) -> Json:
    """Return scores in OpenAI's shape, except the `bytes` of a token without bytes."""
    rows = logprobs(scores, about.names)["content"]
    for each in [row for scored in rows for row in (scored, *scored["top_logprobs"])]:
        if each["bytes"] is None:
            del each["bytes"]
    return {"logprobs": rows} if rows else {}


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


#: Ollama's names for numbers in config.json.
_SHAPE = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def list_row(model: ModelInfo | StoredModelInfo, card: ModelCard) -> Json:
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": _rfc3339(model.created),
        "size": card.weight_bytes,
        "digest": card.digest,
        "details": _details(card),
    }


def running_row(
    model: ModelInfo, card: ModelCard, health: Health, deployment: DeploymentHealth | None
) -> Json:
    """Return a model in `/api/ps`. Its size is the memory of all ranks if all report it, else of its weights.

    On a Mac, all memory is the GPU's. `health` describes the model's deployment.
    """
    expires_s = deployment.expires_s if deployment is not None else None
    told = [rank.get("memory_bytes") for rank in health.ranks]
    memory = [each for each in told if isinstance(each, int) and each > 0]
    size = sum(memory) if memory and len(memory) == len(told) else card.weight_bytes
    return {
        "name": model.id,
        "model": model.id,
        "size": size,
        "digest": card.digest,
        "details": _details(card),
        "expires_at": FOREVER if expires_s is None else _rfc3339(time.time() + expires_s),
        "size_vram": size if sys.platform == "darwin" else 0,
        "context_length": model.context,
    }


def show_body(
    model: ModelInfo | StoredModelInfo, defaults: Sampling, card: ModelCard, capabilities: Sequence[str]
) -> Json:
    """Return the answer to `/api/show`. `parameters` has `defaults`, one a line, as in a Modelfile."""
    settings: dict[str, object] = {"num_ctx": model.context}
    given, greedy = asdict(defaults), asdict(GREEDY)
    settings |= {name: value for name, value in given.items() if value != greedy[name]}
    shape = {f"{card.family}.{name}": card.number(theirs) for name, theirs in _SHAPE.items()}
    return {
        "modelfile": "",
        "parameters": "\n".join([f"{name:<30} {value}" for name, value in settings.items()]),
        "template": card.template,
        "details": _details(card),
        "model_info": {
            "general.architecture": card.family,
            "general.basename": model.id,
            f"{card.family}.context_length": model.context,
            **{name: value for name, value in shape.items() if value is not None},
        },
        "capabilities": list(capabilities),
        "modified_at": _rfc3339(model.created),
    }


def _details(card: ModelCard) -> Json:
    return {
        "parent_model": "",
        "format": "safetensors" if card.weight_bytes else "",
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": card.parameters,
        "quantization_level": card.quantization,
    }


# --- the adapter ------------------------------------------------------------------------------------------


#: Version of Ollama's API, not of mlxtp, with all features served here. Clients require a least version:
#: 0.6.4 for Copilot Chat, 0.14.2 for clients that also use Ollama's `/v1/messages`.
VERSION = "0.14.2"

_MANAGED = (
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/blobs/{digest}"),
)


class Ollama(Adapter):
    """The adapter of all paths below `/api`."""

    prefixes = ("/api/",)
    too_long = (
        "the prompt is longer than the context length currently available to the model: it has {tokens} "
        "tokens, and {most} fit; shorten the prompt, or use a model with a longer context length"
    )
    media_type = NDJSON
    names: Mapping[str, str] = {
        "max_tokens": "num_predict",
        "response_format": "format",
        "needs_thinking": "think",
    }

    @property
    def endpoints(self) -> Mapping[Operation, Handler]:
        chat = Operation("POST", "/api/chat", "Answer a chat (Ollama)", OllamaChat, NDJSON)
        generate = Operation("POST", "/api/generate", "Answer a prompt (Ollama)", OllamaGenerate, NDJSON)
        why = "Refused: mlxtp's own commands manage models"
        managed = [Operation(*each, why, always=400) for each in _MANAGED]
        embeddings = [
            Operation("POST", path, "Make embeddings of texts (Ollama)", OllamaEmbed)
            for path in ("/api/embed", "/api/embeddings")
        ]
        return {
            chat: partial(self._answer, parse_chat),
            generate: partial(self._answer, parse_generate),
            Operation("GET", "/api/tags", "The models that can be served (Ollama)"): _tags,
            Operation("GET", "/api/ps", "The loaded model (Ollama)"): _ps,
            Operation("POST", "/api/show", "Details of a model (Ollama)", OllamaShow): _show,
            Operation("GET", "/api/version", "The version of Ollama's API"): _version,
            **dict.fromkeys(embeddings, ollama_embed),
            **dict.fromkeys(managed, _not_managed),
        }

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        [answer] = wholes
        cut_off, calls = _told_apart(answer.calls)
        text = "\n".join(filter(None, [answer.text, cut_off]))
        said = _piece(about, text, answer.reasoning, calls)
        return said | _counts(about, answer.finish) | _logprobs(answer.scores, about)

    def writer(self, about: About) -> AnswerWriter:
        return LineWriter(about)

    def error(self, error: MlxtpError, status: int) -> Json:
        return {"error": error.detail}

    async def _answer(
        self, parse: Callable[[Arrival, bytes], GenerationRequest], generation: Generation, request: Request
    ) -> Response:
        """Answer a body that `parse` reads."""
        arrival = Arrival(time.perf_counter_ns(), generation.catalog.models())
        try:
            return await generation.answer(self, request, partial(parse, arrival))
        except NoPrompt as wish:
            name = served_name(wish.asked.model, arrival.models)
            if wish.keep_s == 0:
                if isinstance(model := await generation.catalog.find(name), StoredModelInfo):
                    return JSONResponse(no_answer(wish.asked, model, "unload"))
                _check_unloads(generation.catalog.deployment(name), name or model.id)
            loaded = await generation.load(request, name, wish.keep_s)
            return JSONResponse(no_answer(wish.asked, loaded, "unload" if wish.keep_s == 0 else "load"))


# Read the model folders again each time.


async def _tags(generation: Generation, _request: Request) -> Response:
    models = await generation.catalog.listed()
    rows = [list_row(model, await asyncio.to_thread(read_card, model)) for model in models]
    return JSONResponse({"models": rows})


async def _ps(generation: Generation, _request: Request) -> Response:
    catalog = generation.catalog
    models = catalog.models()
    cards = [await asyncio.to_thread(read_card, model) for model in models]
    rows = [
        running_row(model, card, catalog.health(model.id), catalog.deployment(model.id))
        for model, card in zip(models, cards, strict=True)
    ]
    return JSONResponse({"models": rows})


async def _show(generation: Generation, request: Request) -> Response:
    body = await generation.parsed(request, partial(parsed, OllamaShow))
    name = served_name(body.model or body.name or "", generation.catalog.models())
    model, text = await generation.catalog.opened(name)
    found = {"completion": True, "tools": text.traits.tools, "thinking": text.markup.think is not None}
    if isinstance(model, ModelInfo) and model.vectors is not None:
        found = {"embedding": model.vectors.kind == EMBED}
    capabilities = [name for name, there in found.items() if there]
    return JSONResponse(await asyncio.to_thread(_shown, model, capabilities))


def _shown(model: ModelInfo | StoredModelInfo, capabilities: Sequence[str]) -> Json:
    defaults = model.defaults if isinstance(model, ModelInfo) else load_defaults(model.path)
    return show_body(model, defaults, read_card(model), capabilities)


def _check_unloads(deployment: DeploymentHealth | None, name: str) -> None:
    """Refuse to unload a pinned model: other clients use it, too."""
    if deployment is None or deployment.pinned:
        raise not_supported(
            f"keep_alive 0 does not unload {shown(name)}, which the cluster serves to all its clients; "
            "`mlxtp unload` does",
            "keep_alive",
        )


async def _version(_generation: Generation, _request: Request) -> Response:
    return JSONResponse({"version": VERSION})


async def _not_managed(_generation: Generation, request: Request) -> Response:
    raise not_supported(
        f"{request.url.path} is not served: models are managed with mlxtp's own commands, such as "
        "`mlxtp serve MODEL` and `mlxtp unload`",
        "",
    )
