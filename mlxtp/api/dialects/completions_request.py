"""The body of `POST /v1/completions`: prompts that are continued, without a chat template. Pure.

`max_tokens` is 16, or the most that fits, where a request has none, as in OpenAI's API. Fields that are
understood but not supported are refused with `not_supported`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from ...errors import RequestError
from ...text.conversation import GenerationRequest, Prompt
from ..adapter import Json
from ..generation import MAX_CHOICES
from ..request_body import in_range, not_supported, parsed, shown, wrong
from .openai_request import StreamOptions
from .tuning import MOST_TOKENS, Tuning

DEFAULT_MAX_TOKENS = 16
MOST_ANSWERS = 128  # of one request, over all of its prompts


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
    # refused if set
    best_of: int | None = None
    suffix: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


# --- from a body to a request
# ----------------------------------------------------------------------------------


def parse(body: bytes) -> GenerationRequest:
    """Return the request. Token ids are not yet checked against the model. Raises RequestError that names the
    field, the reason and the value.
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
    prompts = _prompts(request.prompt)
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
    user = request.user if isinstance(request.user, str) else ""
    return GenerationRequest(request.model, prompts, options, bool(request.stream), user, request)


def _prompts(given: object) -> tuple[Prompt, ...]:
    """Return text, texts, tokens or lists of tokens as prompts. Raises RequestError."""
    match given:
        case None:
            raise RequestError("prompt is missing", param="prompt")
        case str(text):
            return (text,)
        case [int(), *_]:
            return (_tokens(given, "prompt"),)
        case [_, *_]:
            return tuple([_prompt(each, f"prompt[{i}]") for i, each in enumerate(given)])
        case _:
            raise wrong("prompt", "a string, strings, token ids or lists of token ids", given)


def _prompt(given: object, where: str) -> Prompt:
    match given:
        case str(text):
            return text
        case [_, *_]:
            return _tokens(given, where)
        case _:
            raise wrong(where, "a string or token ids", given)


def _tokens(given: Sequence[object], where: str) -> tuple[int, ...]:
    tokens = []
    for i, token in enumerate(given):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MOST_TOKENS:
            raise wrong(f"{where}[{i}]", "a token id", token)
        tokens.append(token)
    return tuple(tokens)
