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

from mlxtp.api.adapter import About, AnswerWriter
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
from mlxtp.text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    WholeAnswer,
)

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


def chat_call(arguments: Any = "{}", name: Any = "f") -> Json:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": name, "arguments": arguments}}],
    }


def tool_use(arguments: Any = "{}", name: Any = "f") -> Json:
    use = {"type": "tool_use", "id": "c", "name": name, "input": arguments}
    return {"role": "assistant", "content": [use]}


def function_call(arguments: Any = "{}", name: Any = "f") -> Json:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": arguments}


def chat_result(content: Any, id_: str | None = "c") -> Json:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def tool_result(content: Any, id_: str | None = "c") -> Json:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id_, "content": content}]}


def call_output(content: Any, id_: str | None = "c") -> Json:
    return {"type": "function_call_output", "call_id": id_, "output": content}


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


# --- parts of messages ------------------------------------------------------------------------------------


def note(kind: str, kinds: str = "") -> str:
    reader = "server" if kinds == "such blocks" else "model"
    kinds = kinds or {"document": "documents but text"}.get(kind, f"{kind}s")
    return f"[{kind} left out: this {reader} reads no {kinds}]"


def in_base64(text: str) -> str:
    return b64encode(text.encode()).decode()


IMAGE, AUDIO, DOCUMENT = note("image"), note("audio", "audio"), note("document")
PNG, PDF = "iVBORw0KGgo=", "JVBERi0="


def document(**source: Any) -> Json:
    return {"type": "document", "source": source}


def web(*found: Json) -> Json:
    return {"type": "web_search_tool_result", "tool_use_id": "s", "content": [*found]}


