"""Prompts written by the chat template or the client, with remembered answers in them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import RequestError
from ..text.conversation import ChatMessage, Conversation, GenerationRequest, Prompt, characters
from ..text.json_limits import check_extent
from ..text.replay import (
    AnswerMemory,
    Beginning,
    CompleteAnswer,
    Replay,
    base_key,
    beginnings,
    replayed,
    to_remember,
)
from ..text.tokenizer import Text
from .backend import ModelInfo, StoredModelInfo
from .catalog import check_may_fit
from .request_body import MOST_MESSAGES, not_supported, shown, wrong

_BORDER = 2  # tokens on either side that a boundary in the text may change
_ROOM = 4  # a prompt with remembered answers leaves a fourth of the context, or as much as the client wants


@dataclass(frozen=True, slots=True)
class WrittenPrompts:
    """Prompts as text, then as tokens. `conversation` is their source; None if the client wrote them.

    `replay` begins with the tokens of an earlier answer. `place` is the end of the conversation, where its
    answer is remembered. `places`: ascending positions in the first prompt, where other requests may diverge.
    `special`: the tokens that begin every sequence are added; None: to a client's text, not to a template's.
    """

    texts: tuple[Prompt, ...]
    conversation: Conversation | None = None
    replay: Replay | None = None
    place: Beginning | None = None
    tokens: tuple[tuple[int, ...], ...] = ()
    places: tuple[int, ...] = ()
    special: bool | None = None


class Prompts:
    """Writer of prompts, with the answers that this agent remembers, for all models and clients."""

    def __init__(self) -> None:
        self._memory = AnswerMemory()

    def written(
        self,
        ask: GenerationRequest,
        text: Text,
        model: ModelInfo | StoredModelInfo,
        *,
        guided: bool,
        client: str,
    ) -> WrittenPrompts:
        """Return a request's prompts. Blocks. Raises RequestError. `guided`: without thoughts."""
        if not isinstance(ask.prompt, Conversation):
            return written(ask, text, model, guided=guided)
        conversation = _checked(ask.prompt, text, model, guided)
        stamp = text.stamp() if text.has_chat_template else ""
        base = base_key(conversation, client, model.id, str(model.path), text.identity, stamp)
        places = list(beginnings(base, conversation.messages))
        asked = conversation.messages[: -1 if conversation.continues else None]
        place = None
        if asked and asked[-1].role != "assistant":
            place = [*beginnings(base, asked)][-1] if conversation.continues else places[-1]
        while (found := self._memory.find(places)) is not None:
            answered, answer = found
            eos = model.eos if isinstance(model, ModelInfo) else ()
            if (replay := replayed(text, conversation, answered, answer, eos)) is not None:
                return WrittenPrompts((), conversation, replay, place)
            if not conversation.continues or answered is not places[-1]:
                break
            places.pop()  # the answer before it
        return WrittenPrompts((text.rendered(conversation),), conversation, place=place)

    def remember(self, text: Text, eos: Sequence[int], place: Beginning, answer: CompleteAnswer) -> None:
        if (found := to_remember(text, eos, place, answer)) is not None:
            self._memory.put(*found)


def written(
    ask: GenerationRequest,
    text: Text,
    model: ModelInfo | StoredModelInfo,
    *,
    guided: bool,
    prompting: bool = True,
) -> WrittenPrompts:
    """Return a request's prompts without remembered answers. Blocks. Raises RequestError.

    `prompting` adds the beginning of an answer to a conversation; `guided`: without thoughts.
    """
    if isinstance(ask.prompt, Conversation):
        conversation = _checked(ask.prompt, text, model, guided)
        return WrittenPrompts((text.rendered(conversation, prompting),), conversation)
    check_may_fit(sum(map(len, ask.prompt)), text.longest_token, model, len(ask.prompt))
    if isinstance(model, ModelInfo):
        _check_tokens(ask.prompt, model)
    return WrittenPrompts(tuple(ask.prompt))


