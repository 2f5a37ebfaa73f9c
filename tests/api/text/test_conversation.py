from __future__ import annotations

import json

from mlxtp.api.ask import Call, Conversation, Tool, Turn
from mlxtp.api.text.calls import tool_json
from mlxtp.api.text.conversation import characters, template_messages, template_options

ADD = Tool("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}})
TURNS = (
    Turn("user", "1 + 1?"),
    Turn("assistant", "Let me see.", "hm", (Call("c1", "add", '{"a": 1}'),)),
    Turn("tool", "2", call_id="c1", name="add"),
    Turn("tool", "3", call_id="c2", name="add"),
)


def test_a_template_that_knows_tools_gets_them_as_objects() -> None:
    user, assistant, tool, _ = template_messages(Conversation(TURNS, (ADD,)), knows_tools=True)
    assert user == {"role": "user", "content": "1 + 1?"}
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}


def test_a_template_that_knows_none_is_told_in_words() -> None:
    for turns, system in ((TURNS, ""), ((Turn("system", "Be brief."), *TURNS), "Be brief.\n\n")):
        messages = template_messages(Conversation(turns, (ADD,)), knows_tools=False)
        assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
        assert all(set(message) == {"role", "content"} for message in messages)
        assert messages[0]["content"].startswith(f"{system}You can call functions")
        assert f"<tools>\n{json.dumps(tool_json(ADD))}\n</tools>" in messages[0]["content"]
        assert '{"name": <name>, "arguments": <object>}' in messages[0]["content"]
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        assert messages[2]["content"] == f"Let me see.\n{call}"
        said = [f"<tool_response>\n{number}\n</tool_response>" for number in (2, 3)]
        assert messages[3]["content"] == "\n".join(said)


def test_without_tools_nothing_is_added() -> None:
    for knows_tools in (True, False):
        assert template_messages(Conversation(TURNS[:1]), knows_tools) == [
            {"role": "user", "content": "1 + 1?"}
        ]


def test_arguments_that_are_no_object_stay_visible() -> None:
    turn = Turn("assistant", "", calls=(Call("c", "add", "[1"),))
    (message,) = template_messages(Conversation((turn,)), knows_tools=True)
    assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": "[1"}


def test_thinking_is_a_wish_under_both_of_its_names() -> None:
    assert template_options(Conversation(())) == {}
    wish = Conversation((), thinking=False, template_options={"style": 1})
    assert template_options(wish) == {"style": 1, "enable_thinking": False, "thinking": False}


def test_how_long_a_conversation_is_counts_all_of_it() -> None:
    expected = len("1 + 1?Let me see.hmadd") + len('{"a": 1}') + len("23")
    assert characters(Conversation(TURNS)) == expected
    assert characters(Conversation((), (ADD,))) == len(json.dumps(tool_json(ADD)))
