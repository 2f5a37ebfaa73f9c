"""Prompts of requests, as the chat template or the client writes them, with remembered answers in them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..errors import RequestError
from ..text.conversation import Conversation, GenerationRequest, Prompt, characters
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
from .request_body import not_supported, shown, wrong

_BORDER = 2  # tokens that a border in the text may change, on either side
_ROOM = 4  # a prompt with remembered answers leaves a fourth of the context, or as much as the client wants


@dataclass(frozen=True, slots=True)
class WrittenPrompts:
    """Prompts before they are tokens. `conversation` is theirs; None where the client wrote them.

    `replay` begins with the tokens of an earlier answer. `place` is the end of the conversation, where its
    answer is remembered.
    """

    texts: tuple[Prompt, ...]
    conversation: Conversation | None = None
    replay: Replay | None = None
    place: Beginning | None = None


class Prompts:
    """Prompts, with the answers that this agent remembers. One object serves all models and clients."""

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
        """Return the prompts of a request. Blocks. Raises RequestError.

        `guided`: a grammar allows no thoughts. Answers are remembered for one `client`.
        """
        if not isinstance(ask.prompt, Conversation):
            check_may_fit(sum(map(len, ask.prompt)), text.longest_token, model, len(ask.prompt))
            assert isinstance(model, ModelInfo)
            _check_tokens(ask.prompt, model)
            return WrittenPrompts(tuple(ask.prompt))
        conversation = _checked(ask.prompt, text, model, guided)
        stamp = text.stamp() if text.has_chat_template else ""
        base = base_key(conversation, client, model.id, str(model.path), text.identity, stamp)
        places = list(beginnings(base, conversation.messages))
        place = places[-1] if conversation.messages[-1].role != "assistant" else None
        if (found := self._memory.find(places)) is not None:
            answered, answer = found
            eos = model.eos if isinstance(model, ModelInfo) else ()
            if (replay := replayed(text, conversation, answered, answer, eos)) is not None:
                if place is not None:  # its tokens have thoughts that the client may have left out
                    known = len(answer.thoughts)
                    place = replace(place, thoughts=answer.thoughts + place.thoughts[known:])
                return WrittenPrompts((), conversation, replay, place)
        return WrittenPrompts((text.rendered(conversation),), conversation, place=place)

    async def tokens(
        self, ask: GenerationRequest, text: Text, context: int, written: WrittenPrompts
    ) -> list[tuple[int, ...]]:
        """Return token ids of prompts. Raises RequestError.

        They wait in the queue for their own size, as a template may write a long text for a short body. A
        prompt with remembered answers that leaves little of `context` is written without them.
        """
        special = written.conversation is None  # a template writes them itself
        wanted = min(ask.options.max_tokens or context, context // _ROOM)

        def encoded() -> list[tuple[int, ...]]:
            texts = written.texts
            if written.replay is not None and written.conversation is not None:
                tokens = written.replay.encoded(text)
                if tokens is not None and len(tokens) + wanted <= context:
                    return [tokens]
                texts = (text.rendered(written.conversation),)
            return [text.encoded(each, special=special) if isinstance(each, str) else each for each in texts]

        size = sum(map(len, written.texts)) if written.replay is None else len(written.replay.rest)
        return await text.line(size).run(encoded)

    async def places(self, text: Text, written: WrittenPrompts, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return the positions in a prompt from which other requests may differ, ascending."""
        if written.conversation is None:
            return ()
        size = characters(written.conversation)
        return await text.line(size).run(partial(places, text, written.conversation, prompt))

    def remember(self, text: Text, eos: Sequence[int], place: Beginning, answer: CompleteAnswer) -> None:
        """Remember an answer to the messages up to `place`. One of `eos` may end it."""
        if (found := to_remember(text, eos, place, answer)) is not None:
            self._memory.put(*found)


def places(text: Text, conversation: Conversation, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the last user's message and the beginning of the answer start in a prompt. Blocks.

    Templates write either in their own way, so the text is compared with that of a conversation without it.
    """
    messages, found = conversation.messages, set[int]()
    users = [at for at, turn in enumerate(messages) if turn.role == "user" and turn.text.strip()]
    with contextlib.suppress(RequestError):
        whole = text.rendered(conversation)
        others = [text.rendered(conversation, prompting=False)]
        if users:
            last = messages[users[-1]]
            changed = replace(last, text="b" if last.text.lstrip().startswith("a") else "a")
            before, after = messages[: users[-1]], messages[users[-1] + 1 :]
            others.append(text.rendered(replace(conversation, messages=(*before, changed, *after))))
        for other in others:
            rest = whole[_alike(whole, other) :]
            found.add(_begins(text.encoded(rest, special=False), prompt))
    return tuple(sorted(place for place in found if 0 < place < len(prompt)))


def _begins(rest: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Return where a text begins in a prompt that ends with it, 0 for nowhere. `rest` are its tokens alone.

    Its first ones may be others in the prompt, together with what is before.
    """
    same = _alike(rest[::-1], prompt[::-1])
    if not same or same < len(rest) - _BORDER:
        return 0
    return len(prompt) - len(rest) - (_BORDER if same < len(rest) else 0)


def _alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of items that both begin with. Slices are compared, as both may be very long."""
    same, differs = 0, min(len(one), len(other)) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same


def _checked(
    conversation: Conversation, text: Text, model: ModelInfo | StoredModelInfo, guided: bool
) -> Conversation:
    """Return the conversation as the template gets it. Raises RequestError."""
    if conversation.needs_thinking and text.markup.think is None:
        raise not_supported(
            f"needs_thinking: {shown(model.id)} does not support thinking; leave it out", "needs_thinking"
        )
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
