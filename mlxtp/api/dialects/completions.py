"""OpenAI's older dialect: prompts that are continued, without a chat template.

`max_tokens` is 16, or what fits, where a request does not say, as in OpenAI's API. What is understood but
cannot be done is refused with `not_supported`.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...errors import MlxtpError, RequestError
from ..adapter import SSE, About, Json
from ..ask import Ask, Prompt
from ..backend import End
from ..errors import error_body, error_body_of
from ..events import Event, Finish, Said, Scored, Whole
from ..generation import MAX_CHOICES, Generation
from ..openapi import Operation
from ..schema import in_range, not_supported, parsed, shown, wrong
from ..streaming import COMMENT
from . import unserved
from .completion_shapes import Completion
from .openai import StreamOptions
from .openai_answers import LEAST_LOGPROB, finishes, sse, usage
from .openai_shapes import OpenAIError
from .tuning import MOST_TOKENS, Tuning

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
MOST_ANSWERS = 128
"""Of one request, over all of its prompts."""


class CompletionRequest(Tuning):
    """The body of `POST /v1/completions`."""

    prompt: Any = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, in_range(1, MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, in_range(1, MOST_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, in_range(0, 5)] | None = None
    response_format: Json | None = None
    user: Any = None
    # refused where they ask for something
    best_of: int | None = None
    suffix: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


# --- requests ---------------------------------------------------------------------------------------------


def parse(body: bytes, vocabulary: int) -> Ask:
    """The checked request. `vocabulary`: token ids are below. Raises RequestError that names the field, the
    reason and the value.
    """
    request = parsed(CompletionRequest, body)
    n = request.n or 1
    if request.best_of not in (None, 1, n):
        raise not_supported(
            f"best_of {request.best_of} is not supported: nothing is generated that is not returned; "
            "leave it out, and send n",
            "best_of",
        )
    if request.suffix:
        raise not_supported(
            f"suffix {shown(request.suffix)} is not supported: a prompt is continued, not filled in; "
            "leave it out",
            "suffix",
        )
    if request.echo and request.logprobs is not None:
        raise not_supported(
            "logprobs together with echo are not supported: tokens of the prompt have no scores; "
            "leave one of them out",
            "logprobs",
        )
    prompts = _prompts(request.prompt, vocabulary)
    if len(prompts) * n > MOST_ANSWERS:
        raise RequestError(
            f"prompt has {len(prompts)} prompts; with n {n} that makes {len(prompts) * n} answers, "
            f"at most {MOST_ANSWERS}",
            param="prompt",
        )
    options = request.options(
        n=n,
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=-1 if request.logprobs is None else request.logprobs,
        format_=request.response_format,
    )
    if request.max_tokens is None:
        options = replace(options, cut_to_fit=True)
    user = request.user if isinstance(request.user, str) else ""
    return Ask(request.model, prompts, options, bool(request.stream), user, request)


def _prompts(given: object, vocabulary: int) -> tuple[Prompt, ...]:
    """Text, texts, tokens or lists of tokens. Raises RequestError."""
    match given:
        case None:
            raise RequestError("prompt is missing", param="prompt")
        case str(text):
            return (text,)
        case [int(), *_]:
            return (_tokens(given, "prompt", vocabulary),)
        case [_, *_]:
            return tuple([_prompt(each, f"prompt[{i}]", vocabulary) for i, each in enumerate(given)])
        case _:
            raise wrong("prompt", "a string, strings, token ids or lists of token ids", given)


def _prompt(given: object, where: str, vocabulary: int) -> Prompt:
    match given:
        case str(text):
            return text
        case [_, *_]:
            return _tokens(given, where, vocabulary)
        case _:
            raise wrong(where, "a string or token ids", given)


def _tokens(given: Sequence[object], where: str, vocabulary: int) -> tuple[int, ...]:
    tokens = []
    for i, token in enumerate(given):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise wrong(f"{where}[{i}]", f"a token id from 0 to {vocabulary - 1}", token)
        tokens.append(token)
    return tuple(tokens)


# --- answers ----------------------------------------------------------------------------------------------


class Logprobs:
    """The scores of one answer in the older shape, piece after piece.

    `text_offset` is in characters of the answer's own text. `top_logprobs` has the chosen token, too.
    """

    def __init__(self, about: About) -> None:
        self._names = about.names
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, scores: Sequence[Scored]) -> Json:
        """Those of the next tokens."""
        tokens, own, top, offsets = [], [], [], []
        for token, score in scores:
            name, bytes_ = self._names(token)
            others = {self._names(other)[0]: _bounded(logprob) for other, logprob in reversed(score.top)}
            tokens.append(name)
            own.append(_bounded(score.logprob))
            top.append(others | {name: own[-1]})
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(bytes(bytes_ or ())))
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _bounded(logprob: float) -> float:
    return min(max(logprob, LEAST_LOGPROB), 0.0)


def _head(about: About) -> Json:
    return {
        "id": f"cmpl-{about.id}",
        "object": "text_completion",
        "created": int(about.created),
        "model": about.model,
    }


def _choice(index: int, text: str, scores: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}


def _echo(about: About, choice: int) -> str:
    """What an answer begins with."""
    return about.prompts[choice // about.ask.options.n] if about.ask.dialect.echo else ""


class _Writer:
    def __init__(self, about: About) -> None:
        self._about = about
        self._head = _head(about)
        self._include_usage = about.ask.dialect.include_usage
        self._logprobs = [Logprobs(about) for _ in range(about.choices)]
        self._ends: dict[int, End] = {}

    def open(self) -> bytes:
        texts = [_echo(self._about, choice) for choice in range(self._about.choices)]
        echoes = [self._chunk(choice, text) for choice, text in enumerate(texts) if text]
        return COMMENT + b"".join(echoes)

    def write(self, event: Event) -> bytes:
        match event:
            case Said(choice, text, scores):
                known = self._logprobs[choice].of(scores) if scores else None
                return self._chunk(choice, text, known) if text or scores else b""
            case Finish(choice, reason, end):
                self._ends[choice] = end
                return self._chunk(choice, "", reason=reason)
            case _:  # a prompt that is continued has neither thoughts nor calls
                return b""

    def close(self) -> bytes:
        trailer = b""
        if self._include_usage:
            ends = [self._ends[choice] for choice in range(self._about.choices)]
            trailer = sse(self._head | {"choices": [], "usage": usage(self._about, ends)})
        return trailer + b"data: [DONE]\n\n"

    def fail(self, error: MlxtpError) -> bytes:
        return sse(error_body_of(error))

    def idle(self) -> bytes:
        return COMMENT

    def _chunk(self, choice: int, text: str, scores: Json | None = None, reason: str | None = None) -> bytes:
        chunk = self._head | {"choices": [_choice(choice, text, scores, reason)]}
        return sse(chunk | {"usage": None} if self._include_usage else chunk)


class Completions:
    """The adapter of `/v1/completions`, and of the endpoints of OpenAI's that are not served."""

    prefixes: tuple[str, ...] = (PATH, *unserved.PREFIXES)
    names: Mapping[str, str] = {"messages": "prompt"}
    media_type = SSE
    operations = (
        Operation("POST", PATH, "Continue a prompt", CompletionRequest, Completion, OpenAIError, SSE),
        *unserved.OPERATIONS,
    )

    def routes(self, generation: Generation) -> Sequence[Route]:
        async def complete(request: Request) -> Response:
            vocabulary = max((model.vocabulary for model in generation.models()), default=MOST_TOKENS)
            return await generation.answer(self, request, lambda body: parse(body, vocabulary))

        return [
            Route(PATH, generation.endpoint(self, complete), methods=["POST"]),
            *unserved.routes(lambda handler: generation.endpoint(self, handler)),
        ]

    def whole(self, about: About, wholes: Sequence[Whole]) -> Json:
        scored = about.ask.options.logprobs >= 0
        ends = finishes(wholes)
        choices = []
        for index, (whole, end) in enumerate(zip(wholes, ends, strict=True)):
            scores = Logprobs(about).of(whole.scores) if scored else None
            choices.append(_choice(index, _echo(about, index) + whole.text, scores, end.reason))
        return _head(about) | {"choices": choices, "usage": usage(about, [end.end for end in ends])}

    def writer(self, about: About) -> _Writer:
        return _Writer(about)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body(error.detail, error.code.value, status, getattr(error, "param", None))
