"""History as clients keep it, in every dialect: nothing in it is refused, and what can be text is text.

A client sends its history again at every turn. One that gets a 400 for it is stuck.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.api.adapter import About
from mlxtp.api.dialects.anthropic import ANTHROPIC, parse_messages
from mlxtp.api.dialects.ollama import Ollama
from mlxtp.api.dialects.ollama_request import Arrival, parse_chat
from mlxtp.api.dialects.openai import OpenAIChat
from mlxtp.api.dialects.openai import parse_chat as parse_openai
from mlxtp.api.dialects.request_parts import ClientTool
from mlxtp.api.dialects.responses import Responses
from mlxtp.api.dialects.responses_request import ResponseStore, parse
from mlxtp.errors import Code, RequestError
from mlxtp.text.conversation import Call, ChatMessage, Conversation, GenerationRequest, StreamEnd, Tool
from mlxtp.text.tool_grammar import log_once
from mlxtp.text.transcript import CallArguments, CallBegan, ContentDelta, Finish, ReasoningDelta, WholeAnswer

from ..conftest import WAIT_S, Server

Json = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Form:
    """How a dialect writes messages. `result` returns a call and its result."""

    path: str
    field: str
    parse: Callable[[bytes], GenerationRequest]
    call: Callable[..., Json]
    result: Callable[..., Json]
    more: Json

    def body(self, messages: Sequence[Any], **fields: Any) -> Json:
        return {self.field: [*messages]} | self.more | fields

    def conversation(self, messages: Sequence[Any], **fields: Any) -> Conversation:
        prompt = self.parse(json.dumps(self.body(messages, **fields)).encode()).prompt
        assert isinstance(prompt, Conversation)
        return prompt

    def turns(self, *messages: Any) -> tuple[ChatMessage, ...]:
        return self.conversation(messages).messages

    def refusal(self, *messages: Any) -> RequestError:
        with pytest.raises(RequestError) as caught:
            self.conversation(messages)
        assert caught.value.status == 400
        return caught.value


def part(kind: str, **fields: Any) -> Json:
    return {"type": kind, **fields}


def text(words: Any) -> Json:
    return part("text", text=words)


def user(*content: Any) -> Json:
    return {"role": "user", "content": [*content]}


def assistant(*content: Any) -> Json:
    return {"role": "assistant", "content": [*content]}


def chat_calls(*calls: Json | None) -> Json:
    return {"role": "assistant", "tool_calls": [*calls]}


def chat_call(arguments: Any = "{}", name: Any = "f") -> Json:
    return chat_calls({"id": "c", "function": {"name": name, "arguments": arguments}})


def tool_use(arguments: Any = "{}", name: Any = "f") -> Json:
    return assistant(part("tool_use", id="c", name=name, input=arguments))


def function_call(arguments: Any = "{}", name: Any = "f") -> Json:
    return part("function_call", call_id="c", name=name, arguments=arguments)


def chat_result(content: Any, id_: str | None = "c") -> Json:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def tool_result(content: Any, id_: str | None = "c") -> Json:
    return user(part("tool_result", tool_use_id=id_, content=content))


def call_output(content: Any, id_: str | None = "c") -> Json:
    return part("function_call_output", call_id=id_, output=content)


CHAT = Form("/v1/chat/completions", "messages", parse_openai, chat_call, chat_result, {"max_tokens": 5})
MESSAGES = Form("/v1/messages", "messages", parse_messages, tool_use, tool_result, {"max_tokens": 5})
RESPONSES = Form(
    "/v1/responses", "input", lambda body: parse(body, ResponseStore(), ""), function_call, call_output, {}
)
OLLAMA = Form(
    "/api/chat", "messages", lambda body: parse_chat(Arrival(0, ()), body), chat_call, chat_result,
    {"model": "default", "stream": False},
)  # fmt: skip
FORMS = [
    pytest.param(form, id=name)
    for name, form in (("chat", CHAT), ("messages", MESSAGES), ("responses", RESPONSES), ("ollama", OLLAMA))
]
every_dialect = pytest.mark.parametrize("form", FORMS)
ASKED = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hi"}


def note(kind: str, kinds: str = "") -> str:
    reader = "server" if kinds == "such blocks" else "model"
    kinds = kinds or {"document": "documents but text"}.get(kind, f"{kind}s")
    return f"[{kind} left out: this {reader} reads no {kinds}]"


def in_base64(text: str) -> str:
    return b64encode(text.encode()).decode()


IMAGE, AUDIO, DOCUMENT = note("image"), note("audio", "audio"), note("document")
PNG, PDF = "iVBORw0KGgo=", "JVBERi0="


def document(kind: str, **source: Any) -> Json:
    return part("document", source=part(kind, **source))


def web(*found: Json) -> Json:
    return part("web_search_tool_result", tool_use_id="s", content=[*found])


SEARCHED = part("server_tool_use", id="s", name="web_search", input={"query": "x"})
PAGE = document("text", media_type="text/plain", data="page")
FETCHED = part("web_fetch_result", url="u", content=PAGE)
RUN = part("code_execution_result", stdout="out", stderr="err", return_code=1, content=[])
UNREADABLE: list[tuple[Json, str]] = [
    (part("image_url", image_url={"url": f"data:image/png;base64,{PNG}"}), IMAGE),
    (part("image", source={"type": "base64", "media_type": "image/png", "data": PNG}), IMAGE),
    (part("image", data=PNG, mimeType="image/png"), IMAGE),
    (part("input_image", image_url="https://x.org/a.png", detail="auto"), IMAGE),
    (part("computer_screenshot", image_url="u"), IMAGE),
    (part("input_audio", input_audio={"data": "x", "format": "wav"}), AUDIO),
    (part("video_url", video_url={"url": "u"}), note("video")),
    (part("file", file={"file_data": f"data:application/pdf;base64,{PDF}", "filename": "a.pdf"}), DOCUMENT),
    (part("input_file", file_data=PDF), DOCUMENT),
    (part("input_file", file_id="file-1"), DOCUMENT),
    (document("base64", media_type="application/pdf", data=PDF) | {"title": "A"}, f"A\n{DOCUMENT}"),
    (document("url", url="https://x.org/a.pdf"), DOCUMENT),
    (part("resource", resource={"uri": "file:///a", "blob": PNG}), DOCUMENT),
    (part("hologram", x=1), note('block of type "hologram"', "such blocks")),
]
READABLE: list[tuple[Any, str]] = [
    (text("a") | {"cache_control": {"type": "ephemeral"}, "citations": None}, "a"),
    (part("input_text", text="a"), "a"),
    (part("output_text", text="a", annotations=[], logprobs=[]), "a"),
    ({"text": "a"}, "a"),
    ("a", "a"),
    (part("refusal", refusal="no"), "no"),
    (part("output_audio", data="x", transcript="spoken"), "spoken"),
    (document("text", media_type="text/plain", data="abc") | {"title": "T", "context": "C"}, "T\nC\nabc"),
    (document("content", content="abc"), "abc"),
    (document("content", content=[text("a"), text("b")]), "a\nb"),
    (document("base64", media_type="text/csv", data=in_base64("a,ü")), "a,ü"),
    (part("file", file={"file_data": f"data:text/plain;base64,{in_base64('abc')}"}), "abc"),
    (part("input_file", file_data="plain words", filename="a.txt"), "plain words"),
    (part("input_file", file_data=in_base64("abc\n")), "abc\n"),
    (part("search_result", title="T", source="https://x.org", content=[text("a")]), "T\nhttps://x.org\na"),
    (part("tool_reference", tool_name="weather"), "weather"),
    (web(part("web_search_result", title="T", url="u", encrypted_content="e")), "T\nu"),
    (web() | {"content": part("web_search_tool_result_error", error_code="unavailable")}, "unavailable"),
    (part("web_fetch_tool_result", tool_use_id="s", content=FETCHED), "u\npage"),
    (part("code_execution_tool_result", tool_use_id="s", content=RUN), "out\nerr"),
    (part("mcp_tool_use", id="m", name="n", server_name="s", input={"a": 1}), '[n {"a": 1}]'),
    (SEARCHED, '[web_search {"query": "x"}]'),
    (part("error-text", value="no"), "no"),
    (part("json", value={"a": 1}), '{"a": 1}'),
    (part("hologram", text="abc"), "abc"),
    (part("error", message="no"), "no"),
    (part("mcp_tool_result", tool_use_id="m", is_error=False, content=[text("a")]), "a"),
    (part("resource", resource={"uri": "file:///a", "text": "abc"}), "abc"),
    (part("resource_link", name="a", uri="file:///a"), "a\nfile:///a"),
    (part("compaction", content="all"), "[Summary of the conversation so far]\nall"),
    (part("hologram", content="abc"), "abc"),
]
FELL_BACK = part("fallback", **{"from": {"model": "a"}, "to": {"model": "b"}})
REDACTED, EMPTY = part("redacted_thinking", data="x"), part("compaction", content=None)
SILENT: list[Any] = [None, text(None), part("text"), REDACTED, EMPTY, FELL_BACK]


@every_dialect
@pytest.mark.parametrize(
    ("part", "words"),
    [*UNREADABLE, *READABLE, *((part, "") for part in SILENT)],
    ids=lambda value: str(value)[:40],
)
def test_a_part_of_history_in_words(form: Form, part: Any, words: str) -> None:
    expected = "\n".join(filter(None, [words, "beside"]))
    content = [part, text("beside")]
    assert form.turns(user(*content), SAID, ASKED)[0].text == expected
    assert form.turns(ASKED, assistant(*content), ASKED)[1].text == expected
    turns = form.turns(ASKED, form.call(), form.result(content))
    assert [turn.text for turn in turns if turn.role == "tool"] == [expected]


@every_dialect
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ""), ("", ""), ([], ""), ("a", "a"), (5, "5"), (True, "true"), (2.5, "2.5"),
        ({"a": 1}, '{"a": 1}'), ([1, "é"], '[1, "é"]'), ([{"a": 1}, {"b": 2}], '{"a": 1}\n{"b": 2}'),
        (text("a"), "a"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_tool_returned_in_words(form: Form, content: Any, words: str) -> None:
    *_, result = form.turns(ASKED, form.call(), form.result(content))
    assert result == returned(words, "c" if form is not OLLAMA else result.call_id)


@every_dialect
@pytest.mark.parametrize("content", [None, "", [], [None], 5, {"a": 1}], ids=str)
def test_a_message_of_history_without_words_is_taken(form: Form, content: Any) -> None:
    for role in ("user", "assistant"):
        assert form.turns(ASKED, SAID, {"role": role, "content": content}, SAID, ASKED)
    assert form.turns(ASKED, {"role": "assistant"}, ASKED)


@every_dialect
@pytest.mark.parametrize("part", [part for part, _ in UNREADABLE], ids=lambda value: str(value)[:40])
def test_what_is_no_text_is_refused_by_name_in_the_newest_message_alone(form: Form, part: Json) -> None:
    newest = user(text("a"), part)
    error = form.refusal(ASKED, SAID, newest)
    assert (error.code, error.param) == (Code.NOT_SUPPORTED, f"{form.field}[2].content[1]")
    assert f'a part of type "{part["type"]}" is not supported: this ' in error.detail
    assert form.turns(newest, SAID, ASKED)
    assert form.turns(ASKED, newest, {"role": "system", "content": "be"})


@every_dialect
def test_what_an_agent_shows_behind_a_result_is_never_refused(form: Form) -> None:
    """An image cannot stand in a tool's result of every dialect: agents send it as the user's."""
    turns = form.turns(ASKED, form.call(), form.result("see below"), user(UNREADABLE[0][0]))
    assert [turn.text for turn in turns[2:]] == ["see below", IMAGE]


@every_dialect
@pytest.mark.parametrize("content", [5, [5], [{"type": "text"}], [{"x": 1}], True], ids=str)
def test_odd_words_are_refused_in_the_newest_message_alone(form: Form, content: Any) -> None:
    error = form.refusal(ASKED, SAID, {"role": "user", "content": content})
    where = f"{form.field}[2].content" + ("[0]" if isinstance(content, list) else "")
    assert (error.code, error.param) == (Code.BAD_REQUEST, where)
    assert error.detail.startswith(f"{where}: expected text or parts such as")


@every_dialect
def test_an_unknown_role_is_refused_in_the_newest_message_alone(form: Form) -> None:
    told = {"role": "critic", "content": "too long"}
    error = form.refusal(ASKED, told)
    assert (error.code, error.param) == (Code.BAD_REQUEST, f"{form.field}[1].role")
    assert form.turns(ASKED, SAID, told, SAID, ASKED)[2] == ChatMessage("user", "[critic]\ntoo long")


def test_images_of_ollama() -> None:
    shown = {"role": "user", "content": "see", "images": [PNG, PNG]}
    assert OLLAMA.turns(shown, SAID, ASKED)[0].text == f"see\n{IMAGE}\n{IMAGE}"
    assert OLLAMA.refusal(SAID, shown).param == "messages[1].images"
    assert OLLAMA.turns(ASKED, chat_call(), chat_result("a") | {"images": [PNG]})[-1].text == f"a\n{IMAGE}"


@every_dialect
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": 1}', '{"a": 1}'), ({"a": "é"}, '{"a": "é"}'), (None, "{}"), ("", "{}"), (" ", "{}"),
        ('{"a": ', '{"a":'), ("[1]", "[1]"), ([1], "[1]"), (5, "5"), ("no JSON", "no JSON"), ("NaN", "NaN"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_go_to_the_prompt_as_the_model_wrote_them(form: Form, arguments: Any, text: str) -> None:
    turns = form.turns(ASKED, form.call(arguments), form.result("x"))
    [call] = turns[1].calls
    assert (call.name, call.arguments.strip()) == ("f", text)
    assert (turns[2].call_id, turns[2].name) == (call.id, "f")


@every_dialect
@pytest.mark.parametrize("name", [None, ""])
def test_a_call_without_a_name_is_taken(form: Form, name: str | None) -> None:
    turns = form.turns(ASKED, form.call("{}", name), form.result("x"))
    assert [call.name for call in turns[1].calls] == [""]
    assert turns[2].text == "x"


@every_dialect
@pytest.mark.parametrize("id_", ["gone", None, ""])
def test_a_result_whose_call_was_cut_away_is_taken(form: Form, id_: str | None) -> None:
    turns = form.turns(ASKED, form.result("x", id_), ASKED)
    assert turns[1] == ChatMessage("tool", "x", call_id=id_ or "")


@pytest.mark.parametrize("role", ["function", "ipython", "observation", "tool"])
@every_dialect
def test_results_under_other_roles(form: Form, role: str) -> None:
    assert form.turns(ASKED, {"role": role, "content": "x"}, ASKED)[1] == ChatMessage("tool", "x")


CALLED = {"name": "f", "arguments": "{}"}
LISTED = '{"type": "exec", "command": ["ls"]}'
DELETED = '{"type": "delete_file", "path": "a"}'


def called(arguments: str = "{}", name: str = "f", id_: str = "c") -> ChatMessage:
    return ChatMessage("assistant", "", calls=(Call(id_, name, arguments),))


def returned(words: str, id_: str = "c", name: str = "f") -> ChatMessage:
    return ChatMessage("tool", words, call_id=id_, name=name)


OLDER = [
    {"role": "assistant", "content": None, "function_call": CALLED},
    {"role": "function", "name": "f", "content": "x"},
]
BUILTIN = chat_calls(
    None, {"id": "c", "index": 0, "type": "builtin_function", "function": CALLED}, {"id": "d"}
) | {"function_call": None}
REFUSED = SAID | {"tool_calls": [], "refusal": "but no", "audio": None, "name": "me", "annotations": []}
SPOKEN = SAID | {"content": None, "refusal": None, "audio": {"id": "a", "transcript": "s"}}
UNSPOKEN = {"role": "assistant", "audio": {"id": "a"}}
FAILED = user(part("tool_result", tool_use_id="c", is_error=True, content=None), UNREADABLE[1][0])
SHOWN = ChatMessage("user", f"{IMAGE}\nhello")
FOUND = assistant(SEARCHED, web(part("web_search_result", title="T", url="u")), text("Found."))
SHELL = part("local_shell_call", call_id="c", status="completed", action=json.loads(LISTED))
PATCH = part("apply_patch_call", call_id="c", operation=json.loads(DELETED))
PATCHED = part("apply_patch_call_output", call_id="c", status="failed")
SCREEN = part("computer_call_output", call_id="c", output=UNREADABLE[4][0])
LOCAL, APPLY = "local_shell", "apply_patch"
CUSTOM = chat_calls({"id": "c", "type": "custom", "custom": {"name": "f"}})
NAMELESS = part("custom_tool_call", call_id="c", name="", input=None)
CUT, OPEN = function_call('{"a') | {"status": "incomplete"}, function_call() | {"status": "in_progress"}


@pytest.mark.parametrize(
    ("form", "messages", "expected"),
    [
        (CHAT, OLDER, [called(id_=""), returned("x", "")]),
        (CHAT, [BUILTIN], [ChatMessage("assistant", "", calls=(*called().calls, Call("d", "", "{}")))]),
        (CHAT, [CUSTOM], [called('{"input": ""}')]),
        (CHAT, [REFUSED], [ChatMessage("assistant", "hi\nbut no")]),
        (CHAT, [SPOKEN], [ChatMessage("assistant", "s")]),
        (CHAT, [UNSPOKEN], [ChatMessage("assistant", AUDIO)]),
        (MESSAGES, [FOUND], [ChatMessage("assistant", '[web_search {"query": "x"}]\nT\nu\nFound.')]),
        (MESSAGES, [tool_use({}), FAILED], [called(), returned("Error: "), SHOWN]),
        (RESPONSES, [call_output("x", "z") | {"name": "f"}], [returned("x", "z")]),
        (RESPONSES, [CUT, call_output("no JSON")], [called('{"a'), returned("no JSON")]),
        (RESPONSES, [OPEN, call_output("x")], [called(), returned("x")]),
        (RESPONSES, [SHELL, call_output("x")], [called(LISTED, LOCAL), returned("x", name=LOCAL)]),
        (RESPONSES, [PATCH, PATCHED], [called(DELETED, APPLY), returned("failed", name=APPLY)]),
        (RESPONSES, [SCREEN], [returned(IMAGE, name="")]),
        (RESPONSES, [NAMELESS], [called('{"input": ""}', "")]),
    ],
)
def test_forms_of_one_dialect(form: Form, messages: list[Any], expected: list[ChatMessage]) -> None:
    first, *turns = form.turns(ASKED, *messages, ASKED)
    assert first.text == "hello"
    assert turns[: len(expected)] == expected


INTERPRETED = part("code_interpreter_call", code="1+1", outputs=[part("logs", logs="2")])


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (part("hologram", content=[part("output_text", text="x")]), "x"),
        (part("mcp_call", name="n", arguments='{"a": 1}', output="found"), '[n {"a": 1}]\nfound'),
        (INTERPRETED, "[code_interpreter 1+1]\n2"),
        (part("file_search_call", queries=["q"], results=[{"text": "found"}]), '[file_search ["q"]]\nfound'),
        (part("web_search_call", action={"query": "q"}), '[web_search {"query": "q"}]'),
    ],
)
def test_items_of_the_provider_keep_their_words(item: Any, words: str) -> None:
    said = [(turn.role, turn.text) for turn in RESPONSES.turns(ASKED, item, ASKED)]
    assert said == [("user", "hello"), ("assistant", words), ("user", "hello")]


def test_items_that_are_unknown_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    caplog.set_level("INFO", "mlxtp")
    for _ in range(2):
        turns = RESPONSES.turns(ASKED, {"type": "hologram", "size": 3}, ASKED)
        assert [turn.text for turn in turns] == ["hello", "hello"]
    assert [line for line in caplog.messages if "hologram" in line] == caplog.messages
    assert len(caplog.messages) == 1


THOUGHT = part("thinking", thinking="hm")


DETAILS = [part("reasoning.text", text="hm", signature=None), part("reasoning.encrypted", data="x")]
SUMMARY = part("reasoning", summary=[part("summary_text", text="hm")], content=None, encrypted_content="x")
SILENCE = [part("thinking", thinking=None), part("redacted_thinking", data="x")]


@pytest.mark.parametrize(
    ("form", "messages", "thought"),
    [
        (CHAT, [SAID | {"reasoning_content": "hm"}], "hm"),
        (CHAT, [SAID | {"reasoning_content": [text("hm")]}], "hm"),
        (CHAT, [SAID | {"reasoning_content": "", "reasoning": {"content": "hm"}}], "hm"),
        (CHAT, [SAID | {"reasoning": {"effort": "low"}, "reasoning_details": DETAILS}], "hm"),
        (CHAT, [SAID | {"reasoning_details": [part("reasoning.summary", summary="hm")]}], "hm"),
        (CHAT, [SAID | {"thinking_blocks": [THOUGHT | {"signature": "s"}]}], "hm"),
        (CHAT, [assistant(part("thinking", thinking=[text("hm")]), text("hi"))], "hm"),
        (CHAT, [SAID | {"reasoning_content": None, "reasoning": [], "reasoning_details": None}], ""),
        (MESSAGES, [assistant(THOUGHT | {"signature": "EqQB"}, text("hi"))], "hm"),
        (MESSAGES, [assistant(THOUGHT, text("hi"))], "hm"),
        (MESSAGES, [assistant(*SILENCE, text("hi"))], ""),
        (RESPONSES, [part("reasoning", content=[part("reasoning_text", text="hm")]), SAID], "hm"),
        (RESPONSES, [SUMMARY, SAID], "hm"),
        (RESPONSES, [part("reasoning", summary="hm", content=[]), SAID], "hm"),
        (RESPONSES, [part("reasoning", summary=None, encrypted_content="x"), SAID], ""),
        (OLLAMA, [SAID | {"thinking": "hm"}], "hm"),
        (OLLAMA, [SAID | {"thinking": ["hm"]}], "hm"),
        (OLLAMA, [SAID | {"thinking": None}], ""),
    ],
)
def test_thoughts_come_back_in_any_form(form: Form, messages: list[Any], thought: str) -> None:
    assert form.turns(ASKED, *messages, ASKED)[1] == ChatMessage("assistant", "hi", thought)


NUMBERS = {"n": 2.0, "seed": 3.0, "top_k": 5.0, "min_tokens": 1.0, "logprobs": True, "top_logprobs": 2.0}
INCLUDED = {"top_logprobs": 2.0, "include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        (CHAT, {"max_tokens": 40.0} | NUMBERS),
        (CHAT, {"max_completion_tokens": 5.0}),
        (MESSAGES, {"max_tokens": 40.0, "top_k": 5.0, "thinking": part("enabled", budget_tokens=1024.0)}),
        (RESPONSES, {"max_output_tokens": 40.0, "seed": 3.0, "max_tool_calls": 3.0} | INCLUDED),
        (OLLAMA, {"options": {"num_predict": 40.0, "num_ctx": 4096.0, "seed": 3.0, "top_k": 5.0}}),
    ],
)
def test_a_whole_float_is_an_integer(form: Form, fields: Json) -> None:
    def asked(fields: Json) -> GenerationRequest:
        return form.parse(json.dumps(form.body([ASKED], **fields)).encode())

    whole: Json = json.loads(json.dumps(fields), parse_float=lambda text: int(float(text)))
    assert asked(fields).options == asked(whole).options


FUNCTION: Json = {"name": "f", "parameters": {"type": "object"}}
OFFERED = {CHAT: [{"type": "function", "function": FUNCTION}], RESPONSES: [{"type": "function", **FUNCTION}]}


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "auto"}, "auto"), ({"type": "none"}, "none"), ({"type": "required"}, "required"),
        ({"type": "any"}, "required"), ("any", "required"), ({"type": "tool", "name": "f"}, "f"),
        ({"type": "function", "name": "f"}, "f"), ({"type": "function", "function": {"name": "f"}}, "f"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("form", [CHAT, RESPONSES], ids=["chat", "responses"])
def test_a_choice_in_the_words_of_another_dialect(form: Form, choice: Any, meant: str) -> None:
    assert form.conversation([ASKED], tools=OFFERED[form], tool_choice=choice).tool_choice == meant
    if meant in ("auto", "none"):
        assert form.conversation([ASKED], tool_choice=choice).tool_choice in ("auto", meant)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("form", [CHAT, RESPONSES], ids=["chat", "responses"])
def test_a_choice_among_some_tools(form: Form, mode: str) -> None:
    other = json.loads(json.dumps(OFFERED[form]).replace('"f"', '"g"'))
    for allowed in OFFERED.values():
        inner = {"mode": mode, "tools": allowed}
        for choice in ({"type": "allowed_tools", **inner}, {"type": "allowed_tools", "allowed_tools": inner}):
            found = form.conversation([ASKED], tools=[*OFFERED[form], *other], tool_choice=choice)
            assert (found.tool_choice, [tool.name for tool in found.tools]) == (mode, ["f"])


def function(**fields: Any) -> Json:
    return part("function", name="f", **fields)


NULLABLE = {"type": ["object", "null"]}


@pytest.mark.parametrize(
    ("form", "tool", "parameters"),
    [
        (MESSAGES, {"name": "f"}, None),
        (MESSAGES, {"name": "f", "input_schema": {"properties": {}}}, {"properties": {}}),
        (MESSAGES, {"name": "f", "input_schema": True}, {}),
        (RESPONSES, function(), None),
        (RESPONSES, function(parameters=None), None),
        (RESPONSES, function(parameters=NULLABLE), NULLABLE),
        (RESPONSES, function(parameters={"type": None}), {"type": None}),
        (CHAT, part("function", function={"name": "f"}), None),
        (CHAT, part("function", function={"name": "f", "parameters": []}), {}),
    ],
)
def test_a_schema_that_says_less(form: Form, tool: Json, parameters: Json | None) -> None:
    assert form.conversation([ASKED], tools=[tool]).tools == (Tool("f", "", parameters),)


def test_a_tool_of_a_namespace_has_its_whole_name_as_an_alias() -> None:
    group = part("namespace", name="a", tools=[function(), function() | {"name": "g"}])
    tools = RESPONSES.conversation([ASKED], tools=[group, function() | {"name": "g"}]).tools
    assert [(tool.name, tool.aliases) for tool in tools] == [("f", ("a__f",)), ("a__g", ()), ("g", ())]
    assert ClientTool("f").function("f").aliases == ()


TEXTS = st.text(max_size=3)
ARGUMENTS = st.sampled_from(["", "{}", '{"a": "é"}', '{"a": ', "[1]", '"x"', "NaN", '{"a": NaN}', "no JSON"])
SEGMENTS = st.one_of(
    st.tuples(st.just("think"), TEXTS),
    st.tuples(st.just("say"), TEXTS),
    st.tuples(st.just("call"), ARGUMENTS),
)


def whole_of(segments: Sequence[tuple[str, str]], reason: Any) -> WholeAnswer:
    whole, calls = WholeAnswer(), 0
    for kind, text in segments:
        match kind:
            case "think":
                whole.see(ReasoningDelta(0, text))
            case "say":
                whole.see(ContentDelta(0, text))
            case _:
                whole.see(CallBegan(0, calls, f"id{calls}", "f"))
                whole.see(CallArguments(0, calls, text))
                calls += 1
    whole.see(Finish(0, reason, StreamEnd("length" if reason == "length" else "stop", 9)))
    return whole


ADAPTERS: list[tuple[Form, Any, Callable[[Json], list[Json]]]] = [
    (CHAT, OpenAIChat(), lambda body: [body["choices"][0]["message"]]),
    (MESSAGES, ANTHROPIC, lambda body: [assistant(*body["content"])]),
    (OLLAMA, Ollama(), lambda body: [body["message"]]),
    (RESPONSES, Responses(), lambda body: body["output"]),
]


@pytest.mark.parametrize(("form", "adapter", "messages_of"), ADAPTERS)
@given(segments=st.lists(SEGMENTS, max_size=5), reason=st.sampled_from(["stop", "length", "tool_calls"]))
def test_an_answer_that_comes_back_is_taken(
    form: Form, adapter: Any, messages_of: Any, segments: list[tuple[str, str]], reason: Any
) -> None:
    ask = form.parse(json.dumps(form.body([ASKED])).encode())
    about = About("0" * 32, 0.0, "m", (3,), (), lambda _: ("x", [120]), ask)
    answer = messages_of(adapter.whole(about, [whole_of(segments, reason)]))
    count = sum(kind == "call" for kind, _ in segments)
    results = [form.result("x", f"id{number}") for number in range(count)]
    turns = form.turns(ASKED, *answer, *results, ASKED)
    assert sum(turn.role == "tool" for turn in turns) == count
    said = [text.strip() for kind, text in segments if kind == "say"]
    assert all(any(text in turn.text for turn in turns) for text in said)


@every_dialect
def test_history_with_all_of_this_is_answered(roomy: Server, form: Form) -> None:
    parts = [part for part, _ in (*UNREADABLE, *READABLE)] + SILENT
    said = [assistant(*parts), user(*parts), {"role": "critic", "content": parts}]
    calls = [form.call('{"a": '), form.result(parts), form.call(None, None), form.result(None, "gone")]
    body = form.body([ASKED, *said, *calls, ASKED])
    answer = httpx.post(roomy.url + form.path, json=body, timeout=WAIT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert "hello" in answer.text