RUN = {"type": "code_execution_result", "stdout": "out", "stderr": "err", "return_code": 1, "content": []}
UNREADABLE: list[tuple[Json, str]] = [
    ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, IMAGE),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, IMAGE),
    ({"type": "image", "data": PNG, "mimeType": "image/png"}, IMAGE),
    ({"type": "input_image", "image_url": "https://x.org/a.png", "detail": "auto"}, IMAGE),
    ({"type": "computer_screenshot", "image_url": "u"}, IMAGE),
    ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, AUDIO),
    ({"type": "video_url", "video_url": {"url": "u"}}, note("video")),
    (
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}", "filename": "a.pdf"}},
        DOCUMENT,
    ),
    ({"type": "input_file", "file_data": PDF}, DOCUMENT),
    ({"type": "input_file", "file_id": "file-1"}, DOCUMENT),
    (document(type="base64", media_type="application/pdf", data=PDF), DOCUMENT),
    (document(type="url", url="https://x.org/a.pdf"), DOCUMENT),
    (document(type="base64", media_type="application/pdf", data=PDF) | {"title": "A"}, f"A\n{DOCUMENT}"),
    ({"type": "resource", "resource": {"uri": "file:///a", "blob": PNG}}, DOCUMENT),
    ({"type": "hologram", "x": 1}, note('block of type "hologram"', "such blocks")),
    ({"type": "container_upload", "file_id": "f"}, note('block of type "container_upload"', "such blocks")),
]
READABLE: list[tuple[Any, str]] = [
    ({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}, "a"),
    ({"type": "input_text", "text": "a"}, "a"),
    ({"type": "output_text", "text": "a", "annotations": [], "logprobs": []}, "a"),
    ({"text": "a"}, "a"),
    ("a", "a"),
    ({"type": "refusal", "refusal": "no"}, "no"),
    ({"type": "output_audio", "data": "x", "transcript": "spoken"}, "spoken"),
    (
        document(type="text", media_type="text/plain", data="abc") | {"title": "T", "context": "C"},
        "T\nC\nabc",
    ),
    (document(type="content", content="abc"), "abc"),
    (
        document(type="content", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        "a\nb",
    ),
    (document(type="base64", media_type="text/csv", data=in_base64("a,ü")), "a,ü"),
    ({"type": "file", "file": {"file_data": f"data:text/plain;base64,{in_base64('abc')}"}}, "abc"),
    ({"type": "input_file", "file_data": "plain words", "filename": "a.txt"}, "plain words"),
    ({"type": "input_file", "file_data": in_base64("abc\n")}, "abc\n"),
    (
        {
            "type": "search_result",
            "title": "T",
            "source": "https://x.org",
            "content": [{"type": "text", "text": "a"}],
        },
        "T\nhttps://x.org\na",
    ),
    ({"type": "tool_reference", "tool_name": "weather"}, "weather"),
    (web({"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "e"}), "T\nu"),
    (
        web() | {"content": {"type": "web_search_tool_result_error", "error_code": "unavailable"}},
        "unavailable",
    ),
    (
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s",
            "content": {
                "type": "web_fetch_result",
                "url": "u",
                "content": document(type="text", media_type="text/plain", data="page"),
            },
        },
        "u\npage",
    ),
    ({"type": "code_execution_tool_result", "tool_use_id": "s", "content": RUN}, "out\nerr"),
    ({"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {"a": 1}}, '[n {"a": 1}]'),
    (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        '[web_search {"query": "x"}]',
    ),
    ({"type": "error-text", "value": "no"}, "no"),
    ({"type": "json", "value": {"a": 1}}, '{"a": 1}'),
    ({"type": "hologram", "text": "abc"}, "abc"),
    ({"type": "error", "message": "no"}, "no"),
    (
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m",
            "is_error": False,
            "content": [{"type": "text", "text": "a"}],
        },
        "a",
    ),
    ({"type": "resource", "resource": {"uri": "file:///a", "text": "abc"}}, "abc"),
    ({"type": "resource_link", "name": "a", "uri": "file:///a"}, "a\nfile:///a"),
    ({"type": "compaction", "content": "all"}, "[Summary of the conversation so far]\nall"),
    ({"type": "hologram", "content": "abc"}, "abc"),
]
SILENT: list[Any] = [
    None,
    {"type": "text", "text": None},
    {"type": "text"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "compaction", "content": None},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
]


@every_dialect
@pytest.mark.parametrize(
    ("part", "words"),
    [*UNREADABLE, *READABLE, *((part, "") for part in SILENT)],
    ids=lambda value: str(value)[:40],
)
def test_a_part_of_history_in_words(form: Form, part: Any, words: str) -> None:
    beside = {"type": "text", "text": "beside"}
    expected = "\n".join(filter(None, [words, "beside"]))
    content = [part, beside]
    assert form.turns({"role": "user", "content": content}, SAID, ASKED)[0].text == expected
    assert form.turns(ASKED, {"role": "assistant", "content": content}, ASKED)[1].text == expected
    turns = form.turns(ASKED, form.call(), form.result(content))
    assert [turn.text for turn in turns if turn.role == "tool"] == [expected]


@every_dialect
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ""), ("", ""), ([], ""), ("a", "a"), (5, "5"), (True, "true"), (2.5, "2.5"),
        ({"a": 1}, '{"a": 1}'), ([1, "é"], '[1, "é"]'), ([{"a": 1}, {"b": 2}], '{"a": 1}\n{"b": 2}'),
        ({"type": "text", "text": "a"}, "a"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_tool_returned_in_words(form: Form, content: Any, words: str) -> None:
    *_, result = form.turns(ASKED, form.call(), form.result(content))
    assert result == ChatMessage(
        "tool", words, call_id="c" if form is not OLLAMA else result.call_id, name="f"
    )


@every_dialect
@pytest.mark.parametrize("content", [None, "", [], [None], 5, {"a": 1}], ids=str)
def test_a_message_of_history_without_words_is_taken(form: Form, content: Any) -> None:
    for role in ("user", "assistant"):
        assert form.turns(ASKED, SAID, {"role": role, "content": content}, SAID, ASKED)
    assert form.turns(ASKED, {"role": "assistant"}, ASKED)


# --- the newest message -----------------------------------------------------------------------------------


@every_dialect
@pytest.mark.parametrize("part", [part for part, _ in UNREADABLE], ids=lambda value: str(value)[:40])
def test_what_is_no_text_is_refused_by_name_in_the_newest_message_alone(form: Form, part: Json) -> None:
    newest = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
    error = form.refusal(ASKED, SAID, newest)
    assert (error.code, error.param) == (Code.NOT_SUPPORTED, f"{form.field}[2].content[1]")
    assert f'a part of type "{part["type"]}" is not supported: this ' in error.detail
    assert form.turns(newest, SAID, ASKED)
    assert form.turns(ASKED, newest, {"role": "system", "content": "be"})


@every_dialect
def test_what_an_agent_shows_behind_a_result_is_never_refused(form: Form) -> None:
    """An image cannot stand in a tool's result of every dialect: agents send it as the user's."""
    shown = {"role": "user", "content": [UNREADABLE[0][0]]}
    turns = form.turns(ASKED, form.call(), form.result("see below"), shown)
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


# --- calls and their results ------------------------------------------------------------------------------


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
F = (Call("c", "f", "{}"),)


@pytest.mark.parametrize(
    ("form", "messages", "expected"),
    [
        (
            CHAT,
            [
                {"role": "assistant", "content": None, "function_call": CALLED},
                {"role": "function", "name": "f", "content": "x"},
            ],
            [ChatMessage("assistant", "", calls=(Call("", "f", "{}"),)), ChatMessage("tool", "x", name="f")],
        ),
        (
            CHAT,
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        None,
                        {"id": "c", "index": 0, "type": "builtin_function", "function": CALLED},
                        {"id": "d"},
                    ],
                    "function_call": None,
                }
            ],
            [ChatMessage("assistant", "", calls=(*F, Call("d", "", "{}")))],
        ),
        (
            CHAT,
            [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f"}}]}],
            [ChatMessage("assistant", "", calls=(Call("c", "f", '{"input": ""}'),))],
        ),
        (
            CHAT,
            [SAID | {"tool_calls": [], "refusal": "but no", "audio": None, "name": "me", "annotations": []}],
            [ChatMessage("assistant", "hi\nbut no")],
        ),
        (
            CHAT,
            [
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "audio": {"id": "a", "transcript": "s"},
                },
                ASKED,
                {"role": "assistant", "audio": {"id": "a"}},
            ],
            [ChatMessage("assistant", "s"), ChatMessage("user", "hello"), ChatMessage("assistant", AUDIO)],
        ),
        (
            MESSAGES,
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                        web({"type": "web_search_result", "title": "T", "url": "u"}),
                        {"type": "text", "text": "Found."},
                    ],
                }
            ],
            [ChatMessage("assistant", '[web_search {"query": "x"}]\nT\nu\nFound.')],
        ),
        (
            MESSAGES,
            [
                tool_use({}),
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": None},
                        UNREADABLE[1][0],
                    ],
                },
            ],
            [
                ChatMessage("assistant", "", calls=F),
                ChatMessage("tool", "Error: ", call_id="c", name="f"),
                ChatMessage("user", f"{IMAGE}\nhello"),
            ],
        ),
        (
            RESPONSES,
            [{"type": "function_call_output", "call_id": "z", "name": "f", "output": "x"}],
            [ChatMessage("tool", "x", call_id="z", name="f")],
        ),
        (
            RESPONSES,
            [function_call('{"a') | {"status": "incomplete"}, call_output("no JSON")],
            [
                ChatMessage("assistant", "", calls=(Call("c", "f", '{"a'),)),
                ChatMessage("tool", "no JSON", call_id="c", name="f"),
            ],
        ),
        (
            RESPONSES,
            [function_call() | {"status": "in_progress"}, call_output("x")],
            [ChatMessage("assistant", "", calls=F), ChatMessage("tool", "x", call_id="c", name="f")],
        ),
        (
            RESPONSES,
            [
                {
                    "type": "local_shell_call",
                    "call_id": "c",
                    "status": "completed",
                    "action": {"type": "exec", "command": ["ls"]},
                },
                call_output("x"),
            ],
            [
                ChatMessage(
                    "assistant", "", calls=(Call("c", "local_shell", '{"type": "exec", "command": ["ls"]}'),)
                ),
                ChatMessage("tool", "x", call_id="c", name="local_shell"),
            ],
        ),
        (
            RESPONSES,
            [
                {
                    "type": "apply_patch_call",
                    "call_id": "c",
                    "operation": {"type": "delete_file", "path": "a"},
                },
                {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
            ],
            [
                ChatMessage(
                    "assistant", "", calls=(Call("c", "apply_patch", '{"type": "delete_file", "path": "a"}'),)
                ),
                ChatMessage("tool", "failed", call_id="c", name="apply_patch"),
            ],
        ),
        (
            RESPONSES,
            [{"type": "computer_call_output", "call_id": "c", "output": UNREADABLE[4][0]}],
            [ChatMessage("tool", IMAGE, call_id="c")],
        ),
        (
            RESPONSES,
            [{"type": "custom_tool_call", "call_id": "c", "name": "", "input": None}],
            [ChatMessage("assistant", "", calls=(Call("c", "", '{"input": ""}'),))],
        ),
    ],
)
def test_forms_of_one_dialect(form: Form, messages: list[Any], expected: list[ChatMessage]) -> None:
    first, *turns = form.turns(ASKED, *messages, ASKED)
    assert first.text == "hello"
    assert turns[: len(expected)] == expected


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "hologram", "content": [{"type": "output_text", "text": "x"}]}, "x"),
        (
            {"type": "mcp_call", "name": "n", "arguments": '{"a": 1}', "output": "found"},
            '[n {"a": 1}]\nfound',
        ),
        (
            {"type": "code_interpreter_call", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
            "[code_interpreter 1+1]\n2",
        ),
        (
            {"type": "file_search_call", "queries": ["q"], "results": [{"text": "found"}]},
            '[file_search ["q"]]\nfound',
        ),
        ({"type": "web_search_call", "action": {"query": "q"}}, '[web_search {"query": "q"}]'),
    ],
)
def test_items_of_the_provider_keep_their_words(item: Any, words: str) -> None:
    turns = RESPONSES.turns(ASKED, item, ASKED)
    assert [(turn.role, turn.text) for turn in turns] == [
        ("user", "hello"),
        ("assistant", words),
        ("user", "hello"),
    ]


