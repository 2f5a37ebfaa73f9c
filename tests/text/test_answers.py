"""What clients see of answers, for each markup: every story in random pieces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest

from mlxtp.text.answers import LONG_TEXT, MOST_LONG_TEXTS
from mlxtp.text.calls import CallReader
from mlxtp.text.conversation import Tool

from .reading import ADD, FORMATS, MARKUPS, SEARCH, WRITE, Read, parser, pieces, read, tool

Story = tuple[str, Read]
A1: Mapping[str, object] = {"a": 1}
ADDED = ("add", A1)
JSON = '{"name": "add", "arguments": {"a": 1}}'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def seen(said: str = "", thought: str = "", calls: Sequence[tuple[str, Any]] = ()) -> Read:
    return Read(said, thought, tuple(calls))


def says(text: str) -> Story:
    """An answer that is shown letter by letter."""
    return text, seen(text)


def reads(
    stories: Sequence[Story], how: Mapping[str, Any], specials: Sequence[str] = (), cut: bool = False
) -> None:
    for text, expected in stories:
        for seed in range(12):
            assert read(how, text, specials, cut=cut, seed=seed) == expected, text


def test_thoughts_and_text() -> None:
    stories = [
        says(" a <b> c "),
        says(""),
        says("use <think> x </think> here"),
        ("<think>\nhm \n</think>\n\nyes", seen("yes", "hm")),
        ("<think>hm\n", seen("", "hm")),
        ("<think>\n\n</think>\n\nyes", seen("yes")),
    ]
    reads(stories, {})
    reads([*stories, ("<think>hm</think>Sure. \n" + XML, seen("Sure.", "hm", [ADDED]))], {"name": "qwen_xml"})
    reads([("hm</think>yes", seen("yes", "hm"))], {"thinking": True})


@pytest.mark.parametrize("opens", MARKUPS)
def test_thoughts_of_each_markup(opens: str) -> None:
    markup = MARKUPS[opens]
    assert markup.think is not None
    _, closes = markup.think
    before, after = (*markup.wrappers, "", "")[:2]
    if markup.headers:
        specials = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|eom|>", "<|eot|>")
        final = "<|start|>assistant to=user<|channel|>final<|message|>yes"
        reads([(f"{opens}hm{closes}{final}", seen("yes", "hm"))], {"markup": markup}, specials)
        return
    stories = [
        (f"{opens}hm{closes}{before}\nyes{after}", seen("yes", "hm")),
        (f"{closes}\nyes", seen("yes")),
        (f"yes {opens} {closes}", seen(f"yes {opens} {closes}")),
    ]
    reads(stories, {"markup": markup})
    reads([(f"{opens}\nhm{closes}yes", seen("yes", "hm"))], {"markup": markup, "thinking": True})


CONTENT = "<x>\n<parameter>1</parameter>\n</x>"
WHOLE = f"{XML}\n</parameter>"  # a file that shows how to call, and more than that
XML_STORIES: Mapping[str, tuple[str, Read]] = {
    "a call": (f"Sure.\n{XML}", seen("Sure.", "", [ADDED])),
    "text behind it": (f"{XML}\nDone.", seen("Done.", "", [ADDED])),
    "text between two": (f"{XML}\nNow <b>this</b>:\n{XML}", seen("Now <b>this</b>:", "", [ADDED, ADDED])),
    "two calls": (f"{XML}\n{XML}", seen("", "", [ADDED, ADDED])),
    "two functions in a block": (
        XML.removesuffix("</tool_call>") + XML.removeprefix("<tool_call>"), seen("", "", [ADDED, ADDED]),
    ),
    "no opening marker": (f"I add.\n\n{XML.removeprefix('<tool_call>')}", seen("I add.", "", [ADDED])),
    "no closing markers": (XML.replace("</function>\n</tool_call>", ""), seen("", "", [ADDED])),
    "no end of the function": (XML.replace("</function>\n", ""), seen("", "", [ADDED])),
    "no end of the function, and another call": (
        XML.replace("</function>\n", "") + "\n" + XML, seen("", "", [ADDED, ADDED]),
    ),
    "a value that is not closed": (
        XML.replace("1\n</parameter>", "1\n<parameter=b>\n2\n</parameter>"), seen("", "", [("add", {"a": 1, "b": 2})]),
    ),
    "no arguments": ("<tool_call>\n<function=add>\n</function>\n</tool_call>", seen("", "", [("add", {})])),
    "JSON in the function": ('<tool_call><function=add>{"a": 1}</function></tool_call>', seen("", "", [ADDED])),
    "JSON in the block": (f"<tool_call>\n{JSON}\n</tool_call>", seen("", "", [ADDED])),
    "quotes": ('<tool_call><function="add"><parameter="a">1</parameter></function></tool_call>', seen("", "", [ADDED])),
    "an explanation": says("Write <tool_call>\n<function=add> and then </tool_call>."),
    "a tool that nobody offered": says(XML.replace("add", "multiply")),
    "a marker alone": says("Nothing may stand behind </tool_call> there."),
}  # fmt: skip


@pytest.mark.parametrize("name", XML_STORIES)
def test_calls_of_qwen(name: str) -> None:
    reads([XML_STORIES[name]], {"name": "qwen_xml"})


def written(**arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=write_file>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "content",
    [
        CONTENT, WHOLE, XML, f"{XML}\n\n{XML}", "</tool_call>", "</function>", "</parameter>\n</function>\n</tool_call>x",
        "<tool_call>", '"<parameter=b>"', "  indented\n\n", "", "null", "1", '{"a": "</parameter>"}', "</think>",
    ],
)  # fmt: skip
def test_a_file_arrives_whole_whatever_is_in_it(content: str) -> None:
    call = ("write_file", {"path": "a", "content": content})
    reads([(written(path="a", content=content), seen("", "", [call]))], {"name": "qwen_xml"})
    reads(
        [(written(content=content, path="a"), seen("", "", [("write_file", call[1])]))], {"name": "qwen_xml"}
    )


def test_values_may_stand_on_one_line_with_their_tags() -> None:
    call = "<tool_call>\n<function=add>\n<parameter=a>{}1</parameter>\n</function>\n</tool_call>"
    bare = "<tool_call>\n<function=add>\n</function>\n</tool_call>"
    stories = [
        (
            first + between + second,
            seen(between.strip(), "", [ADDED, ("add", {}) if second == bare else ADDED]),
        )
        for first in (call.format(""), call.format("\n"), XML)
        for second in (call.format(""), call.format("\n"), XML, bare)
        for between in ("\n", "\nand\n")
    ]
    reads(stories, {"name": "qwen_xml"})


def test_values_in_values_without_end_are_no_arguments() -> None:
    deep = "]<]minimax[>[<a>" * 3000
    text = f']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="add">{deep}'
    assert read({"name": "minimax_m3"}, text) == seen(deep, "", [("add", {})])
    text = "add<|content_invoke_tool_json|>" + '{"args":' * 3000
    (call,) = read({"name": "inkling"}, text).calls
    assert call == ("add", {})


class CountedText(str):
    """Text that counts how often its length is read."""

    __slots__ = ()
    read = 0

    def __len__(self) -> int:
        CountedText.read += 1
        return super().__len__()


@pytest.mark.parametrize("special", [False, True])
def test_what_is_held_is_counted_once(special: bool) -> None:
    """Requests with log-probabilities ask for it after each token."""
    reader = CallReader(FORMATS["lfm2"], [ADD])
    list(reader.start("", False))
    list(reader.push('[add(a="'))
    CountedText.read, count = 0, 500
    for i in range(1, count + 1):
        list(reader.push(CountedText("<z>"), special))
        assert reader.held == len('[add(a="') + 3 * i
    assert CountedText.read < 20 * count


def test_an_argument_that_nobody_described_is_one_and_its_text_in_a_file_is_none() -> None:
    stories = [
        (written(path="a", mode="x"), seen("", "", [("write_file", {"path": "a", "mode": "x"})])),
        (
            written(path="a</parameter><parameter=mode>x"),
            seen("", "", [("write_file", {"path": "a</parameter><parameter=mode>x"})]),
        ),
    ]
    reads(stories, {"name": "qwen_xml"})


def test_calls_in_thoughts() -> None:
    how = {"name": "qwen_xml", "thinking": True}
    mention = "Some write <tool_call>\n<function=add> to call. I need none."
    stories = [
        (f"I add.\n{XML}", seen("", f"I add.\n{XML}", [ADDED])),
        (f"I add.\n{XML}\n{XML}", seen("", f"I add.\n{XML}\n{XML}", [ADDED, ADDED])),
        (f"{mention}\n</think>\n\nFour.", seen("Four.", mention)),
        (f"I could {XML} but do not.</think>Four.", seen("Four.", f"I could {XML} but do not.")),
        (f"I could {XML}</think>Four.", seen("Four.", f"I could {XML}")),
        (f"I {XML}</think>\n\n{XML}", seen("", f"I {XML}", [ADDED])),
        (f"I add.\n{XML}\n</think>", seen("", f"I add.\n{XML}", [ADDED])),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1</think>Four.", seen("Four.", "<tool_call>\n<function=add>\n<parameter=a>\n1")),
    ]  # fmt: skip
    reads(stories, how)
    unfinished = XML.removesuffix("</parameter>\n</function>\n</tool_call>")
    reads([(f"I add.\n{unfinished}", seen("", f"I add.\n{unfinished.rstrip()}"))], how, cut=True)


PATH = "path"
OTHERS: Mapping[str, tuple[str, Sequence[Tool], Sequence[str], Sequence[Story]]] = {
    "JSON": ("json", (ADD, WRITE), (), [
        (f"<tool_call>\n{JSON}\n</tool_call>", seen("", "", [ADDED])),
        (f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", seen("", "", [ADDED, ADDED])),
        (f"<tool_call>{JSON}\n{JSON}</tool_call>", seen("", "", [ADDED, ADDED])),
        (f"<tool_call>[{JSON}, {JSON}]</tool_call>yes", seen("yes", "", [ADDED, ADDED])),
        (f"<tool_call>{JSON}", seen("", "", [ADDED])),
        (f"I add.\n{JSON}\n</tool_call>", seen("I add.", "", [ADDED])),
        (f"<tool_call>{JSON[:-1]}", seen("", "", [ADDED])),
        (f"<tool_call>{JSON[:-2]}", seen("", "", [ADDED])),
        (f"<tool_call>{JSON[:-2]}</tool_call>Done.", seen("Done.", "", [ADDED])),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}, "arguments": {"b": 2}}</tool_call>', seen("", "", [ADDED])),
        says(f"Such as {JSON} in words."),
        says(f"I add.\n{JSON}"),
        ('<tool_call>{"name": "add"}</tool_call>', seen("", "", [("add", {})])),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', seen("", "", [("add", {})])),
        ('<tool_call>{"name": "add", "arguments": ""}</tool_call>', seen("", "", [("add", {})])),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', seen("", "", [ADDED])),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', seen("[1]", "", [("add", {})])),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', seen("", "", [ADDED])),
        ('<tool_call>{"function": {"name": "add", "arguments": {"a": 1}}}</tool_call>', seen("", "", [ADDED])),
        ("<tool_call>{'name': 'add', 'arguments': {'a': 1,}}</tool_call>", seen("", "", [ADDED])),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x"}</tool_call>', seen("", "", [ADDED])),
        ('<tool_call>{"name": "write_file", "arguments": {"path": "f", "content": "def f():\n\t1\n</tool_call>"}}</tool_call>',
         seen("", "", [("write_file", {"path": "f", "content": "def f():\n\t1\n</tool_call>"})])),
        ('<tool_call>{"name": "add", "arguments": []}</tool_call>', seen("", "", [("add", {})])),
        ('<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>', seen("", "", [ADDED])),
        ('<tool_call>{"name": "add", "a": 1}</tool_call>', seen("", "", [ADDED])),
        ('<tool_call>{"name": "add", "input": "one"}</tool_call>', seen("", "", [("add", {"input": "one"})])),
        ('<tool_call>{"name": "add", "args": [1]}</tool_call>', seen("", "", [("add", {"args": [1]})])),
        ('<tool_call>{"name": "add", "input": {"a": 1}, "b": 2}</tool_call>', seen("", "", [("add", {"input": {"a": 1}, "b": 2})])),
        ('<tool_call>{"name": "add", "arguments": "one, two"}</tool_call>', seen('"one, two"', "", [("add", {})])),
        ('<tool_call>{"index": 0, "thought": "hm", "name": "add", "arguments": {"a": 1}}</tool_call>', seen("", "", [ADDED])),
        says('<tool_call>{"name": "multiply", "arguments": {"a": 1}}</tool_call>'),
        says('<tool_call>{"arguments": {"a": 1}, "name": "multiply"}</tool_call>'),
        says("<tool_call>none</tool_call> b"),
        says("a <tool_call> b <tool_call>"),
        (XML, seen("", "", [ADDED])),
    ]),
    "bare JSON": ("llama", (ADD,), (), [
        (' {"name": "add", "parameters": {"a": 1}}', seen("", "", [ADDED])),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', seen("", "", [ADDED])),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', seen("", "", [ADDED])),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', seen("", "", [ADDED, ADDED])),
        ('{"name": "add", "parameters": {"a": 1}} Done.', seen("Done.", "", [ADDED])),
        says('{"a": 1} b'), says('a {"name"'), says('{"name": "Ada", "age": 30}'), says('{"name": "add"}'),
        says("[add(a)] adds a."), says('{"name": "add", "a": 1}'), says('{"index": 0, "text": "a"}'),
        says('[{"name": "Bob", "parameters": {}}]'), says("[link]"), says('{"name": "a\\qb", "parameters": {}}'),
    ]),
    "GLM": ("glm", (SEARCH, WRITE, tool("page", cursor={"anyOf": [{"type": "string"}, {"type": "null"}]})), (), [
        ("<tool_call>search<arg_key>query</arg_key><arg_value>a b</arg_value></tool_call>", seen("", "", [("search", {"query": "a b"})])),
        ("<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n</tool_call>", seen("", "", [("search", {"query": "a"})])),
        ("<tool_call>search<arg_key>query</arg_key>a b</arg_value></tool_call>", seen("", "", [("search", {"query": "a b"})])),
        ("Ok.\nsearch<arg_key>query</arg_key><arg_value>a</arg_value></tool_call>", seen("Ok.", "", [("search", {"query": "a"})])),
        ("<tool_call>write_file<arg_key>path</arg_key><arg_value>f</arg_value><arg_key>content</arg_key><arg_value>    1\n</arg_value></tool_call>",
         seen("", "", [("write_file", {"path": "f", "content": "    1\n"})])),
        ("<tool_call>page<arg_key>cursor</arg_key><arg_value>12</arg_value></tool_call>", seen("", "", [("page", {"cursor": "12"})])),
        ('<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>', seen("", "", [("search", {"query": "a"})])),
        ("<tool_call>search</tool_call>", seen("", "", [("search", {})])),
        says("Wrap the call in <tool_call> ... </tool_call> and stop."), says("<tool_call>none</tool_call>"),
    ]),
    "MiniMax M3": ("minimax_m3", (tool("open", book="string", page="integer", tags={"type": "array", "items": {"type": "string"}}, at="object"),), ("]<]minimax[>[",), [
        ('I will.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="open">]<]minimax[>[<book>7]<]minimax[>[</book>]<]minimax[>[<page>7]<]minimax[>[</page>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
         seen("I will.", "", [("open", {"book": "7", "page": 7})])),
        ('<tool_call>', seen("<tool_call>")),
        (']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="open">]<]minimax[>[<tags>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[<at>]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[</at>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>',
         seen("", "", [("open", {"tags": ["1"], "at": {"x": 1}})])),
    ]),
    "Kimi": ("kimi_k2", (ADD, tool("now")), ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_end|>"), [
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>', seen("", "", [ADDED])),
        ('<|tool_call_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_section_end|>', seen("", "", [ADDED])),
        ('Ok.<|tool_call_begin|>add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', seen("Ok.", "", [ADDED])),
        ('<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', seen("", "", [ADDED])),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>", seen("", "", [("now", {})])),
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": {"x": 1<|tool_call_end|><|tool_calls_section_end|>', seen("", "", [("add", {"a": {"x": 1}})])),
        ('<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"{\\"a\\": 1}"<|tool_call_end|>', seen("", "", [ADDED])),
        ('<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"a, b"<|tool_call_end|>', seen('"a, b"', "", [("add", {})])),
        ('<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"a": 1}<|tool_call_end|>', seen('"a": 1}', "", [("add", {})])),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>[1, 2]<|tool_call_end|><|tool_calls_section_end|>", seen("[1, 2]", "", [("add", {})])),
    ]),
    "Granite": ("tool_call", (ADD,), (), [
        (f"<|tool_call|>[{JSON}]", seen("", "", [ADDED])),
        (f"<tool_call>[{JSON}]", seen("", "", [ADDED])),
        (f"<tool_call>{JSON}</tool_call><tool_call>{JSON}</tool_call>", seen("", "", [ADDED, ADDED])),
    ]),
    "DeepSeek": ("deepseek", (ADD,), (), [
        ('function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>', seen("", "", [ADDED])),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', seen("", "", [ADDED])),
        ('<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', seen("", "", [ADDED, ADDED])),
    ]),
    "LFM2": ("lfm2", (tool("run", command="string"), tool("fs-v2.read")), (), [
        ('<|tool_call_start|>[run(command="echo \\"a\\"\nls")]<|tool_call_end|>', seen("", "", [("run", {"command": 'echo "a"\nls'})])),
        ('<|tool_call_start|>[run(command="a"), fs-v2.read(x=[1, True])]<|tool_call_end|>Wait.', seen("Wait.", "", [("run", {"command": "a"}), ("fs-v2.read", {"x": [1, True]})])),
        ('<|tool_call_start|>{"name": "run", "arguments": {"command": "a"}}<|tool_call_end|>', seen("", "", [("run", {"command": "a"})])),
        ("[run(command='a')]", seen("", "", [("run", {"command": "a"})])),
        says("[run] is a tool."), says("run(command='a')"),
    ]),
    "Gemma 4": ("gemma4", (ADD, tool("get", **{"user-id": "string"})), ("<|tool_call>", "<tool_call|>", '<|"|>'), [
        ('<|tool_call>call:get{user-id:<|"|>7 {"x"}<|"|>}<tool_call|>', seen("", "", [("get", {"user-id": '7 {"x"}'})])),
        ("<|tool_call>call:add(a=1, b=2)<tool_call|>", seen("", "", [("add", {"a": 1, "b": 2})])),
        ("<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:add{a:1}<tool_call|>", seen("", "", [ADDED, ADDED])),
        ("Ok. call:add{a:1}<tool_call|>", seen("Ok.", "", [ADDED])),
        says("Write call:add{a:1} to add."),
    ]),
    "Mistral": ("mistral", (ADD, tool("fs-v2.read-file", path="string")), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), [
        ('a [TOOL_CALLS]fs-v2.read-file[ARGS]{"path": "a"}', seen("a", "", [("fs-v2.read-file", {"path": "a"})])),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', seen("", "", [ADDED, ADDED])),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]', seen("", "", [ADDED, ADDED])),
        ('[TOOL_CALLS]add{"a": 1}', seen("", "", [ADDED])),
        ("[TOOL_CALLS]add[ARGS]", seen("", "", [("add", {})])),
        ('[TOOL_CALLS]multiply[ARGS]{"a": 1}', seen('multiply{"a": 1}')),
    ]),
    "Command A": ("command", (ADD,), ("<|START_ACTION|>", "<|END_ACTION|>"), [
        ('<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}},\n {"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 1}}\n]<|END_ACTION|>',
         seen("", "", [ADDED, ADDED])),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_calls_of(family: str) -> None:
    name, tools, specials, stories = OTHERS[family]
    reads(stories, {"name": name, "tools": tools}, specials)


CUT: Sequence[tuple[str, str, Read]] = [
    ("qwen_xml", XML[:-30], seen()),
    ("qwen_xml", f"{XML}\n{XML[:-30]}", seen("", "", [ADDED])),
    ("qwen_xml", "Let me see. <tool_c", seen("Let me see. ")),
    ("qwen_xml", "Let me see. <tool_call>\n<func", seen("Let me see. ")),
    ("qwen_xml", "1 <", seen("1 <")),
    ("json", f'<tool_call>{JSON}</tool_call><tool_call>{{"name": "ad', seen("", "", [ADDED])),
    ("mistral", 'a[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1', seen("a", "", [ADDED])),
    ("llama", '{"name": "add", "par', seen('{"name": "add", "par')),
]


@pytest.mark.parametrize(("name", "text", "expected"), CUT)
def test_a_call_that_the_budget_cut_is_left_out(name: str, text: str, expected: Read) -> None:
    reads([(text, expected)], {"name": name}, cut=True)


def test_a_call_that_is_passed_on_while_it_comes_ends_where_the_budget_does() -> None:
    reading = parser("json")
    parts = [
        *reading.push('<tool_call>{"name": "write_file", "arguments": {"path": "a'),
        *reading.finish(True),
    ]
    assert [part.call.text for part in parts if part.call] == ["", '{"path": "a']
    assert reading._reader is not None
    assert reading._reader.complete == 0


HARMONY = MARKUPS["<|channel|>analysis<|message|>"]
SPECIALS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>", "<|return|>")
ARGUMENTS = '<|constrain|>json<|message|>{"a": 1}<|call|>'
HARMONY_STORIES: Sequence[Story] = [
    ("<|channel|>final<|message|>yes", seen("yes")),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", seen("{}")),
    ("<|channel|>commentary<|message|>Well.<|end|><|start|>assistant<|channel|>commentary to=functions.add " + ARGUMENTS,
     seen("Well.", "", [ADDED])),
    ("<|channel|>commentary to=functions.add " + ARGUMENTS, seen("", "", [ADDED])),
    (" to=functions.add<|channel|>commentary " + ARGUMENTS, seen("", "", [ADDED])),
    ("<|channel|>analysis to=functions.add " + ARGUMENTS, seen("", "", [ADDED])),
    ("<|channel|>commentary to=functions.add " + ARGUMENTS + "<|start|>assistant<|channel|>commentary to=functions.add " + ARGUMENTS,
     seen("", "", [ADDED, ADDED])),
    ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": {"b": 1}<|call|>', seen("", "", [("add", {"a": {"b": 1}})])),
    ('<|channel|>commentary to=functions.add <|message|>{"a": 1}<|channel|>commentary to=functions.add ' + ARGUMENTS,
     seen("", "", [ADDED, ADDED])),
    ("<|channel|>commentary to=functions.add code<|message|>ls -l<|call|>", seen("ls -l", "", [("add", {})])),
    ("<|channel|>commentary to=functions.multiply " + ARGUMENTS, seen('{"a": 1}')),
]  # fmt: skip


def test_gpt_oss_says_in_headers_what_comes() -> None:
    how = {"name": "harmony", "markup": HARMONY}
    reads(HARMONY_STORIES, how, SPECIALS)
    for ends in ("<|end|><|start|>assistant", "<|start|>assistant", "<|call|><|start|>assistant"):
        thought = f"<|channel|>analysis<|message|>hm{ends}"
        after = [
            (f"{thought}{text}", seen(expected.said, "hm", expected.calls))
            for text, expected in HARMONY_STORIES
        ]
        reads(after, how, SPECIALS)
    reads(
        [("<|channel|>analysis<|message|>hm<|channel|>final<|message|>yes", seen("yes", "hm"))], how, SPECIALS
    )
    reads([says(" to be"), ("<|channel|>final yes", seen("final yes"))], how, SPECIALS)
    reads([("<|channel|>final yes", seen())], how, SPECIALS, cut=True)
    letters = parser(**how)
    parts = [*letters.push("<|channel|>", True), *letters.push("final"), *letters.push("<|message|>", True)]
    parts += [*letters.push("<|channel|>x<|message|>"), *letters.finish(False)]
    assert "".join(part.text for part in parts) == "<|channel|>x<|message|>"
    reads(
        [("<|channel|>commentary to=functions.add " + ARGUMENTS, seen('{"a": 1}'))],
        {"markup": HARMONY},
        SPECIALS,
    )


def test_muse_addresses_its_messages() -> None:
    specials = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
    call = (
        '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    )
    stories = [
        (" to=user<|message|>yes<|eot|>", seen("yes")),
        (" to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>yes<|eot|>", seen("yes", "hm")),
        (
            f" to=self<|message|>hm<|eom|><|start|>assistant to=add<|message|>{call}<|eom|>"
            f"<|start|>assistant to=add<|message|>{call}<|eot|>",
            seen("", "hm", [ADDED, ADDED]),
        ),
    ]
    reads(
        stories, {"name": "muse_spark", "markup": MARKUPS["<|start|>assistant to=self<|message|>"]}, specials
    )


def test_special_tokens_are_not_said_but_stand_in_arguments() -> None:
    content = "<|im_start|>user\n"
    call = written(path="a", content=content)
    expected = seen("ab", "", [("write_file", {"path": "a", "content": content})])
    reads(
        [(f"<|x|>a<|im_end|>b{call}<|im_end|>", expected)],
        {"name": "qwen_xml"},
        ("<|x|>", "<|im_start|>", "<|im_end|>"),
    )


def test_so_many_calls_are_read_as_are_wanted_and_at_once() -> None:
    for name, text in (
        ("qwen_xml", f"{XML}{XML}"),
        ("json", f"<tool_call>[{JSON}, {JSON}]"),
        ("lfm2", "[add(a=1), add(a=1)]"),
    ):
        assert read({"name": name, "most": 1}, text) == seen("", "", [ADDED])
    reading = parser("qwen_xml", most=1)
    assert [part.call.name for part in reading.push(XML) if part.call] == ["add", ""]
    assert reading._reader is not None
    assert reading._reader.complete == 1


@pytest.mark.parametrize(
    ("name", "text", "expected", "cut"),
    [
        ("json", f"Sure. <tool_call>{JSON}</tool_call> Done.", seen("Sure.Done."), False),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', seen(), False),
        ("llama", '{"name": "Ada"}', seen('{"name": "Ada"}'), False),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>[1]<|tool_call_end|>",
            seen(),
            False,
        ),
        ("mistral", 'a[TOOL_CALLS]add[ARGS]{"a": 1', seen("a"), True),
    ],
)
def test_calls_that_must_not_come_are_left_out(name: str, text: str, expected: Read, cut: bool) -> None:
    reads([(text, expected)], {"name": name, "dropped": True}, cut=cut)


def test_a_tool_may_be_called_by_another_name() -> None:
    tools = (Tool("add", aliases=("math__add",)),)
    reads(
        [(f"<tool_call>{JSON.replace('add', 'math__add')}</tool_call>", seen("", "", [ADDED]))],
        {"name": "json", "tools": tools},
    )


def handled(act: Callable[[], object]) -> int:
    """Characters of all strings, of which a method was called meanwhile."""
    count = 0

    def see(_frame: FrameType, event: str, method: Any) -> None:
        nonlocal count
        if event == "c_call" and isinstance(text := getattr(method, "__self__", None), str):
            count += len(text)

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["llama", "qwen_xml", "lfm2"])
@pytest.mark.parametrize("before", ["", "a", "<think>a", "[{", XML, "<tool_call>", "<think><tool_call>"])
def test_an_endless_row_of_blanks_takes_linear_work(name: str, before: str) -> None:
    reading, blanks, times = parser(name), " " * 10, 2000
    list(reading.push(before))
    work = handled(lambda: [list(reading.push(blanks)) for _ in range(times)])
    assert work < 25 * times * len(blanks)


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "[TOOL_CALLS]",
]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize(
    "mark", [*MARKS, *(f"{mark}\n" for mark in MARKS), "[", "{", '{"name": "', '{"a":"x']
)
def test_a_row_of_marks_takes_linear_work(name: str, mark: str) -> None:
    def work(times: int) -> int:
        reading = parser(name)
        return handled(
            lambda: [*[list(reading.push(mark)) for _ in range(times)], list(reading.finish(False))]
        )

    assert work(400) < 12 * max(work(100), 40_000)


def test_texts_that_turn_out_to_be_no_calls_are_read_again_only_a_few_times() -> None:
    opens = '{"name": "add", "arguments": {"a": "' + "x" * LONG_TEXT
    reading = parser("json")
    text = opens * (MOST_LONG_TEXTS + 4)
    said = [
        part.text
        for piece, _ in pieces(text, (), __import__("random").Random(1))
        for part in reading.push(piece)
    ]
    said += [part.text for part in reading.finish(False)]
    assert "".join(said) == text
