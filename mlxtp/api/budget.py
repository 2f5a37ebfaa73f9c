"""Choice of the model by name, and the limits of its context. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import Code, RequestError
from .backend import ModelInfo, StoredModelInfo
from .schema import shown

QUICK_CHARACTERS = 1_000_000  # characters that are tokenized within a second
UNNAMED = (None, "", "default")  # Names that mean the loaded model.


def find_model(name: str | None, models: Sequence[ModelInfo]) -> ModelInfo | None:
    """Return the model by exact id, else by alias; for `default` or no name, the first; else None."""
    for model in models:
        if name == model.id:
            return model
    for model in models:
        if name in model.aliases:
            return model
    return models[0] if models and name in UNNAMED else None


def unknown_model(name: str | None, known: Iterable[str]) -> RequestError:
    """Return a 404 that lists the available models."""
    return RequestError(
        f"the model {shown(name)} does not exist here; available: {', '.join(known)}",
        Code.MODEL_NOT_FOUND,
        status=404,
        param="model",
    )


class TooLong(RequestError):
    """A prompt that does not fit the context, in tokens; each dialect has its own message for it.

    `counted` is text: a number, or "more than" one.
    """

    def __init__(self, tokens: int, context: int, *, more: bool = False) -> None:
        self.counted = f"more than {tokens}" if more else str(tokens)
        self.most = min(context, tokens - 1)  # at least one token is left for the answer
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
    """Refuse prompts that cannot fit and would take seconds to tokenize. Raises TooLong.

    `longest_token` is in characters. Each chat turn takes at least one token.
    """
    least = max(characters // longest_token // prompts if characters > QUICK_CHARACTERS else 0, turns)
    if least > model.context:
        raise TooLong(least, model.context, more=True)


def token_budget(asked: int | None, prompt: Sequence[int], model: ModelInfo) -> int:
    """Return the most tokens that the answer may have: as requested, or as fit. Raises RequestError."""
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