def test_items_that_are_unknown_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    caplog.set_level("INFO", "mlxtp")
    for _ in range(2):
        turns = RESPONSES.turns(ASKED, {"type": "hologram", "size": 3}, ASKED)
        assert [turn.text for turn in turns] == ["hello", "hello"]
    assert [line for line in caplog.messages if "hologram" in line] == caplog.messages
    assert len(caplog.messages) == 1


# --- thoughts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "messages"),
    [
        (CHAT, [SAID | {"reasoning_content": "hm"}]),
        (CHAT, [SAID | {"reasoning_content": [{"type": "text", "text": "hm"}]}]),
        (CHAT, [SAID | {"reasoning_content": "", "reasoning": {"content": "hm"}}]),
        (
            CHAT,
            [
                SAID
                | {
                    "reasoning": {"effort": "low"},
                    "reasoning_details": [
                        {"type": "reasoning.text", "text": "hm", "signature": None},
                        {"type": "reasoning.encrypted", "data": "x"},
                    ],
                }
            ],
        ),
        (CHAT, [SAID | {"reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}]}]),
        (CHAT, [SAID | {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}]),
        (
            CHAT,
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                        {"type": "text", "text": "hi"},
                    ],
                }
            ],
        ),
        *[
            (MESSAGES, [{"role": "assistant", "content": [thought, {"type": "text", "text": "hi"}]}])
            for thought in (
                {"type": "thinking", "thinking": "hm", "signature": "EqQB"},
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "thinking", "thinking": "hm"},
            )
        ],
        (RESPONSES, [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}, SAID]),
        (
            RESPONSES,
            [
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "hm"}],
                    "content": None,
                    "encrypted_content": "x",
                },
                SAID,
            ],
        ),
        (RESPONSES, [{"type": "reasoning", "summary": "hm", "content": []}, SAID]),
        (OLLAMA, [SAID | {"thinking": "hm"}]),
        (OLLAMA, [SAID | {"thinking": ["hm"]}]),
    ],
)
def test_thoughts_come_back_in_any_form(form: Form, messages: list[Any]) -> None:
    assert form.turns(ASKED, *messages, ASKED)[1] == ChatMessage("assistant", "hi", "hm")


