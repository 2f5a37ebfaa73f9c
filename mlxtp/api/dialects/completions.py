"""OpenAI's older dialect, `POST /v1/completions`: continues prompts, without a chat template.

It also has the endpoints of embeddings, and refuses OpenAI's that mlxtp does not serve.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from ...errors import Code, RequestError
from ...text.conversation import GenerationRequest, Prompt, TokenScore
from ...text.tokenizer import Name
from ...text.transcript import AnswerEvent, ContentDelta, Finish, Scored, WholeAnswer
from ..adapter import SSE, About, Json, Operation
from ..generation import Adapter, Generation, Handler
from ..request_body import Integer, in_range, missing, named, not_supported, parsed, shown, wrong
from .embeddings import ENDPOINTS as OF_VECTORS
from .openai import PromptBody, SseWriter, bounded, ending, head, prompt_scores, sse, usage
from .request_parts import MOST_TOKENS, Unused, prompt_of, token_ids
from .tokens import ENDPOINTS as OF_TOKENS

# --- requests ---------------------------------------------------------------------------------------------


DEFAULT_MAX_TOKENS = 16  # or as many as fit, as in OpenAI's API
MOST_ANSWERS = 128  # of one request, over all of its prompts


_TEXT: Json = {"type": "string", "minLength": 1}
_TOKENS = {
    "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}, "minItems": 1,
}  # fmt: skip
_PROMPT = {"anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1}]}


class CompletionRequest(PromptBody):
    """The body of `POST /v1/completions`."""

    api = "completions"

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool | None = None
    max_tokens: Annotated[
        Annotated[Integer, in_range(0, MOST_TOKENS, -1)] | None, named("max_tokens", "n_predict")
    ] = None
    logprobs: Annotated[Integer, in_range(0, 5)] | None = None
    best_of: Annotated[Integer, in_range(1, 16)] | None = None
    # refused if set
    suffix: Unused = None


# --- from a body to a request -----------------------------------------------------------------------------


def parse(body: bytes) -> GenerationRequest:
    """Return the request. Token ids are not yet checked against the model. Raises RequestError."""
    request = parsed(CompletionRequest, body)
    n = request.n or 1
    best_of = request.best_of or n
    if best_of < n or (best_of > n and request.stream):
        why = f"is less than n {n}" if best_of < n else "cannot stream: the best are known at the end"
        raise RequestError(f"best_of {best_of} {why}", param="best_of")
    if request.suffix:
        raise not_supported(
            f"suffix {shown(request.suffix)} is not supported: a prompt is continued, not filled in; "
            "leave it out",
            "suffix",
        )
    prompts = _prompts(request.prompt, best_of)
    least = 0 if best_of > n else -1  # scores decide
    logprobs = -1 if request.logprobs is None else request.logprobs
    most = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    own = replace(
        request.options(most, max(logprobs, least)),
        n=best_of,
        prompt_logprobs=max(request.scored_prompt, logprobs if request.echo else -1),
    )
    found = request.generation(prompts, own, request)
    if request.echo and logprobs >= 0 and most == 1:
        # Benchmarks drop the last score. An end token has none, unless the answer goes on after it.
        return replace(found, options=replace(found.options, ignore_eos=True))
    return found


def _prompts(given: object, n: int) -> tuple[Prompt, ...]:
    match given:
        case None:
            raise missing("prompt")
        case str(text):
            return (text,)
        case [int() | float(), *_]:
            return (token_ids(given, "prompt"),)
        case [_, *_]:
            if (count := len(given) * n) > MOST_ANSWERS:
                raise RequestError(
                    f"prompt has {len(given)} prompts; with n {n} that makes {count} answers, "
                    f"at most {MOST_ANSWERS}",
                    param="prompt",
                )
            return tuple([prompt_of(each, f"prompt[{i}]") for i, each in enumerate(given)])
        case _:
            raise wrong("prompt", "a string, strings, token ids or lists of token ids", given)


# --- answers ----------------------------------------------------------------------------------------------


class Logprobs:
    """The scores of one answer in the older shape, piece by piece, after its prompt's if that is echoed.

    `text_offset` counts characters of what is shown. `top_logprobs` includes the token itself.
    """

    def __init__(self, about: About) -> None:
        self._about = about
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, scores: Sequence[Scored], prompt: Sequence[int] = ()) -> Json:
        """Return these scores. With `prompt`, its tokens are first, and the first of them has no score."""
        first: list[tuple[int, TokenScore | None]] = [(token, None) for token in prompt[:1]]
        tokens, own, top, offsets = [], list[float | None](), list[Json | None](), []
        names, most = self._about.names, self._about.ask.options.logprobs
        for token, score in [*first, *scores]:
            name, bytes_ = _distinct(*names(token))
            tokens.append(name)
            own.append(None if score is None else bounded(score.logprob))
            others = [] if score is None else reversed(score.top[:most])
            known = {_distinct(*names(other))[0]: bounded(logprob) for other, logprob in others}
            chosen = {name: own[-1]}
            top.append(None if score is None else chosen | known | chosen)  # it is the first
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(bytes(bytes_ or ())))
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _distinct(name: str, bytes_: tuple[int, ...] | None) -> Name:
    """Return a token with a name of its own: as OpenAI does, bytes that are no text are written out."""
    if bytes_ is None or "\ufffd" not in name:
        return name, bytes_
    return "bytes:" + "".join(f"\\x{each:02x}" for each in bytes_), bytes_


def _choice(index: int, text: str, scores: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}


def _echo(about: About, choice: int) -> str:
    """Return the start of an answer: its prompt if the request has `echo`."""
    return about.prompts[choice // about.ask.options.n] if about.ask.dialect.echo else ""


def _echoed(about: About, choice: int) -> Sequence[int]:
    """Return the tokens of a prompt that is echoed with its scores."""
    request: CompletionRequest = about.ask.dialect
    scored = request.echo and request.logprobs is not None
    return about.prompt_ids[choice // about.ask.options.n] if scored else ()


def _prompt_ids(about: About, choice: int) -> Json:
    options = about.ask.options
    return {"prompt_token_ids": about.prompt_ids[choice // options.n]} if options.token_ids else {}


def _shows_scores(about: About) -> bool:
    return about.ask.dialect.logprobs is not None


def _best(about: About, wholes: Sequence[WholeAnswer]) -> list[int]:
    """Return the answers to show: of each prompt the ones with the highest mean scores, the best first."""
    made, n = about.ask.options.n, about.ask.dialect.n or 1
    if made == n:
        return list(range(len(wholes)))

    def worth(choice: int) -> float:
        return fmean([score.logprob for _, score in wholes[choice].scores] or [-math.inf])

    groups = [range(first, first + made) for first in range(0, len(wholes), made)]
    return [choice for group in groups for choice in sorted(group, key=worth, reverse=True)[:n]]


class CompletionWriter(SseWriter):
    def __init__(self, about: About) -> None:
        super().__init__(about, "cmpl", "text_completion", about.ask.dialect.include_usage)
        self._logprobs = [Logprobs(about) for _ in range(about.choices)]
        self._unechoed = set(range(about.choices))  # choices whose scored prompt is not sent yet

    def begin(self) -> bytes:
        about, found = self.about, b""
        for choice in range(about.choices):
            echoed, ids = _echoed(about, choice), _prompt_ids(about, choice)
            text = "" if len(echoed) > 1 else _echo(about, choice)  # else it follows with its scores
            known = self._logprobs[choice].of((), echoed) if len(echoed) == 1 else None
            found += self._chunk(choice, text, known, inside=ids) if text or ids else b""
        return found

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(choice, scores=scores, prompt=True):
                begins = choice in self._unechoed
                self._unechoed.discard(choice)
                own = self._logprobs[choice].of(scores, _echoed(self.about, choice) if begins else ())
                return self._chunk(choice, _echo(self.about, choice) if begins else "", own)
            case ContentDelta(choice, text, scores):
                known = self._logprobs[choice].of(scores) if scores and _shows_scores(self.about) else None
                ids = self.tokens(choice, scores)
                return self._chunk(choice, text, known, inside=ids) if text or scores else b""
            case Finish(choice, reason):
                return self._chunk(choice, "", reason=reason, inside=self.ended(choice, event))
            case _:  # a continued prompt has neither thoughts nor calls
                return b""

    def idle(self, more: Json) -> bytes:
        return self._chunk(self.first_open, "", more=more)

    def _chunk(
        self,
        choice: int,
        text: str,
        scores: Json | None = None,
        reason: str | None = None,
        *,
        more: Json | None = None,
        inside: Json | None = None,
    ) -> bytes:
        found = _choice(choice, text, scores, reason) | self.tokens(choice, ()) | (inside or {})
        choices = {"choices": [found]}
        return sse(self.head | choices | (more or {}) | self.running())


# --- endpoints that are not served ------------------------------------------------------------------------


UNSERVED = {
    "/v1/audio/{rest:path}": "audio is not served: mlxtp runs models that read and write text",
    "/v1/images/{rest:path}": "images are not served: mlxtp runs models that read and write text",
    "/v1/conversations": "conversations are not kept: send previous_response_id, or the whole conversation",
    "/v1/moderations": "moderations are not served: mlxtp has no model that judges texts",
}
UNSERVED_PREFIXES = ("/v1/audio", "/v1/images", "/v1/conversations", "/v1/moderations")
UNSERVED_STATUS = 404  # status after which client libraries do not retry


def _refusing(detail: str) -> Handler:
    async def refuse(_generation: Generation, _request: Request) -> Response:
        raise RequestError(detail, Code.NOT_SUPPORTED, status=UNSERVED_STATUS)

    return refuse


# --- the adapter ------------------------------------------------------------------------------------------


PATH = "/v1/completions"


class Completions(Adapter):
    """The adapter of `/v1/completions`, embeddings, and OpenAI's endpoints that mlxtp does not serve."""

    prefixes = (PATH, *UNSERVED_PREFIXES)
    names: Mapping[str, str] = {"messages": "prompt"}

    @property
    def endpoints(self) -> Mapping[Operation, Handler]:
        own = {Operation("POST", PATH, "Continue a prompt", CompletionRequest, SSE): self._complete}
        return {**own, **OF_VECTORS, **OF_TOKENS} | {
            Operation("POST", path, "Not served", always=UNSERVED_STATUS): _refusing(detail)
            for path, detail in UNSERVED.items()
        }

    async def _complete(self, generation: Generation, request: Request) -> Response:
        return await generation.answer(self, request, parse)

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        choices = []
        for index, made in enumerate(_best(about, wholes)):
            whole, scores = wholes[made], None
            if _shows_scores(about):
                echoed = _echoed(about, made)
                scores = Logprobs(about).of(
                    [*whole.prompt, *whole.scores] if echoed else whole.scores, echoed
                )
            text = _echo(about, made) + whole.text
            more = prompt_scores(about, whole, about.ask.dialect.scored_prompt)
            more |= ending(about, whole.finish, whole.scores) | _prompt_ids(about, made)
            choices.append(_choice(index, text, scores, whole.finish.reason) | more)
        counts = usage(about, [whole.finish for whole in wholes])
        return head(about, "cmpl", "text_completion") | {"choices": choices, "usage": counts}

    def writer(self, about: About) -> CompletionWriter:
        return CompletionWriter(about)
