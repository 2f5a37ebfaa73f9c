"""Which model is meant, and what fits into its context. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import Code, RequestError
from .backend import ModelInfo, StoredModelInfo
from .schema import shown

QUICK_CHARACTERS = 1_000_000  # characters that are tokenized within a second
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


class TooLong(RequestError):
    """A prompt that does not fit the context, in tokens; each dialect has its own words for it.

    `counted` is text: a number, or "more than" one.
    """

    def __init__(self, tokens: int, context: int, *, more: bool = False) -> None:
        self.counted = f"more than {tokens}" if more else str(tokens)
        self.most = min(context, tokens - 1)  # one token at least is left for the answer
        detail = f"the prompt has {self.counted} tokens, and the model's context holds {self.most} at most"
        super().__init__(detail, Code.CONTEXT_OVERFLOW, param="messages")


def check_may_fit(
    characters: int,
    longest_token: int,
    model: ModelInfo | StoredModelInfo,
    prompts: int = 1,
    *,
    turns: int = 0,
) -> None:
    """Refuse what cannot fit and would take seconds to tokenize. Raises TooLong.

    `longest_token` is in characters. Each turn takes a token at least.
    """
    least = max(characters // longest_token // prompts if characters > QUICK_CHARACTERS else 0, turns)
    if least > model.context:
        raise TooLong(least, model.context, more=True)


def token_budget(asked: int | None, prompt: Sequence[int], model: ModelInfo) -> int:
    """Return how many tokens the answer may have: as many as asked for, or as fit. Raises RequestError."""
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
    if room < 1:
        raise TooLong(len(prompt), model.context)
    return min(asked or room, room)