@pytest.mark.parametrize(
    ("form", "messages"),
    [
        (CHAT, [SAID | {"reasoning_content": None, "reasoning": [], "reasoning_details": None}]),
        (MESSAGES, [{"role": "assistant", "content": [
            {"type": "thinking", "thinking": None}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "hi"}]}]),
        (RESPONSES, [{"type": "reasoning", "summary": None, "encrypted_content": "x"}, SAID]),
        (OLLAMA, [SAID | {"thinking": None}]),
    ],
)  # fmt: skip
def test_thoughts_without_words(form: Form, messages: list[Any]) -> None:
    assert form.turns(ASKED, *messages, ASKED)[1] == ChatMessage("assistant", "hi")


# --- settings as clients write them -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        (
            CHAT,
            {
                "max_tokens": 40.0,
                "n": 2.0,
                "seed": 3.0,
                "top_k": 5.0,
                "min_tokens": 1.0,
                "logprobs": True,
                "top_logprobs": 2.0,
            },
        ),
        (CHAT, {"max_completion_tokens": 5.0}),
        (
            MESSAGES,
            {"max_tokens": 40.0, "top_k": 5.0, "thinking": {"type": "enabled", "budget_tokens": 1024.0}},
        ),
        (
            RESPONSES,
            {
                "max_output_tokens": 40.0,
                "top_logprobs": 2.0,
                "seed": 3.0,
                "max_tool_calls": 3.0,
                "include": ["message.output_text.logprobs"],
            },
        ),
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


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("form", [CHAT, RESPONSES], ids=["chat", "responses"])
def test_a_choice_among_some_tools(form: Form, mode: str) -> None:
    other = json.loads(json.dumps(OFFERED[form]).replace('"f"', '"g"'))
    for allowed in OFFERED.values():
        inner = {"mode": mode, "tools": allowed}
        for choice in ({"type": "allowed_tools", **inner}, {"type": "allowed_tools", "allowed_tools": inner}):
            found = form.conversation([ASKED], tools=[*OFFERED[form], *other], tool_choice=choice)
            assert (found.tool_choice, [tool.name for tool in found.tools]) == (mode, ["f"])


