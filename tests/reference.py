"""Right answers: the same weights in this one process, by mlx-lm's own models and loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from mlxtp.api.backend import PLAIN, TokenScore
from mlxtp.config import embedded_model_path
from mlxtp.text.conversation import ChatMessage, Conversation
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text
from mlxtp.wire.messages import Generate

TINY = embedded_model_path()
FORCED = 23
"""Tokens that one row is fed beside its own, without a GPU."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True)
class Answer:
    """The visible tokens, and the reason for their end. `generated` counts an end token too."""

    tokens: tuple[int, ...]
    reason: str
    generated: int


@cache
def text(folder: Path = TINY) -> Text:
    return Text(LocalRenderer.load(folder))


def prompt_ids(message: str) -> tuple[int, ...]:
    """The prompt that a chat request with this one user message becomes."""
    return chat_ids(text(), [{"role": "user", "content": message}])


def chat_ids(text: Text, messages: Sequence[Mapping[str, Any]], **fields: Any) -> tuple[int, ...]:
    """Return the prompt that plain messages become."""
    turns = tuple(ChatMessage(each["role"], each["content"]) for each in messages)
    return conversation_ids(text, Conversation(turns, **fields))


def conversation_ids(text: Text, conversation: Conversation) -> tuple[int, ...]:
    """Return the prompt that a conversation becomes; the template writes its first token."""
    return text.encoded(text.rendered(conversation), special=False)


def spoken(tokens: Sequence[int]) -> str:
    """The text of an answer."""
    detokenizer = text().detokenizer()
    return detokenizer.push(tokens)


def answer(prompt: Sequence[int], max_tokens: int, folder: Path = TINY) -> Answer:
    return _answer(tuple(prompt), max_tokens, folder)


def reference(prompt: Sequence[int], max_tokens: int, folder: Path = TINY) -> tuple[int, ...]:
    """The visible tokens of the one right answer."""
    return answer(prompt, max_tokens, folder).tokens


@cache
def _answer(prompt: tuple[int, ...], max_tokens: int, folder: Path) -> Answer:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    model, eos = model_of(folder)
    tokens: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
        if token in eos:
            return Answer(tuple(tokens), "stop", len(tokens) + 1)
        tokens.append(int(token))
    return Answer(tuple(tokens), "length", len(tokens))


@dataclass(frozen=True)
class Expected(Answer):
    """`scores`: of each visible token, from the logits before anything was done to them."""

    scores: tuple[TokenScore, ...] = ()


@cache
def expected(wanted: Generate, folder: Path = TINY) -> Expected:
    """Return a request's right answer: one sequence, one token a forward, our sampler and shaping.

    Tokens that a grammar forces come as it has them, at most FORCED together, if there are no scores.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from mlxtp.engine.logit_shaping import Shaper
    from mlxtp.engine.sampler import Sampler

    model, eos = model_of(folder)
    ends = frozenset[int]() if wanted.ignore_eos else eos
    caches = make_prompt_cache(model)
    logits = model(mx.array([wanted.tokens]), cache=caches)[0, -1:]
    sampler = Sampler((wanted.sampling,), tuple(sorted(eos)))
    shaper = Shaper(wanted.shaping, wanted.tokens, logits.shape[-1], tuple(sorted(ends)))
    guide = _guide(wanted, folder, logits.shape[-1])
    tokens: list[int] = []
    scores: list[TokenScore] = []
    while True:
        if guide is not None and tokens:
            most = min(wanted.max_tokens - len(tokens) - 1, FORCED) if wanted.logprobs < 0 else 0
            for token in guide.forced(most):
                guide.accept(token)
                tokens.append(token)
                shaper.advance(mx.array([token]))
                logits = model(mx.array([[token]]), cache=caches)[0]
        shaped = logits
        if wanted.shaping != PLAIN:
            mask = None if guide is None else guide.masks[-1:]
            shaped = shaper.apply(logits, generated=len(tokens), mask=mask).astype(logits.dtype)
        at = mx.array([[len(wanted.tokens) + len(tokens)]], dtype=mx.int32)
        token = int(sampler.choose(shaped[None], at).item())
        if token in ends:
            return Expected(tuple(tokens), "stop", len(tokens) + 1, tuple(scores))
        if wanted.logprobs >= 0:
            scores.append(_score(logits[0], token, wanted.logprobs))
        tokens.append(token)
        if guide is not None:
            guide.accept(token)
            if guide.finished:
                return Expected(tuple(tokens), "length" if guide.cut else "stop", len(tokens), tuple(scores))
        if len(tokens) == wanted.max_tokens:
            return Expected(tuple(tokens), "length", len(tokens), tuple(scores))
        shaper.advance(mx.array([token]))
        logits = model(mx.array([[token]]), cache=caches)[0]


def _guide(wanted: Generate, folder: Path, vocabulary: int) -> Any:
    """Return the guide of a request with a grammar, None of another."""
    from mlxtp.engine.grammar import Grammars
    from mlxtp.engine.logit_shaping import Guided

    if not wanted.shaping.grammar_kind:
        return None
    grammars = Grammars(folder, vocabulary, model_of(folder)[1])
    try:
        grammar = grammars.compile(wanted.shaping.grammar_kind, wanted.shaping.grammar)
    finally:
        grammars.close()
    return Guided(grammar.matcher(), vocabulary, wanted.max_tokens)


def _score(logits: Any, token: int, top: int) -> TokenScore:
    import numpy as np

    row = np.array(logits.tolist(), dtype=np.float64)
    logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
    best = sorted(range(len(row)), key=lambda other: (-logprobs[other], other))[:top]
    return TokenScore(float(logprobs[token]), tuple((other, float(logprobs[other])) for other in best))


@cache
def model_of(folder: Path) -> tuple[Any, frozenset[int]]:
    """The model in this process, and its end tokens."""
    from mlx_lm.utils import load_model

    from mlxtp.engine.loader import read_config
    from mlxtp.engine.vlm_models import classes_of, is_of_vlm

    own = {"get_model_classes": classes_of} if is_of_vlm(read_config(folder)) else {}
    model, config = load_model(folder, **own)
    eos = config["eos_token_id"]
    return model, frozenset([eos] if isinstance(eos, int) else eos)


def random_text(random: Random, length: int) -> str:
    """A string of the kind that the embedded model repeats."""
    return "".join(random.choice(_LETTERS) for _ in range(length))


@cache
def endless_prompt() -> tuple[int, ...]:
    """A prompt whose answer goes on for at least 400 tokens, for requests to be interrupted."""
    for start in range(48, 90):
        prompt = (0, *(start, start + 1, start + 2) * 5)
        if answer(prompt, 400).reason == "length":
            return prompt
    raise AssertionError("the model ends every answer by itself")
