"""A forced call is read back as it was written, and forbidden calls leave the prompt as it was."""

from __future__ import annotations

from typing import Any

import pytest

from .actor import Stage
from .sessions import Chat, Messages, Responses

FORCED = [
    (Chat, {"type": "function", "function": {"name": "bash"}}),
    (Chat, "required"),
    (Responses, {"type": "function", "name": "bash"}),
    (Messages, {"type": "tool", "name": "bash"}),
    (Messages, {"type": "any"}),
]
NONE = [(Chat, "none"), (Responses, "none"), (Messages, {"type": "none"})]
WORDS = 'Please. DO call bash {"command": "ls -l"}'


@pytest.fixture(autouse=True)
def _nothing_is_known_yet(acting: Stage) -> None:
    """The ledger is empty, so that tests are independent."""
    acting.ledger.clear()


@pytest.mark.parametrize(("dialect", "choice"), FORCED)
def test_a_forced_call_is_reused(acting: Stage, dialect: Any, choice: Any) -> None:
    session = dialect(acting.url)
    session.say(WORDS)
    assert session.answer(tool_choice=choice) == ("", {"command": "ls -l"})
    session.returned("total 0")
    session.answer()
    first, second = acting.ledger[-2:]
    assert first.grammar
    assert second.shared >= len(first.prompt) + len(first.answer)


@pytest.mark.parametrize(("dialect", "choice"), NONE)
def test_where_calls_are_forbidden_the_prompt_stays(acting: Stage, dialect: Any, choice: Any) -> None:
    session = dialect(acting.url)
    session.say(WORDS)
    session.answer()
    session.returned("total 0")
    text, call = session.answer(tool_choice=choice)
    assert (text, call) == ("The tool returned: total 0", None)
    first, second = acting.ledger[-2:]
    assert second.shared >= len(first.prompt) + len(first.answer)


@pytest.mark.parametrize(("dialect", "choice"), NONE)
def test_a_forbidden_call_does_not_come(acting: Stage, dialect: Any, choice: Any) -> None:
    session = dialect(acting.url)
    session.say(WORDS)
    assert session.answer(tool_choice=choice) == ("", None)
    assert "<tool_call>" in acting.actor.loaded_text.decoded(
        acting.ledger[-1].answer
    )  # the model wrote one all the same