@every_dialect
@pytest.mark.parametrize("word", ["auto", "none"])
def test_a_choice_without_tools_asks_for_nothing(form: Form, word: str) -> None:
    assert form.conversation([ASKED], tool_choice={"type": word}).tool_choice in ("auto", word)


@pytest.mark.parametrize(
    ("form", "tool", "parameters"),
    [
        (MESSAGES, {"name": "f"}, None), (MESSAGES, {"name": "f", "input_schema": None}, None),
        (MESSAGES, {"name": "f", "input_schema": {"properties": {}}}, {"properties": {}}),
        (RESPONSES, {"type": "function", "name": "f"}, None),
        (RESPONSES, {"type": "function", "name": "f", "parameters": None}, None),
        (RESPONSES, {"type": "function", "name": "f", "parameters": {"type": ["object", "null"]}},
         {"type": ["object", "null"]}),
        (RESPONSES, {"type": "function", "name": "f", "parameters": {"type": None}}, {"type": None}),
        (CHAT, {"type": "function", "function": {"name": "f"}}, None),
        (CHAT, {"type": "function", "function": {"name": "f", "parameters": []}}, {}),
        (MESSAGES, {"name": "f", "input_schema": True}, {}),
        (CHAT, {"type": "function", "function": {"name": "f", "parameters": {"type": ["object", "null"]}}},
         {"type": ["object", "null"]}),
    ],
)  # fmt: skip
def test_a_schema_that_says_less(form: Form, tool: Json, parameters: Json | None) -> None:
    assert form.conversation([ASKED], tools=[tool]).tools == (Tool("f", "", parameters),)


def test_a_tool_of_a_namespace_has_its_whole_name_as_an_alias() -> None:
    group = {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": name} for name in "fg"]}
    tools = RESPONSES.conversation([ASKED], tools=[group, {"type": "function", "name": "g"}]).tools
    assert [(tool.name, tool.aliases) for tool in tools] == [("f", ("a__f",)), ("a__g", ()), ("g", ())]
    assert ClientTool("f").function("f").aliases == ()


# --- answers that come back -------------------------------------------------------------------------------

TEXTS = st.text(max_size=3)
ARGUMENTS = st.sampled_from(["", "{}", '{"a": "é"}', '{"a": ', "[1]", '"x"', "NaN", '{"a": NaN}', "no JSON"])
SEGMENTS = st.one_of(
    st.tuples(st.just("think"), TEXTS),
    st.tuples(st.just("say"), TEXTS),
    st.tuples(st.just("call"), ARGUMENTS),
)


def events_of(segments: Sequence[tuple[str, str]], reason: Any) -> list[AnswerEvent]:
    """Return the events of an answer; a call's arguments come in two pieces."""
    events: list[AnswerEvent] = []
    calls = 0
    for kind, text in segments:
        match kind:
            case "think":
                events.append(ReasoningDelta(0, text))
            case "say":
                events.append(ContentDelta(0, text))
            case _:
                events += [CallBegan(0, calls, f"id{calls}", "f"), CallArguments(0, calls, text[:2])]
                events.append(CallArguments(0, calls, text[2:]))
                calls += 1
    return [*events, Finish(0, reason, StreamEnd("length" if reason == "length" else "stop", 9))]


def written(writer: AnswerWriter, events: Sequence[AnswerEvent]) -> list[Json]:
    """Return the JSON of each event or line of a stream."""
    parts = [writer.open(), writer.begin(), *map(writer.write, events), writer.close()]
    rows = b"".join(parts).decode().splitlines()
    data = [row.removeprefix("data: ") for row in rows if row.startswith(("data: {", "{"))]
    return [json.loads(row) for row in data]


def whole_of(events: Sequence[AnswerEvent]) -> WholeAnswer:
    whole = WholeAnswer()
    for event in events:
        whole.see(event)
    assert whole.finish is not None
    return whole


def chat_message(chunks: Sequence[Json]) -> Json:
    """Put a streamed message together as clients do: by fields, calls by their numbers."""
    message: Json = {"role": "assistant", "content": None, "tool_calls": []}
    for chunk in chunks:
        for key, value in chunk["choices"][0]["delta"].items():
            if key == "tool_calls":
                for call in value:
                    if "id" in call:
                        message["tool_calls"].append(call)
                    else:
                        message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"][
                            "arguments"
                        ]
            elif key != "role":
                message[key] = (message.get(key) or "") + value
    return message


