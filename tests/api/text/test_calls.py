from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.errors import ModelError
from mlxtp.text.conversation import Tool
from mlxtp.text.tool_calls import JSON_CALLS, LLAMA_CALLS, CallReader, CallText, ToolFormat, tool_format

from .test_stops import cut, quick, sizes

TOOLS = (
    Tool(
        "add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    ),
    Tool("say", "Says", {"type": "object", "properties": {"text": {"type": "string"}}}),
)
Calls = list[tuple[str, object]]


def joined(pieces: Sequence[CallText]) -> Calls:
    """Name and arguments of each call; that numbers and ids are in order is checked here."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name:
            assert piece.index == len(calls)
            assert piece.id
            assert not piece.text
            calls.append((piece.name, ""))
        else:
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


def read(
    format_: ToolFormat, texts: Sequence[Sequence[str]], forced: bool = False
) -> tuple[Calls, list[str], CallReader]:
    """The calls in texts (each in pieces) between markers, and what was no call."""
    reader, pieces, raw = CallReader(format_, TOOLS, forced), [], []
    for text in texts:
        for part in text:
            pieces += reader.push(part)
        more, rest = reader.close(cut=False)
        pieces += more
        raw.append(rest)
    return joined(pieces), raw, reader


WRITTEN = {
    "json_tools": ['\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'],
    "llama": ['{"name": "add", "parameters": {"a": 1, "b": 2}}'],
    "mistral": ['[{"name": "add", "arguments": {"a": 1, "b": 2}}]', 'add[ARGS]{"a": 1, "b": 2}'],
    "qwen3_coder": [
        "\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    ],
    "pythonic": ["[add(a=1, b=2)]"],
    "kimi_k2": [
        '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": 2}<|tool_call_end|>'
    ],
    "glm47": [
        "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>"
    ],
    "gemma4": ["call:add{a:1,b:2}"],
    "function_gemma": ["call:add{a:1,b:2}"],
    "longcat": [
        "add\n<longcat_arg_key>a</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n"
        "<longcat_arg_key>b</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>"
    ],
    "minimax_m2": [
        '\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">2</parameter>\n</invoke>\n'
    ],
    "minicpm5": ['"add"><param name="a">1</param><param name="b">2</param>'],
    "muse_spark": [
        '<atem:invoke name="add"><atem:parameter name="a">1</atem:parameter>'
        '<atem:parameter name="b">2</atem:parameter></atem:invoke>'
    ],
    "kimi_k3": [
        '<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        '<|close|>argument<|sep|><|open|>argument key="b" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
    ],
    "harmony": ['functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'],
    "laguna": [
        "add\n<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>"
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in WRITTEN for text in WRITTEN[name]])
def test_a_call_as_each_family_writes_it(name: str, text: str) -> None:
    calls, raw, reader = read(tool_format(name), [[text]])
    assert (calls, raw, reader.complete) == ([("add", {"a": 1, "b": 2})], [""], 1)


def test_every_parser_that_mlx_lm_has_is_read_here() -> None:
    folder = Path(mlx_lm.__file__).parent / "tool_parsers"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(WRITTEN) - {"llama", "harmony"}


@pytest.mark.slow
def test_reading_calls_imports_no_mlx() -> None:
    code = (
        "import sys; from mlxtp.text.tool_calls import tool_format; tool_format('laguna'); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('mlx', 'mlx_lm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["nobodys", "../x", "os.path"])
def test_a_parser_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="no tool parser"):
        tool_format(name)


# --- JSON while it comes ----------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(['"', "\\", "{", "}", ']"}']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=4), values, max_size=3)


@quick
@given(st.lists(arguments, min_size=1, max_size=3), sizes, st.sampled_from(["arguments", "parameters"]))
def test_arguments_come_as_they_are_written_however_the_text_is_cut(
    given_: list[dict[str, object]], steps: list[int], key: str
) -> None:
    texts = [json.dumps({"name": "say", key: each}, ensure_ascii=False) for each in given_]
    expected = [("say", each) for each in given_]
    calls, raw, reader = read(JSON_CALLS, [cut(text, steps) for text in texts])
    assert (calls, raw, reader.complete) == (expected, [""] * len(texts), len(texts))
    for between in ("; ", "\n", ""):
        calls, raw, reader = read(LLAMA_CALLS, [cut(between.join(texts), steps)])
        assert (calls, raw, reader.complete) == (expected, [""], len(texts))


def test_arguments_are_passed_on_at_once() -> None:
    reader = CallReader(JSON_CALLS, TOOLS)
    assert list(reader.push('{"name": "say", "argum')) == []
    began, first = reader.push('ents": {"text": "a')
    assert (began.index, began.name, first) == (0, "say", CallText(0, '{"text": "a'))
    assert list(reader.push("bc")) == [CallText(0, "bc")]
    assert list(reader.push('"}}')) == [CallText(0, '"}')]
    assert reader.close(cut=False) == ([], "")


def test_a_call_that_the_budget_cut_is_not_complete() -> None:
    reader = CallReader(JSON_CALLS, TOOLS)
    assert len(list(reader.push('{"name": "say", "arguments": {"text": "a'))) == 2
    assert reader.close(cut=True) == ([], "")
    assert reader.complete == 0
    whole = CallReader(tool_format("mistral"), TOOLS)
    text = 'add[ARGS]{"a": 1}'
    assert list(whole.push(text)) == []
    assert whole.close(cut=True) == ([], text)


@pytest.mark.parametrize(
    "text",
    [
        "no call", '{"name": 5, "arguments": {}}', '{"name": "add", "arguments": [1]}', '{"arguments": {}}',
        '{"name": "add", "arguments": "x"}', "[]", "null", '{"name": "add", "arguments": {"a": NaN}}',
        "{" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"glm47", "laguna", "json_tools", "llama"}))
def test_what_is_no_call_is_given_back(name: str, text: str) -> None:
    calls, (raw,), reader = read(tool_format(name), [[text]])
    assert (raw == text) is not bool(calls)
    assert reader.complete == len(calls)


@pytest.mark.parametrize(
    "text", ["no call", '{"name": 5, "arguments": {}}', '{"name": "add", "arguments": [1]}']
)
def test_json_that_is_no_call_is_given_back(text: str) -> None:
    assert read(JSON_CALLS, [[text]])[:2] == ([], [text])


def test_arguments_in_a_string_are_unpacked() -> None:
    text = json.dumps({"name": "add", "arguments": json.dumps({"a": 1})})
    assert read(JSON_CALLS, [[text]])[:2] == ([("add", {"a": 1})], [""])


def test_only_what_was_offered_is_a_call_where_any_json_could_be_one() -> None:
    for text in ('{"name": "Alice", "age": 30}', '{"name": "add"}', '[{"name": "Bob", "parameters": {}}]'):
        calls, (raw,), _ = read(LLAMA_CALLS, [cut(text, [])])
        assert (calls, raw) == ([], text)


def test_a_name_that_is_no_json_is_no_call_and_no_bug() -> None:
    text = '{"name": "a\\qb", "arguments": {}}'
    assert read(JSON_CALLS, [[text]])[:2] == ([], [text])


def test_fields_after_the_arguments_are_nothing_and_words_are_words() -> None:
    text = '{"name": "add", "arguments": {"a": 1}, "id": "x"}'
    assert read(JSON_CALLS, [[text]])[:2] == ([("add", {"a": 1})], [""])
    assert read(LLAMA_CALLS, [['{"name": "add", "parameters": {"a": 1}} Done.']])[1] == ["Done."]


def test_at_most_the_wanted_calls_however_they_are_written() -> None:
    two = {"mistral": '[{"name": "add", "arguments": {}}, {"name": "say", "arguments": {}}]',
           "llama": '{"name": "add", "parameters": {}}; {"name": "say", "parameters": {}}'}  # fmt: skip
    for name, text in two.items():
        reader = CallReader(tool_format(name), TOOLS, most=1)
        pieces = [*reader.push(text), *reader.close(cut=False)[0]]
        assert (joined(pieces), reader.complete) == ([("add", {})], 1)


def test_half_a_character_of_the_models_is_escaped() -> None:
    text = '[{"name": "say", "arguments": {"text": "\\ud800"}}]'
    reader = CallReader(tool_format("mistral"), TOOLS)
    assert list(reader.push(text)) == []
    (_, arguments), _ = reader.close(cut=False)
    assert arguments.text.encode() == b'{"text": "\\ud800"}'


def test_an_id_that_the_model_wrote_is_kept_unless_it_has_written_it_before() -> None:
    one = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    reader, ids = CallReader(tool_format("kimi_k2"), TOOLS), []
    for _ in range(2):
        assert list(reader.push(one * 2)) == []
        ids += [piece.id for piece in reader.close(cut=False)[0] if piece.name]
    assert ids[0] == "functions.add:0"
    assert len(set(ids)) == 4
