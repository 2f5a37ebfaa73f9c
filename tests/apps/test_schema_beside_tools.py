"""A schema beside tools that may be called: first the call, then JSON of the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .actor import Stage
from .sessions import DIALECTS, Chat, Responses

ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "word": {"type": "string", "maxLength": 20}},
    "required": ["answer", "word"],
    "additionalProperties": False,
}
WANTED: dict[str, Any] = {
    "Chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": ANSWER}}},
    "Responses": {"text": {"format": {"type": "json_schema", "name": "it", "schema": ANSWER}}},
    "Messages": {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}},
    "Ollama": {"format": ANSWER},
}
VALUES = {"answer": 9, "word": "nine"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_and_then_the_schema(acting: Stage, dialect: Any) -> None:
    session, wanted = dialect(acting.url), WANTED[dialect.__name__]
    session.say(f'DO call bash {{"command": "ls"}} DO json {json.dumps(VALUES)}')
    assert session.answer(**wanted) == ("", {"command": "ls"})
    session.returned("FALCON")
    text, call = session.answer(**wanted)
    assert call is None
    assert json.loads(text) == VALUES
    assert all(seen.grammar for seen in acting.ledger[-2:])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_words_outside_of_the_schema_cannot_come(acting: Stage, dialect: Any) -> None:
    session = dialect(acting.url)
    session.say('DO say "I would rather talk."')
    text, call = session.answer(**WANTED[dialect.__name__])
    assert call is not None or json.loads(text).keys() == VALUES.keys()


@pytest.mark.parametrize(
    ("dialect", "choice"),
    [
        (Chat, {"type": "function", "function": {"name": "bash"}}),
        (Responses, {"type": "function", "name": "bash"}),
    ],
)
def test_beside_a_forced_call_the_format_is_moot(acting: Stage, dialect: Any, choice: Any) -> None:
    session = dialect(acting.url)
    session.say('DO call bash {"command": "ls"}')
    assert session.answer(tool_choice=choice, **WANTED[dialect.__name__]) == ("", {"command": "ls"})
