"""Which model is meant, and what fits into its context. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import Code, RequestError
from .backend import ModelInfo, Stored
from .schema import shown

UNNAMED = (None, "", "default")
"""What means the loaded model, whichever that is."""


def find_model(name: str | None, models: Sequence[ModelInfo]) -> ModelInfo | None:
    """Exact id, then alias, then `default` (or no name at all): the first. None for another name."""
    for model in models:
        if name == model.id:
            return model
    for model in models:
        if name in model.aliases:
            return model
    return models[0] if models and name in UNNAMED else None


def unknown_model(name: str | None, known: Iterable[str]) -> RequestError:
    """A 404 that says what can be asked for."""
    return RequestError(
        f"the model {shown(name)} does not exist here; available: {', '.join(known)}",
        Code.MODEL_NOT_FOUND,
        status=404,
        param="model",
    )


def check_may_fit(
    characters: int, longest_token: int, model: ModelInfo | Stored, prompts: int = 1, *, turns: int = 0
) -> None:
    """Refuse what cannot fit before it is tokenized, which takes seconds.

    `longest_token` is in characters. Each turn takes a token at least. Raises RequestError with the numbers.
    """
    if turns > model.context:
        raise RequestError(
            f"the prompt has {turns} turns, more than the model's context of {model.context} tokens",
            Code.CONTEXT_OVERFLOW,
            param="messages",
        )
    most = longest_token * model.context * prompts
    if characters > most:
        raise RequestError(
            f"the prompt has {characters} characters; the model's context of {model.context} tokens "
            f"holds at most {most}",
            Code.CONTEXT_OVERFLOW,
            param="messages",
        )


def token_budget(asked: int | None, prompt: Sequence[int], model: ModelInfo, cut_to_fit: bool = False) -> int:
    """How many tokens the answer may have; without a wish, as many as fit. Raises RequestError.

    `cut_to_fit`: as many as fit, too, where more were asked for.
    """
    if not prompt:
        raise RequestError("the prompt is empty", param="messages")
    if min(prompt) < 0 or max(prompt) >= model.vocabulary:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise RequestError(
            f"the prompt has token {wrong}, but the model knows only {model.vocabulary} tokens: "
            "its tokenizer and its weights do not belong together",
            Code.MODEL_INVALID,
            param="messages",
        )
    room = model.context - len(prompt)
    if cut_to_fit and asked and room > 0:
        return min(asked, room)
    if len(prompt) + (asked or 1) <= model.context:
        return asked or room
    too_much = f"more than the model's context of {model.context} tokens"
    if asked and room > 0:
        both = len(prompt) + asked
        detail = f"max_tokens {asked} and the prompt's {len(prompt)} tokens make {both}, {too_much}"
        raise RequestError(detail, Code.CONTEXT_OVERFLOW, param="max_tokens")
    detail = f"the prompt has {len(prompt)} tokens; one of answer makes {len(prompt) + 1}, {too_much}"
    raise RequestError(detail, Code.CONTEXT_OVERFLOW, param="messages")
