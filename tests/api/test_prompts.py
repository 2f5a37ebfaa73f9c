"""Where in a prompt other requests may differ, so that a cache which cannot be cut is worth a copy there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.api.prompts import places
from mlxtp.text.conversation import ChatMessage, Conversation

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


def found(*turns: ChatMessage) -> tuple[int, ...]:
    return places(text(), Conversation(turns), of(*turns))


@pytest.mark.parametrize("turns", [TURNS[:1] + TURNS[1:2], TURNS, TURNS[1:2]])
@pytest.mark.parametrize("other", ["And of Italy?", "Ändern", " And of Spain", "\n\nwell", "a", "b"])
def test_other_last_messages_share_the_first_place_and_later_turns_the_second(
    turns: tuple[ChatMessage, ...], other: str
) -> None:
    prompt, (user, answer) = of(*turns), found(*turns)
    changed = of(*turns[:-1], replace(turns[-1], text=other))
    assert changed[:user] == prompt[:user]
    assert user >= len(prompt) - len(of(turns[-1]))
    later = of(*turns, ChatMessage("assistant", other), TURNS[1])
    assert later[:answer] == prompt[:answer]
    assert len(prompt) - 8 < answer < len(prompt)


def test_tools_that_answer_come_after_the_last_message_of_the_user() -> None:
    turns = (*TURNS, ChatMessage("assistant", "Let me see."), ChatMessage("tool", "Madrid"))
    prompt, (user, _) = of(*turns), found(*turns)
    assert of(*TURNS)[:user] == prompt[:user]
    assert user == found(*TURNS)[0]


def test_a_conversation_without_a_user_has_one_place() -> None:
    assert len(found(TURNS[0])) == 1


def test_a_prompt_that_ends_otherwise_has_no_places() -> None:
    """As where its tokens are those of earlier answers."""
    assert places(text(), Conversation(TURNS), (7,) * 50) == ()