async def encoded(
    ask: GenerationRequest,
    text: Text,
    written: WrittenPrompts,
    context: int,
    *,
    checkpoints: bool = False,
    client: str = "",
) -> WrittenPrompts:
    """Return a client's prompts with their tokens, and with places if `checkpoints`. Raises RequestError.

    They queue by their own size, because a template may expand a short body to a long text. If remembered
    answers leave too little of `context`, the prompt is written without them.
    """
    most = ask.options.max_tokens
    wanted = min(context if most is None else most, context // _ROOM)

    def encode() -> WrittenPrompts:
        conversation, replay, place = written.conversation, written.replay, written.place
        if conversation is None:
            special = written.special is not False
            ids = [
                text.encoded(each, special=special) if isinstance(each, str) else each
                for each in written.texts
            ]
            return replace(written, tokens=tuple(ids))
        tokens = replay.encoded(text) if replay is not None else None
        if replay is not None and tokens is not None and len(tokens) + wanted <= context:
            tail = replay.rest
            if place is not None:  # its tokens may have thoughts that the client left out
                known = len(replay.thoughts)
                thoughts = (*replay.thoughts, *place.thoughts[known:])
                place = replace(place, thoughts=thoughts[: len(place.thoughts)])
        else:
            tail = text.rendered(conversation) if replay is not None else str(written.texts[0])
            # a template writes special tokens itself
            tokens = text.encoded(tail, special=bool(written.special))
        found = places(text, conversation, tail, tokens) if checkpoints else ()
        return replace(written, place=place, tokens=(tokens,), places=found)

    size = sum(map(len, written.texts)) if written.replay is None else len(written.replay.rest)
    return await text.line(size).run(encode, client)


def places(text: Text, conversation: Conversation, tail: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the positions of the last user message and of the answer in a prompt. Blocks.

    The prompt ends with the text `tail`. A position that cannot be found there is left out.
    """
    found = set[int]()
    with contextlib.suppress(RequestError):
        opening = _opening(text, conversation)
        rests = [opening] if tail.endswith(opening) else []
        said = [turn.text.strip() for turn in conversation.messages if turn.role == "user"]
        last = next(filter(None, reversed(said)), "")
        # `rfind` takes quadratic time for some texts, and holds the GIL.
        if last and (behind := tail[::-1].find(last[::-1], len(opening))) >= 0:
            rests.append(tail[len(tail) - behind - len(last) :])
        for rest in rests:
            found.add(_begins(text.encoded(rest, special=False), prompt))
    return tuple(sorted(place for place in found if 0 < place < len(prompt)))


def _opening(text: Text, conversation: Conversation) -> str:
    """Return the start of an answer as the template writes it even after a short conversation, or ""."""
    short = replace(conversation, messages=(ChatMessage("user", "x"),), tools=(), continues=False)
    asked, before = (text.rendered(short, prompting) for prompting in (True, False))
    return asked.removeprefix(before) if asked.startswith(before) else ""


def _begins(rest: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Return the start of a text at a prompt's end, 0 if not found. `rest` is the text's own tokens.

    The prompt's tokens may differ at the boundary, where they span the text before.
    """
    for other in range(min(_BORDER + 1, len(rest))):
        if rest[other:] == prompt[other - len(rest) :]:
            return len(prompt) - len(rest) - (_BORDER if other else 0)
    return 0


def _checked(
    conversation: Conversation, text: Text, model: ModelInfo | StoredModelInfo, guided: bool
) -> Conversation:
    """Return the conversation for the template. Raises RequestError."""
    if conversation.needs_thinking and text.markup.think is None:
        raise not_supported(
            f"needs_thinking: {shown(model.id)} does not support thinking; leave it out", "needs_thinking"
        )
    if (count := len(conversation.messages)) > MOST_MESSAGES:
        detail = f"the request has {count} messages; at most {MOST_MESSAGES}"
        raise RequestError(detail, param="messages")
    check_may_fit(characters(conversation), text.longest_token, model, turns=len(conversation.messages))
    arguments = [call.arguments for turn in conversation.messages for call in turn.calls]
    check_extent(*arguments, where="what is called in messages", param="messages")  # templates parse it
    if guided and conversation.thinking is None:
        return replace(conversation, thinking=False)
    return conversation


def _check_tokens(prompts: Sequence[Prompt], model: ModelInfo) -> None:
    """Check that the client's token ids are in the model's vocabulary."""
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) or max(prompt) < model.vocabulary:
            continue
        j = next(j for j, token in enumerate(prompt) if token >= model.vocabulary)
        where = f"prompt[{i}][{j}]" if len(prompts) > 1 else f"prompt[{j}]"
        raise wrong(where, f"a token id from 0 to {model.vocabulary - 1}", prompt[j])
