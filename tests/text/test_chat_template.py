"""Conversations as chat templates write them: nothing is lost, whatever a template refuses or drops."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxtp.errors import Code, RequestError
from mlxtp.text.chat_template import TemplateTraits, left_out, plainer, template_messages, template_options
from mlxtp.text.conversation import Call, ChatMessage, Conversation, Tool, characters, tool_json
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..api.conftest import byte_level, save
from .templates import GEMMA, TEMPLATES, text_of

LOOK = Tool(
    "look_up",
    "Looks a word up.",
    {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
ADD = Tool("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}})


def system(text: str) -> ChatMessage:
    return ChatMessage("system", text)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def said(text: str, *calls: Call, thought: str = "") -> ChatMessage:
    return ChatMessage("assistant", text, thought, calls)


def look(word: str, id_: str = "call_0123456789abcdef") -> Call:
    return Call(id_, "look_up", json.dumps({"word": word}))


def result(text: str, id_: str = "call_0123456789abcdef") -> ChatMessage:
    return ChatMessage("tool", text, call_id=id_, name="look_up")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    return {name: text_of(name, tmp_path_factory.mktemp("model")) for name in TEMPLATES}


TRAITS: Mapping[str, Mapping[str, object]] = {
    "qwen": {"systems": False, "later_systems": False, "no_user": False, "tools": True, "cut_markers": ("</think>",)},
    "mistral": {
        "systems": False, "later_systems": False, "neighbours": False, "first_assistant": False,
        "last_assistant": False, "no_user": False, "words_behind_results": False, "tools": True, "ids": "{number:09}",
        "words_beside_calls": False, "thoughts": "",
    },
    "gpt-oss": {
        "systems": False, "later_systems": False, "tools": True, "several_calls": False,
        "words_beside_calls": False, "thoughts_beside_words": False,
        "cut_markers": ("<|channel|>final<|message|>",),
    },
    "r1": {"systems": False, "later_systems": False, "tools_alone": False, "cut_markers": ("</think>",)},
    "lfm2": {"tools": True, "calls": False},
    "parts": {"parts": True, "tools_alone": False},
    "gemma": {
        "system": False, "systems": False, "later_systems": False, "neighbours": False, "first_assistant": False,
        "no_user": False, "tools_alone": False,
    },
    "kimi": {"tools": True, "ids": "functions.{name}:{index}", "thoughts": ""},
    "llama": {
        "tools": True, "arguments_as_text": True, "several_calls": False, "words_beside_calls": False, "thoughts": "",
    },
    "smol": {"tools_alone": False, "cut_markers": ("</think>",)},
    "glm": {"tools": True, "cut_markers": ("</think>",)},
    "minimax": {"systems": False, "later_systems": False, "tools": True, "cut_markers": ("</think>",)},
    "gemma4": {"tools": True, "cut_markers": ("<|channel>", "<|channel>thought", "<channel|>")},
    "deepseek": {"last_assistant": False, "no_user": False, "tools": True, "tools_alone": False, "arguments_as_text": True},
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_can_do_is_found_by_trying(texts: dict[str, Text], name: str) -> None:
    found = texts[name].traits
    usual = TemplateTraits()
    differs = {key: value for key in usual.__slots__ if (value := getattr(found, key)) != getattr(usual, key)}
    assert differs == TRAITS[name]


TWO = (said("A-ONE", look("ZEBRA", "c1"), look("LION", "c2")), result("R-ONE", "c1"), result("R-TWO", "c2"))
CONVERSATIONS: Mapping[str, tuple[Sequence[ChatMessage], Sequence[Tool]]] = {
    "two systems": ((system("S-ONE"), system("S-TWO"), user("U-ONE")), ()),
    "a system behind words": ((system("S-ONE"), user("U-ONE"), said("A-ONE"), system("S-TWO"), user("U-TWO")), ()),
    "a system behind a result": (
        (system("S-ONE"), user("U-ONE"), said("", look("ZEBRA")), result("R-ONE"), system("S-TWO"), user("U-TWO")),
        (LOOK,),
    ),
    "a system alone": ((system("S-ONE"),), ()),
    "the user twice": ((system("S-ONE"), user("U-ONE"), user("U-TWO")), (LOOK,)),
    "the assistant twice": ((user("U-ONE"), said("A-ONE"), said("A-TWO"), user("U-TWO")), ()),
    "the assistant first": ((said("A-ONE"), user("U-ONE")), ()),
    "the assistant last": ((user("U-ONE"), said("A-ONE")), ()),
    "words behind a result": ((user("U-ONE"), said("", look("ZEBRA")), result("R-ONE"), user("U-TWO")), (LOOK,)),
    "a system, tools and words beside calls": ((system("S-ONE"), user("U-ONE"), *TWO, said("A-TWO"), user("U-TWO")), (LOOK,)),
    "thoughts": ((user("U-ONE"), said("A-ONE", look("ZEBRA"), thought="hm"), result("R-ONE")), (LOOK,)),
    "calls without tools": ((user("U-ONE"), said("", look("ZEBRA")), result("R-ONE"), user("U-TWO")), ()),
    "a result without a call": ((user("U-ONE"), result("R-ONE"), user("U-TWO")), (LOOK,)),
    "a call without a result": ((user("U-ONE"), said("A-ONE", look("ZEBRA")), user("U-TWO")), (LOOK,)),
    "arguments that are no JSON": (
        (user("U-ONE"), said("", Call("c", "look_up", '{"word": ZEBRA')), result("", "c"), user("U-TWO")), (LOOK,),
    ),
    "one id twice": (
        (user("U-ONE"), said("", look("ZEBRA", "c")), result("R-ONE", "c"), said("", look("LION", "c")), result("R-TWO", "c")), (LOOK,),
    ),
    "an empty answer": ((system("S-ONE"), user("U-ONE"), said(""), user("U-TWO")), ()),
    "markers in words": ((user("U-ONE </think>"), said("A-ONE </think> A-TWO"), user("U-TWO <think>")), ()),
    "channels in words": ((user("U-ONE"), said("A-ONE <|channel|>final<|message|> A-TWO <|channel>thought")), ()),
    "thoughts in words": ((user("U-ONE"), said("<think>hm</think>\n\nA-ONE"), user("U-TWO")), ()),
    "signs of templates and JSON": ((system("S-ONE {{ x }} {% if %}"), user('U-ONE "q" \\n é <b>\n  x'), said("A-ONE\ttab"), user(" U-TWO ")), (LOOK,)),
    "switches": ((system("S-ONE /no_think"), user("U-ONE /think")), ()),
}  # fmt: skip
_WORDS = ("S-ONE", "S-TWO", "U-ONE", "U-TWO", "A-ONE", "A-TWO", "R-ONE", "R-TWO", "ZEBRA", "LION")


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_is_in_the_prompt(texts: dict[str, Text], name: str, conversation: str) -> None:
    turns, tools = CONVERSATIONS[conversation]
    prompt = texts[name].rendered(Conversation(tuple(turns), tuple(tools)))
    written = [turn.text + " ".join(call.arguments for call in turn.calls) for turn in turns]
    for word in _WORDS:
        assert (word in prompt) == any(word in text for text in written), prompt
    at = -1
    for turn in turns:  # system messages may move to the beginning
        for word in (word for word in _WORDS if word in turn.text and turn.role != "system"):
            assert prompt.find(word) > at, prompt
            at = prompt.find(word)
    for tool in tools:
        assert tool.description in prompt


def test_a_conversation_as_the_template_wants_it_is_left_alone(texts: dict[str, Text]) -> None:
    turns = (system("S"), user("U"), said("A", look("Z"), thought="hm"), result("R"), said("B"), user("V"))
    assert texts["qwen"].rendered(Conversation(turns, (LOOK,))) == (
        f"# Tools\n{json.dumps(tool_json(LOOK))}\n<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>A<tool_call>\n<function=look_up>\n<parameter=word>\nZ\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>\n<|im_start|>tool\nR<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


MADE: Sequence[tuple[str, Sequence[ChatMessage], str]] = [
    ("qwen", (system("S"), user("U"), system("T")), "user\nU<|im_end|>\n<|im_start|>user\n[System message]\nT<|im_end|>"),
    ("qwen", (system("S"), system("T"), user("U")), "system\nS\n\nT<|im_end|>"),
    ("qwen", (system("S"),), "system\nS<|im_end|>\n<|im_start|>user\n<|im_end|>"),
    ("mistral", (user("U"), said("", look("Z")), result("R"), user("V")), "R[/TOOL_RESULTS]OK.</s>[INST]V[/INST]"),
    ("mistral", (user("U"), said("", look("Z")), result("R")), "[CALL_ID]000000001[ARGS]"),
    ("mistral", (user("U"), said("A")), "A</s>[INST]Continue.[/INST]"),
    ("mistral", (said("A"), user("U")), "[INST][/INST]A</s>[INST]U[/INST]"),
    ("gemma", (system("S"), user("U"), said("A"), system("T")), "<user>S\n\nYou can call functions"),
    ("gemma", (system("S"), user("U"), said("A"), system("T")), "\n\nU<assistant>A<user>[System message]\nT"),
    ("gpt-oss", (user("U"), *TWO), "<|call|><|start|>functions<|message|>\"R-ONE\"<|end|><|start|>assistant<|channel|>commentary"),
    ("gpt-oss", (user("U"), said("", look("Z"), thought="hm"), result("R")), "analysis<|message|>hm<|end|>"),
    ("kimi", (user("U"), *TWO), "<|tool_call_begin|>functions.look_up:1<|tool_call_argument_begin|>"),
    ("kimi", (user("U"), *TWO), "## Return of functions.look_up:1\nR-TWO"),
    ("lfm2", (user("U"), said("", look("Z")), result("R")), "<|tool_call_start|>[look_up(word='Z')]<|tool_call_end|><|im_end|>"),
    ("llama", (user("U"), said("A", look("Z")), result("R")), '<assistant>A<assistant>{"name": "look_up", "parameters": {"word": "Z"}}<tool>"R"'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "turns", "expected"), MADE)
def test_what_a_template_gets_instead(
    texts: dict[str, Text], name: str, turns: Sequence[ChatMessage], expected: str
) -> None:
    assert expected in texts[name].rendered(Conversation(tuple(turns), (LOOK,)))


def test_a_template_without_tools_is_told_in_words(texts: dict[str, Text]) -> None:
    prompt = texts["r1"].rendered(Conversation((system("Be brief."), user("U"), *TWO), (LOOK,)))
    assert prompt.startswith("Be brief.\n\nYou can call functions")
    assert f"<tools>\n{json.dumps(tool_json(LOOK))}\n</tools>" in prompt
    assert '{"name": <name>, "arguments": <object>}' in prompt
    assert '<tool_call>\n{"name": "look_up", "arguments": {"word": "ZEBRA"}}\n</tool_call>' in prompt
    assert (
        "<|User|><tool_response>\nR-ONE\n</tool_response>\n<tool_response>\nR-TWO\n</tool_response>" in prompt
    )


def text_with(folder: Path, template: str) -> Text:
    return Text(LocalRenderer.load(save(byte_level(), folder, template)))


def test_a_text_that_no_form_shows_is_named(tmp_path: Path) -> None:
    text = text_with(tmp_path, "{% for m in messages %}{{ m.content | replace('secret', '') }}{% endfor %}")
    assert text.rendered(Conversation((user("hello"),))) == "hello"
    with pytest.raises(
        RequestError, match="leaves out the user's message that begins with 'a secret word'"
    ) as caught:
        text.rendered(Conversation((user("a secret word"),)))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_what_the_template_refuses_in_every_form_is_refused_in_its_first_words(tmp_path: Path) -> None:
    text = text_with(
        tmp_path,
        "{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}{{ messages[0].content }}",
    )
    with pytest.raises(RequestError, match="refuses these messages: no x"):
        text.rendered(Conversation((user("x"),)))


JSON_CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'


def test_a_call_before_any_user_is_told(tmp_path: Path) -> None:
    text = text_with(
        tmp_path,
        "{% if tools %}<user>{{ tools | tojson }}{{ messages[0].content }}{% endif %}"
        "{% for m in messages[1 if tools else 0:] %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        + JSON_CALL
        + "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    prompt = text.rendered(Conversation((said("A", look("ZEBRA")), result("R"), user("U")), (LOOK,)))
    assert (
        '<assistant>A<tool_call>{"name": "look_up", "arguments": {"word": "ZEBRA"}}</tool_call><tool>R<user>U'
        in prompt
    )


def test_a_pair_of_markers_may_be_what_a_template_cuts(tmp_path: Path) -> None:
    text = text_with(
        tmp_path,
        "{% for m in messages %}<{{ m.role }}>{% if '<think>' in m.content and '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    turns = (system("S"), user("U"), said("A <think> B </think> C"), user("V"))
    assert (
        text.rendered(Conversation(turns))
        == "<system>S<user>U<assistant>A < think> B < /think> C<user>V<assistant>"
    )


@pytest.mark.parametrize("form", ["== 9", ">= 9"])
def test_ids_get_the_length_that_the_template_wants(tmp_path: Path, form: str) -> None:
    text = text_with(
        tmp_path,
        f"{{{{ tools | tojson }}}}{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}"
        f"{{% if not c.id | length {form} %}}{{{{ raise_exception('id') }}}}{{% endif %}}"
        + JSON_CALL
        + "{% endfor %}{% endfor %}",
    )
    turns = (user("U"), said("", look("ZEBRA", "1")), result("R", "1"))
    assert (
        '<assistant><tool_call>{"name": "look_up", "arguments": {"word": "ZEBRA"}}</tool_call><tool>R'
        in text.rendered(Conversation(turns, (LOOK,)))
    )


@pytest.mark.parametrize(("status", "least", "most"), [(400, 2, 9), (504, 1, 1)])
def test_a_template_that_is_too_slow_is_not_rendered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, least: int, most: int
) -> None:
    renderer, renders = LocalRenderer.load(save(byte_level(), tmp_path, GEMMA)), []
    text = Text(renderer)

    def render(*_: object, **__: object) -> str:
        renders.append(status)
        raise RequestError("no", Code.DEADLINE, status=status)

    monkeypatch.setattr(renderer, "render", render)
    with pytest.raises(RequestError):
        text.rendered(Conversation((system("Be brief."), user("U"))))
    assert least <= len(renders) <= most


def test_a_template_that_fails_while_it_is_tried_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = LocalRenderer.load(save(byte_level(), tmp_path, GEMMA))

    def render(*_: object, **__: object) -> str:
        raise RequestError("slow", Code.DEADLINE, status=504)

    monkeypatch.setattr(renderer, "render", render)
    assert Text(renderer).traits == TemplateTraits()


def plain(turns: Sequence[ChatMessage], **traits: Any) -> list[dict[str, Any]]:
    traits = {"tools": True, **traits}
    return template_messages(Conversation(tuple(turns), (ADD,)), TemplateTraits(**traits), lambda *_: "")


def test_a_template_that_knows_tools_gets_calls_as_objects() -> None:
    asked, answer, returned = plain(
        (user("1 + 1?"), said("Let me see.", Call("c1", "add", '{"a": 1}'), thought="hm"), result("2", "c1"))
    )
    assert asked == {"role": "user", "content": "1 + 1?"}
    assert answer["reasoning_content"] == "hm"
    assert answer["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert returned == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    _, message = plain((user("1 + 1?"), said("", Call("c", "add", "[1"))))
    assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": "[1"}


def test_at_the_plainest_user_and_assistant_speak_in_turns() -> None:
    turns = (
        system("a"), system("b"), said("c"), user("d"), user("e"), said("f", look("g"), thought="h"), result("i"),
        system("j"), user("k"), said("l"), said("m"),
    )  # fmt: skip
    plainest = plainer(TemplateTraits(tools=True))[-1]
    messages = template_messages(Conversation(turns, (ADD,)), plainest, lambda *_: "")
    assert [message["role"] for message in messages] == [*["user", "assistant"] * 3, "user"]
    assert all(message.keys() == {"role", "content"} for message in messages)
    told = [letter for message in messages for letter in message["content"] if message["role"] == "assistant"]
    assert {"c", "f", "l", "m"} <= {*told}


def test_results_find_their_calls_where_a_model_uses_an_id_twice() -> None:
    turns = (
        user("?"), said("", Call("f:0", "add", "{}"), Call("f:0", "say", "{}")), result("1", "f:0"), result("2", "f:0"),
        said("", Call("f:0", "say", "{}")), result("3", "f:0"), result("4", "nobodys"),
    )  # fmt: skip
    names = [
        (message["role"], message.get("name"), message["content"])
        for message in plain(turns)
        if not message.get("tool_calls")
    ]
    assert names == [
        ("user", None, "?"), ("tool", "add", "1"), ("tool", "say", "2"), ("tool", "say", "3"),
        ("user", None, "<tool_response>\n4\n</tool_response>"),
    ]  # fmt: skip


def test_results_with_ids_answer_calls_without() -> None:
    turns = (
        user("?"),
        said("", Call("", "add", "{}"), Call("", "say", "{}")),
        result("1", "x"),
        result("2", "y"),
    )
    assert [each.get("name") for each in plain(turns)] == [None, None, "add", "say"]


def test_results_have_the_order_of_their_calls() -> None:
    turns = (
        user("?"), said("", Call("c1", "add", "{}"), Call("c2", "say", "{}")), result("lost", "c3"),
        result("two", "c2"), result("one", "c1"), user("!"),
    )  # fmt: skip
    told = [each["content"] for each in plain(turns)]
    assert told == ["?", "", "one", "two", "<tool_response>\nlost\n</tool_response>", "!"]


def test_calls_at_once_are_told_one_by_one_where_the_template_takes_one() -> None:
    turns = (
        user("?"), said("", Call("c1", "add", "{}"), Call("c2", "say", "{}")), result("two", "c2"), result("one", "c1"),
    )  # fmt: skip
    messages = plain(turns, several_calls=False)
    told = [[call["id"] for call in each.get("tool_calls", ())] or each["content"] for each in messages]
    assert told == ["?", ["000000001"], "one", ["000000002"], "two"]


def test_calls_at_once_with_one_id_keep_their_results() -> None:
    twice = [
        turn for text in ("one", "two") for turn in (said("", Call("c", "add", "{}")), result(text, "c"))
    ]
    told = [each["content"] for each in plain((user("?"), *twice), several_calls=False)]
    assert told == ["?", "", "one", "", "two"]


def test_what_an_assistant_said_stays_its_own() -> None:
    turns = (user("U"), said("<tool_response> is a tag"), user("V"))
    assert [each["role"] for each in plain(turns, tools=False)] == ["system", "user", "assistant", "user"]


def test_thinking_is_an_option_under_both_of_its_names() -> None:
    assert template_options(Conversation(())) == {}
    wish = Conversation((), thinking=False, template_options={"style": 1})
    assert template_options(wish) == {"style": 1, "enable_thinking": False, "thinking": False}


def test_how_long_a_conversation_is_counts_all_of_it() -> None:
    turns = (
        user("1 + 1?"),
        said("Let me see.", Call("c1", "add", '{"a": 1}'), thought="hm"),
        result("2", "c1"),
    )
    assert characters(Conversation(turns)) == len("1 + 1?Let me see.hmadd") + len('{"a": 1}') + 1
    assert characters(Conversation((), (ADD,))) == len(json.dumps(tool_json(ADD)))


@pytest.mark.parametrize(
    ("prompt", "text", "lacks"),
    [
        ("a b c", " b\n", False), ("a c", "b", True), ('"x\\ny"', "x\ny", False), ("&lt;b&gt; &#34;", '<b> "', False),
        ("be brief", "be brief /no_think", False), ("b brief", "be /think brief", True), ('"\\u00e9"', "é", False), ("", "", False),
    ],
)  # fmt: skip
def test_a_text_may_be_trimmed_or_escaped_but_not_missing(prompt: str, text: str, lacks: bool) -> None:
    assert bool(left_out(prompt, [{"role": "user", "content": text}], [])) is lacks


def test_a_result_may_stand_before_the_words_beside_its_call() -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    turns = [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "ok", "tool_calls": [call]},
        {"role": "tool", "content": "two"}, {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    assert left_out("go add two ok done", turns, []) == ""
    assert left_out("go done add two ok", turns, []) == "the assistant's message that begins with 'done'"


def test_calls_and_tools_are_missed_too() -> None:
    function: dict[str, Any] = {"name": "add", "arguments": {}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    assert left_out("x", [message], []) == "the call that begins with 'add'"
    assert left_out("x", [], [tool_json(ADD)]) == "the tool 'add'"
    assert left_out("add", [message], [tool_json(ADD)]) == ""
    for arguments in ({"description": "a\nletter folder/file"}, '{"description": "a\\nletter folder/file"}'):
        function["arguments"] = arguments
        assert left_out("add description", [message], []) == "the call's argument that begins with 'folder'"
        assert left_out("add folder/file", [message], []) == ""


@pytest.mark.parametrize(
    ("prompt", "lacks"),
    [
        ("rules <go on> <working> <go on>", ""),
        ("<go on> <working> <go on> rules", ""),
        ("rules <go on> <working>", "the user's message that begins with 'go on'"),
        ("rules <working> <go on> <go on>", "the assistant's message that begins with 'working'"),
    ],
)
def test_the_texts_stand_in_their_order(prompt: str, lacks: str) -> None:
    turns = [("system", "rules"), ("user", "go on"), ("assistant", "working"), ("user", "go on")]
    assert left_out(prompt, [{"role": role, "content": text} for role, text in turns], []) == lacks
