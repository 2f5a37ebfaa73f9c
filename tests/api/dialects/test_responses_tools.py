"""The tools that agents offer at `/v1/responses`: the real client library, recorded requests of Codex."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxtp.api.dialects.request_parts import TextReader, text_of
from mlxtp.api.dialects.responses_request import ResponseStore, parse
from mlxtp.errors import RequestError
from mlxtp.text.conversation import Conversation, GenerationRequest
from mlxtp.text.tool_grammar import log_once

from ..conftest import Server, says
from .test_responses import body_of, create, deltas, events_of, http, kinds_of, post, prompts

RECORDINGS = Path(__file__).parent.parent / "recordings"
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.fixture
def agent(thinker: Server) -> Server:
    """A server whose model has room for an agent's prompt."""
    thinker.backend.context = 20_000
    log_once.cache_clear()
    return thinker


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "", "strict": False, "parameters": NOTHING}


def namespace(name: str, *tools: str) -> dict[str, Any]:
    functions = [function(tool) for tool in tools]
    return {"type": "namespace", "name": name, "description": "d", "tools": functions}


def custom(name: str, **format_: str) -> dict[str, Any]:
    return {"type": "custom", "name": name, "description": "edits", "format": format_ or {"type": "text"}}


def said(name: str, arguments: Any, ascii_: bool = False) -> str:
    """A call, as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_)
    return f"<tool_call>\n{call}\n</tool_call>"


def answered(server: Server, stream: bool, words: str, **fields: Any) -> dict[str, Any]:
    """The response whose model says these words, strictly parsed."""
    server.backend.script = says(server.ids(words))
    return body_of(post(server, stream=stream, **fields))


def parsed(**fields: Any) -> GenerationRequest:
    return parse(json.dumps({"input": "hello"} | fields).encode(), ResponseStore(), "")


def offered(ask: GenerationRequest) -> dict[str, Any]:
    assert isinstance(ask.prompt, Conversation)
    return {tool.name: tool for tool in ask.prompt.tools}


SHELL = "exec_command"
AGENTS = ["close_agent", "resume_agent", "send_input", "spawn_agent", "wait_agent"]


@pytest.mark.parametrize(
    ("name", "tools", "ending"),
    [
        (
            "codex",
            [
                SHELL, "write_stdin", "list_mcp_resources", "list_mcp_resource_templates",
                "read_mcp_resource", "request_user_input", "view_image", *AGENTS, "add",
                "mcp__calc__exec_command", "get_goal", "create_goal", "update_goal",
            ],
            'CALL add {"a": 2, "b": 40}',
        ),
        (
            "codex_shell_answered", [SHELL, "view_image", "close_agent", "add", "mcp__calc__exec_command"],
            '!exec_command{"cmd": "echo shell-$((40+2))"}<|tool|>Chunk ID: 6c46d6\nWall time: 0.7124 '
            "seconds\nProcess exited with code 0\nOriginal token count: 17\nOutput:\nshell-42\n",
        ),
        (
            "codex_mcp_answered", [SHELL, "view_image", "close_agent", "add", "mcp__calc__exec_command"],
            '!mcp__calc__exec_command{"x": "y"}<|tool|>Wall time: 0.0173 seconds\nOutput:\nplanned y',
        ),
        (
            "codex_patch_answered", [SHELL, "apply_patch", "view_image", "tool_search"],
            '!apply_patch{"input": "*** Begin Patch\\n*** Add File: hello.txt\\n+hello\\n+wörld\\n*** End '
            'Patch\\n"}<|tool|>Exit code: 0\nWall time: 0.2 seconds\nOutput:\nSuccess. Updated the following '
            "files:\nA hello.txt\n",
        ),
        (
            "codex_search_answered", [SHELL, "apply_patch", "view_image", "tool_search", "add"],
            '!tool_search{"query": "add two numbers"}<|tool|>These tools can be called now: add<|assistant|>'
            '!add{"a": 1, "b": 2}<|tool|>Wall time: 0.0033 seconds\nOutput:\n3',
        ),
        (
            "codex_more_tools", ["exec", "wait", "request_user_input"],
            '!exec{"input": "text(1+41)"}<|tool|>Script completed\nWall time 0.1 seconds\nOutput:\n\n42',
        ),
        (
            "codex_image", [SHELL, "view_image", "close_agent", "add", "mcp__calc__exec_command"],
            '!view_image{"path": "x.png"}<|tool|>[image left out: this model reads no images]',
        ),
    ],
)  # fmt: skip
def test_a_request_of_codex_is_answered(agent: Server, name: str, tools: list[str], ending: str) -> None:
    body = json.loads((RECORDINGS / f"{name}.json").read_text())
    agent.backend.script = says(agent.ids("hello"))
    answer = body_of(http(agent, body | {"model": "tiny"}))
    assert answer["output"][0]["content"][0]["text"] == "hello"
    [prompt] = prompts(agent)
    conversation, *names = prompt.split("=")[0].removesuffix("<|assistant|>").split("+" + tools[0])
    assert conversation.endswith(ending)
    assert "+".join([tools[0], *"".join(names).split("+")[1:]]).split("+") == tools


def test_a_schema_of_codex_is_read() -> None:
    body = json.loads((RECORDINGS / "codex_schema.json").read_text())
    ask = parse(json.dumps(body).encode(), ResponseStore(), "")
    assert ask.options.format is not None
    assert ask.options.format["json_schema"]["schema"]["required"] == ["answer"]
    assert SHELL in offered(ask)


TOOLS = [function("f"), namespace("a", "f", "g", "h"), namespace("b", "h")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("written", "name", "of"),
    [
        ("f", "f", None), ("a__f", "f", "a"), ("g", "g", "a"), ("a__h", "h", "a"), ("b__h", "h", "b"),
    ],
)  # fmt: skip
def test_a_call_comes_back_with_its_namespace_and_leaves_the_prompt_as_it_was(
    agent: Server, stream: bool, written: str, name: str, of: str | None
) -> None:
    question = {"role": "user", "content": "how?"}
    body = answered(agent, stream, said(written, {"x": 1}), input=[question], tools=TOOLS)
    [call] = body["output"]
    assert (call["name"], call.get("namespace")) == (name, of)
    assert json.loads(call["arguments"]) == {"x": 1}
    assert body["tools"] == TOOLS
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
    create(agent, input=[question, call, result], tools=TOOLS)
    create(agent, input=[result], tools=TOOLS, previous_response_id=body["id"])
    _, replayed, kept = prompts(agent)
    assert replayed == kept
    assert kept.startswith(f'<s><|user|>how?<|assistant|>!{written}{{"x": 1}}<|tool|>1+f+a__f+g+a__h+b__h')


def test_a_call_of_a_tool_that_is_no_longer_offered_is_read(agent: Server) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "g", "namespace": "a", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    create(agent, input=[call, result])
    assert "!a__g{}" in prompts(agent)[0]


@pytest.mark.parametrize("name", ["h", "b__h"])
def test_a_tool_of_a_namespace_may_be_required(agent: Server, name: str) -> None:
    tools = [function("f"), namespace("b", "h")] if name == "h" else TOOLS
    create(agent, tools=tools, tool_choice={"type": "function", "name": name})
    grammar = agent.backend.request.shaping.grammar
    assert f'call_0: "{name}\\"' in grammar
    assert 'call_0: "f\\"' not in grammar


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([namespace("a", "f", "f")], "tools[0].tools[1].name"),
        ([function("a__f"), function("f"), namespace("a", "f")], "tools[2].tools[0].name"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "a"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{"type": "custom"}], "tools[0].name"),
        ([{"type": 3}], "tools[0].type"),
    ],
)  # fmt: skip
def test_wrong_tools_are_named(tools: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(tools=tools)
    assert caught.value.param == param


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True}, {"type": "web_search_preview"},
    {"type": "image_generation", "output_format": "png"}, {"type": "tool_search"}, {"type": "local_shell"},
    {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "computer_use_preview"},
    {"type": "mcp", "server_label": "x"}, {"type": "file_search", "vector_store_ids": []},
]  # fmt: skip


def test_hosted_tools_are_left_out_and_logged_once(agent: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxtp")
    for _ in range(2):
        body = answered(agent, False, "hello", tools=[*HOSTED, function("f")], text={"verbosity": "low"})
    assert (body["tools"], body["text"]["verbosity"]) == ([function("f")], "low")
    assert prompts(agent)[1].removesuffix("<|assistant|>") == "<s><|user|>hello+f"
    logged = [line for line in caplog.messages if "leaving out" in line]
    assert len(logged) == len(HOSTED)
    assert 'tools of type "web_search"' in logged[0]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "auto", "tools": HOSTED[:1]}, "tool_choice.tools[0]"),
        ("required", "tool_choice"),
    ],
)
def test_a_hosted_tool_cannot_be_chosen(agent: Server, choice: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"runs no tools|no tools to call") as caught:
        create(agent, tools=HOSTED, tool_choice=choice)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "item",
    [
        {"type": "tool_search_call", "execution": "server", "call_id": "c", "arguments": {}},
        {"type": "tool_search_output", "execution": "server", "call_id": "c", "tools": []},
        {"type": "configuration_update", "id": "c", "reasoning": {"effort": "low"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "content": None},
    ],
)
def test_items_that_only_their_provider_reads_are_left_out(agent: Server, item: dict[str, Any]) -> None:
    create(agent, input=[{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}])
    assert prompts(agent) == ["<s><|user|>a<|user|>b<|assistant|>"]


PATCH = '*** Begin Patch\n*** Update File: a "b".txt\n-\tsmall\n+größer 😀\n*** End Patch\n'


@pytest.mark.parametrize("ascii_", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_plain_text(agent: Server, stream: bool, ascii_: bool) -> None:
    tools = [custom("apply_patch"), function("f")]
    words = said("apply_patch", {"input": PATCH}, ascii_)
    body = answered(agent, stream, words, tools=tools)
    [call] = body["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert body["tools"] == tools
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    create(agent, input=[{"role": "user", "content": "hello"}, call, result], tools=tools)
    create(agent, input=[result], tools=tools, previous_response_id=body["id"])
    _, replayed, kept = prompts(agent)
    assert replayed == kept
    written = json.dumps({"input": PATCH}, ensure_ascii=False)
    assert kept.startswith(f"<s><|user|>hello<|assistant|>!apply_patch{written}<|tool|>done+apply_patch+f")


def test_the_text_of_a_custom_tool_is_streamed(agent: Server) -> None:
    agent.backend.script = says(agent.ids(f"ok {said('apply_patch', {'input': PATCH})}"))
    events = events_of(post(agent, tools=[custom("apply_patch")], stream=True))
    assert deltas(events, "custom_tool_call_input") == PATCH
    assert sum(event["type"].endswith("input.delta") for event in events) > 10
    assert kinds_of(events, 1) == ["output_item.added", "custom_tool_call_input.done", "output_item.done"]
    [done] = [event for event in events if event["type"].endswith("input.done")]
    assert done["input"] == PATCH


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_call_that_is_cut_off_is_incomplete(agent: Server, stream: bool) -> None:
    agent.backend.script = says(agent.ids(said("apply_patch", {"input": PATCH}))[:-50], "length")
    body = body_of(post(agent, tools=[custom("apply_patch")], stream=stream))
    [call] = body["output"]
    assert call["status"] == "incomplete"
    assert PATCH.startswith(call["input"])
    assert call["input"].startswith("*** Begin")
    create(agent, input="go on", previous_response_id=body["id"])
    assert prompts(agent)[-1] == "<s><|user|>hello<|user|>go on<|assistant|>"


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_grammar_is_described_to_the_model(syntax: str) -> None:
    tool = custom("apply_patch", type="grammar", syntax=syntax, definition="start: HUNK")
    parameters = offered(parsed(tools=[tool]))["apply_patch"].parameters
    assert parameters["required"] == ["input"]
    assert parameters["properties"]["input"]["description"].endswith(f"this {syntax} grammar:\nstart: HUNK")


def test_a_custom_tool_may_be_required(agent: Server) -> None:
    tools, choice = [custom("apply_patch"), function("f")], {"type": "custom", "name": "apply_patch"}
    words = '{"name": "apply_patch", "arguments": {"input": "x"}}'
    body = answered(agent, False, words, tools=tools, tool_choice=choice)
    assert (body["output"][0]["type"], body["tool_choice"]) == ("custom_tool_call", choice)
    assert "input" in agent.backend.request.shaping.grammar
    with pytest.raises(openai.BadRequestError, match="no tool named"):
        create(agent, tools=tools, tool_choice=choice | {"name": "f"})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"), (' { "patch" : "a"}', "a"), ('{"input": "a\\u00', "a"), ("{", ""),
        ('{"input": "\\ud83d', ""), ('{"input": "\\ud83d\\ude00"}', "😀"), ('{"input": 3, "b": "c"}', ""),
        ('{"input": "a\\ud83db\\udc00"}', "a?b?"), ('{"input": "\\ud83d\\n"}', "?\n"), ("[", ""),
        ('{"input": "\\"\\\\\\/\\u00e9", "b": "c"}', '"\\/é'), ('{"a\\"b": "c\nd\te"}', "c\nd\te"),
        ('{"input": "a\\xb"}', "a"), ("no JSON", ""), ("\ud83d", ""), ('{"input": "é\ud83d"}', "é?"),
        (" " * 2000, ""),
    ],
)  # fmt: skip
def test_the_text_in_arguments(arguments: str, text: str) -> None:
    assert text_of(arguments) == text
    for step in (1, 3, 7):
        reader = TextReader()
        pieces = [arguments[at : at + step] for at in range(0, len(arguments), step)]
        assert "".join(map(reader.push, pieces)) == text


def test_a_long_text_is_read_piece_by_piece() -> None:
    text = PATCH * 4000  # minutes, if each piece were read from the start
    arguments, reader = json.dumps({"input": text}), TextReader()
    assert "".join(reader.push(arguments[at : at + 4]) for at in range(0, len(arguments), 4)) == text


SEARCH: dict[str, Any] = {
    "type": "tool_search", "execution": "client", "description": "finds",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_a_search_has_found_can_be_called(agent: Server, stream: bool) -> None:
    question = {"role": "user", "content": "how?"}
    first = answered(agent, stream, said("tool_search", {"query": "q"}), input=[question], tools=[SEARCH])
    assert first["tools"] == [SEARCH]
    [call] = first["output"]
    assert (call["type"], call["execution"]) == ("tool_search_call", "client")
    assert call["arguments"] == {"query": "q"}
    found = call | {"type": "tool_search_output", "status": "completed", "tools": [namespace("a", "g")]}
    again = [call | {"call_id": "2"}, found | {"call_id": "2"}]
    items = [question, call, found, *again]
    second = answered(agent, stream, said("g", {}), input=items, tools=[SEARCH])
    assert (second["output"][0]["name"], second["output"][0]["namespace"]) == ("g", "a")
    more = {"input": [found], "tools": [SEARCH], "previous_response_id": first["id"]}
    assert answered(agent, stream, said("g", {}), **more)["output"][0]["namespace"] == "a"
    _, replayed, kept = prompts(agent)
    told = '<s><|user|>how?<|assistant|>!tool_search{"query": "q"}<|tool|>These tools can be called now: g'
    assert replayed.startswith(told + "<|assistant|>!tool_search")
    assert kept == f"{told}+tool_search+g<|assistant|>"


def test_a_search_that_is_cut_off_has_no_arguments(agent: Server) -> None:
    agent.backend.script = says(agent.ids(said("tool_search", {"query": "q"}))[:-20], "length")
    [call] = body_of(post(agent, tools=[SEARCH]))["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", {})


@pytest.mark.parametrize("kind", ["tool_search_output", "additional_tools"])
def test_more_tools_in_the_input_are_checked(kind: str) -> None:
    call = {"type": "tool_search_call", "call_id": "1", "arguments": {}, "execution": "client"}
    more = {"type": kind, "call_id": "1", "tools": [{"type": "function"}]}
    with pytest.raises(RequestError) as caught:
        parsed(input=[call, more])
    assert caught.value.param == "input[1].tools[0].name"
    endless = function("f") | {"parameters": {"x": math.nan}}
    with pytest.raises(RequestError, match="NaN"):
        parsed(input=[call, more | {"tools": [endless]}])
