from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxtp.errors import Code, RequestError
from mlxtp.text.conversation import (
    Call,
    ChatMessage,
    Conversation,
    Tool,
    characters,
    template_messages,
    template_options,
    tool_json,
)
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ...reference import conversation_ids
from ..conftest import byte_level, save

ADD = Tool("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}})
TURNS = (
    ChatMessage("user", "1 + 1?"),
    ChatMessage("assistant", "Let me see.", "hm", (Call("c1", "add", '{"a": 1}'),)),
    ChatMessage("tool", "2", call_id="c1", name="add"),
    ChatMessage("tool", "3", call_id="c2", name="add"),
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
    for turns, system in ((TURNS, ""), ((ChatMessage("system", "Be brief."), *TURNS), "Be brief.\n\n")):
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
    turn = ChatMessage("assistant", "", calls=(Call("c", "add", "[1"),))
    (message,) = template_messages(Conversation((turn,)), knows_tools=True)
    assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": "[1"}


def test_thinking_is_an_option_under_both_of_its_names() -> None:
    assert template_options(Conversation(())) == {}
    wish = Conversation((), thinking=False, template_options={"style": 1})
    assert template_options(wish) == {"style": 1, "enable_thinking": False, "thinking": False}


def test_how_long_a_conversation_is_counts_all_of_it() -> None:
    expected = len("1 + 1?Let me see.hmadd") + len('{"a": 1}') + len("23")
    assert characters(Conversation(TURNS)) == expected
    assert characters(Conversation((), (ADD,))) == len(json.dumps(tool_json(ADD)))


# --- what templates insist on -----------------------------------------------------------------------------

SAY = Tool("say", "Says")
LLAMA = """{# <|python_tag|> #}{% for t in tools or [] %}{{ t.function.name }};{% endfor %}
{%- for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{%- set call = m.tool_calls[0].function %}[{{ call.name }} {{ call.arguments | tojson }}]
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""
MISTRAL = """{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}
{%- for call in m.tool_calls or [] %}{% if call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- "[TOOL_CALLS]" ~ call.function.name ~ "#" ~ call.id }}{% endfor %}
{%- if m.role == "tool" and m.tool_call_id | length != 9 %}{{ raise_exception("length 9!") }}{% endif %}
{{- m.content }}{% if m.role == "tool" %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"""
GEMMA = """{% if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{%- for m in messages %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{% endif %}
{{- "<" ~ m.role ~ ">" ~ m.content }}{% endfor %}"""
GRANITE = """{% for t in tools or [] %}<|tool|>{{ t.function.name }}{% endfor %}{% for m in messages %}
{{- "<" ~ m.role ~ ">" ~ m.content }}{% for c in m.tool_calls or [] %}<|tool_call|>{{ c }}{% endfor %}
{%- endfor %}"""


def prompt(folder: Path, template: str, conversation: Conversation) -> str:
    text = Text(LocalRenderer.load(save(byte_level(), folder, template)))
    return text.decoded(conversation_ids(text, conversation))


@pytest.mark.parametrize(("status", "least", "most"), [(400, 2, 9), (504, 1, 1)])
def test_a_template_that_is_too_slow_is_not_rendered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, least: int, most: int
) -> None:
    renderer, renders = LocalRenderer.load(save(byte_level(), tmp_path, GEMMA)), []

    def render(*_: object, **__: object) -> str:
        renders.append(status)
        raise RequestError("no", Code.DEADLINE, status=status)

    monkeypatch.setattr(renderer, "render", render)
    with pytest.raises(RequestError):
        Text(renderer).rendered(Conversation((ChatMessage("system", "Be brief."), *TURNS)))
    assert least <= len(renders) <= most


def called(*calls: tuple[str, str], text: str = "") -> ChatMessage:
    return ChatMessage("assistant", text, calls=tuple(Call(id_, name, "{}") for id_, name in calls))


def returned(text: str, id_: str) -> ChatMessage:
    return ChatMessage("tool", text, call_id=id_, name="add")


def test_calls_at_once_are_told_one_by_one_where_the_template_takes_one(tmp_path: Path) -> None:
    ids = ("call_1", "call_2")
    turns = (
        ChatMessage("user", "?"), called((ids[0], "add"), (ids[1], "say")),
        returned("two", ids[1]), returned("one", ids[0]), ChatMessage("assistant", "done"),
    )  # fmt: skip
    assert prompt(tmp_path, LLAMA, Conversation(turns, (ADD, SAY))) == (
        "add;say;<user>?[add {}]<tool>one[say {}]<tool>two<assistant>done"
    )


def test_ids_get_the_length_that_the_template_wants(tmp_path: Path) -> None:
    turns = (called(("call_1", "add"), ("call_2", "say")), returned("2", "call_2"), returned("1", "call_1"))
    assert prompt(tmp_path, MISTRAL, Conversation(turns, (ADD,))) == (
        "add;[TOOL_CALLS]add#000000001[TOOL_CALLS]say#0000000022#0000000021#000000001"
    )


def test_user_and_assistant_take_turns_where_the_template_insists_on_it(tmp_path: Path) -> None:
    turns = (ChatMessage("system", "Be brief."), *TURNS, ChatMessage("user", "So?"))
    said = prompt(tmp_path, GEMMA, Conversation(turns, (ADD,)))
    assert said.startswith("<user>Be brief.\n\nYou can call functions")
    assert "\n\n1 + 1?<assistant>Let me see." in said
    assert said.endswith("3\n</tool_response>\n\nSo?")


def test_what_no_way_of_saying_it_mends_is_refused_in_the_templates_first_words(tmp_path: Path) -> None:
    turns = (ChatMessage("assistant", "I"), ChatMessage("system", "S"))
    with pytest.raises(RequestError, match="must alternate") as caught:
        prompt(tmp_path, GEMMA, Conversation(turns))
    assert caught.value.status == 400


def test_a_template_whose_calls_cannot_be_read_is_not_told_of_tools_but_its_model_is(tmp_path: Path) -> None:
    said = prompt(tmp_path, GRANITE, Conversation(TURNS[:3], (ADD,)))
    assert "<|tool|>" not in said
    assert "<|tool_call|>" not in said
    assert said.startswith("<system>You can call functions")
    assert said.endswith("<user><tool_response>\n2\n</tool_response>")


def test_results_find_their_calls_where_a_model_uses_an_id_twice() -> None:
    turns = (
        called(("f:0", "add"), ("f:0", "say")), returned("1", "f:0"), returned("2", "f:0"),
        called(("f:0", "say")), returned("3", "f:0"), returned("4", "nobodys"),
    )  # fmt: skip
    messages = template_messages(Conversation(turns), knows_tools=True)
    names = [(message["name"], message["content"]) for message in messages if message["role"] == "tool"]
    assert names == [("add", "1"), ("say", "2"), ("say", "3"), ("add", "4")]
