"""Where in a prompt other requests may differ, so that a cache which cannot be cut is worth a copy there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.api.backend import ModelInfo
from mlxtp.api.prompts import Prompts, WrittenPrompts, encoded, places
from mlxtp.text.conversation import ChatMessage, Conversation, GenerationRequest
from mlxtp.text.replay import Beginning, Replay
from mlxtp.text.tokenizer import Text

from ..reference import conversation_ids, text

pytestmark = pytest.mark.slow

TURNS = (
    ChatMessage("system", "You are brief. Answer in one line."),
    ChatMessage("user", "What is the capital of France?"),
    ChatMessage("assistant", "Paris."),
    ChatMessage("user", "And of Spain?"),
)


def of(*turns: ChatMessage) -> tuple[int, ...]:
    return conversation_ids(text(), Conversation(turns))


def places_of_turns(*turns: ChatMessage) -> tuple[int, ...]:
    asked = Conversation(turns)
    return places(text(), asked, text().rendered(asked), of(*turns))


@pytest.mark.parametrize("turns", [TURNS[:1] + TURNS[1:2], TURNS, TURNS[1:2]])
@pytest.mark.parametrize("other", ["And of Italy?", "Ändern", " And of Spain", "\n\nwell", "a", "b"])
def test_other_last_messages_share_the_first_place_and_later_turns_the_second(
    turns: tuple[ChatMessage, ...], other: str
) -> None:
    prompt, (user, answer) = of(*turns), places_of_turns(*turns)
    changed = of(*turns[:-1], replace(turns[-1], text=other))
    assert changed[:user] == prompt[:user]
    assert user >= len(prompt) - len(of(turns[-1]))
    later = of(*turns, ChatMessage("assistant", other), TURNS[1])
    assert later[:answer] == prompt[:answer]
    assert len(prompt) - 8 < answer < len(prompt)


def test_tools_that_answer_come_after_the_last_message_of_the_user() -> None:
    turns = (*TURNS, ChatMessage("assistant", "Let me see."), ChatMessage("tool", "Madrid"))
    prompt, (user, _) = of(*turns), places_of_turns(*turns)
    assert of(*TURNS)[:user] == prompt[:user]
    assert user == places_of_turns(*TURNS)[0]


def test_a_conversation_without_a_user_has_one_place() -> None:
    assert len(places_of_turns(TURNS[0])) == 1


def test_a_prompt_that_ends_otherwise_has_no_places() -> None:
    """As where its tokens are those of earlier answers."""
    asked = Conversation(TURNS)
    assert places(text(), asked, text().rendered(asked), (7,) * 50) == ()
    assert places(text(), asked, "another text", of(*TURNS)) == ()


def test_a_template_writes_a_long_conversation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may take long for it. What begins an answer is seen in a short one."""
    model = ModelInfo("tiny", (), Path(), 1000, 1, (1,), 300)
    written, rendered = list[int](), Text.rendered

    def counted(self: Text, conversation: Conversation, *how: bool, **more: bool) -> str:
        written.append(len(conversation.messages))
        return rendered(self, conversation, *how, **more)

    monkeypatch.setattr(Text, "rendered", counted)
    ask = GenerationRequest("tiny", Conversation(TURNS))
    prompts = Prompts().written(ask, text(), model, guided=False, client="")
    found = asyncio.run(encoded(ask, text(), prompts, 1000, checkpoints=True))
    assert sorted(written) == [1, 1, len(TURNS)]
    assert (found.tokens, found.places) == ((of(*TURNS),), places_of_turns(*TURNS))


@pytest.mark.parametrize(("context", "thoughts"), [(1000, (b"known", b"new")), (20, (b"", b"new"))])
def test_thoughts_are_remembered_only_with_tokens_that_have_them(
    context: int, thoughts: tuple[bytes, ...]
) -> None:
    """Without room for the tokens, the template writes the prompt."""
    place = Beginning(3, 3, b"key", (b"", b"new"))
    replay = Replay((7,) * 20, "", False, (b"known",))

    async def story() -> WrittenPrompts:
        ask = GenerationRequest("tiny", Conversation(TURNS))
        return await encoded(ask, text(), WrittenPrompts((), Conversation(TURNS), replay, place), context)

    found = asyncio.run(story())
    assert found.place is not None
    assert found.place.thoughts == thoughts