def block_message(events: Sequence[Json]) -> Json:
    """Put a streamed message together as clients do; an input that is no JSON stays text."""
    blocks: list[Json] = []
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(block | ({"input": ""} if block["type"] == "tool_use" else {}))
            case {"type": "content_block_delta", "index": index, "delta": {"type": _, **delta}}:
                for key, value in delta.items():
                    name = "input" if key == "partial_json" else key
                    blocks[index][name] += value
    return {"role": "assistant", "content": blocks}


def line_message(lines: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for line in lines:
        for key, value in line["message"].items():
            if key != "role":
                message[key] += value
    return message


ADAPTERS: list[tuple[Form, Any, Callable[[Json], list[Json]], Callable[[list[Json]], list[Json]]]] = [
    (CHAT, OpenAIChat(), lambda body: [body["choices"][0]["message"]], lambda rows: [chat_message(rows)]),
    (MESSAGES, ANTHROPIC, lambda body: [{"role": "assistant", "content": body["content"]}],
     lambda rows: [block_message(rows)]),
    (OLLAMA, Ollama(), lambda body: [body["message"]], lambda rows: [line_message(rows)]),
    (RESPONSES, Responses(), lambda body: body["output"], lambda rows: rows[-1]["response"]["output"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "adapter", "of_whole", "of_stream"), ADAPTERS)
@given(segments=st.lists(SEGMENTS, max_size=5), reason=st.sampled_from(["stop", "length", "tool_calls"]))
def test_an_answer_that_comes_back_is_taken(
    form: Form, adapter: Any, of_whole: Any, of_stream: Any, segments: list[tuple[str, str]], reason: Any
) -> None:
    events = events_of(segments, reason)
    ask = form.parse(json.dumps(form.body([ASKED])).encode())
    about = About("0" * 32, 0.0, "m", (3,), (), lambda _: ("x", [120]), ask)
    said = [text.strip() for kind, text in segments if kind == "say"]
    for answer in (
        of_whole(adapter.whole(about, [whole_of(events)])),
        of_stream(written(adapter.writer(about), events)),
    ):
        count = sum(kind == "call" for kind, _ in segments)
        results = [form.result("x", f"id{number}") for number in range(count)]
        turns = form.turns(ASKED, *answer, *results, ASKED)
        assert sum(turn.role == "tool" for turn in turns) == count
        assert all(any(text in turn.text for turn in turns) for text in said)


# --- over HTTP --------------------------------------------------------------------------------------------


@every_dialect
def test_history_with_all_of_this_is_answered(roomy: Server, form: Form) -> None:
    parts = [part for part, _ in (*UNREADABLE, *READABLE)] + SILENT
    messages = [
        ASKED,
        {"role": "assistant", "content": parts},
        {"role": "user", "content": parts},
        {"role": "critic", "content": parts},
        form.call('{"a": '),
        form.result(parts),
        form.call(None, None),
        form.result(None, "gone"),
        ASKED,
    ]
    answer = httpx.post(roomy.url + form.path, json=form.body(messages), timeout=WAIT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert "hello" in answer.text
