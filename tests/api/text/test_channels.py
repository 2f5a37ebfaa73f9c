from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.text.reasoning import Markup, PartKind, ReadingPlan, ReasoningParser, thinking_markup
from mlxtp.text.tool_calls import JSON_CALLS, LLAMA_CALLS, CallReader, ToolFormat, tool_format

from .test_calls import TOOLS
from .test_stops import cut, quick, sizes

THINK = Markup(("<think>", "</think>"))
CALL = '{"name": "add", "arguments": {"a": 1}}'
SAID, THOUGHT, CALLED = "said", "thought", "called"
_NAMES = {PartKind.SAID: SAID, PartKind.THOUGHT: THOUGHT}


def plan(format_: ToolFormat | None = None, thinking: bool = False, forced: bool = False) -> ReadingPlan:
    if format_ is None:
        return ReadingPlan(THINK, thinking)
    return ReadingPlan(THINK.with_calls(format_), thinking, CallReader(format_, TOOLS, forced), forced)


def read(parts: Sequence[str | tuple[str]], how: ReadingPlan, cut_off: bool = False) -> list[tuple[str, str]]:
    """Return what comes of pieces of text; a tuple is a special token. Neighbours of one kind are joined."""
    channels, found = ReasoningParser(how), []
    for part in parts:
        found += channels.push(part) if isinstance(part, str) else channels.push(part[0], special=True)
    found += channels.finish(cut_off)
    assert channels.held == 0
    rows: list[tuple[str, str]] = []
    for part in found:
        if part.call is not None:
            kind, text = CALLED, f"{part.call.name} " if part.call.name else part.call.text
        else:
            kind, text = _NAMES[part.kind], part.text
        if rows and rows[-1][0] == kind:
            rows[-1] = (kind, rows[-1][1] + text)
        else:
            rows.append((kind, text))
    return rows


ADDED = (CALLED, 'add {"a": 1}')
STORIES: dict[str, tuple[str, ReadingPlan, list[tuple[str, str]]]] = {
    "text alone": (" a <b> c ", plan(JSON_CALLS), [(SAID, " a <b> c ")]),
    "nothing": ("", plan(JSON_CALLS), []),
    "a thought": ("<think>\nhm \n</think>\n\nyes", plan(), [(THOUGHT, "hm"), (SAID, "yes")]),
    "a thought from the start": ("hm</think>yes", plan(thinking=True), [(THOUGHT, "hm"), (SAID, "yes")]),
    "a thought without an end": ("<think>hm\n", plan(), [(THOUGHT, "hm")]),
    "an empty thought": ("<think>\n\n</think>\n\nyes", plan(), [(SAID, "yes")]),
    "a call": (f"<tool_call>\n{CALL}\n</tool_call>", plan(JSON_CALLS), [ADDED]),
    "a thought, words and a call": (
        f"<think>hm</think>Sure. \n<tool_call>{CALL}</tool_call>\n",
        plan(JSON_CALLS),
        [(THOUGHT, "hm"), (SAID, "Sure."), ADDED],
    ),
    "two calls": (
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
        plan(JSON_CALLS),
        [(CALLED, 'add {"a": 1}add {"a": 1}')],
    ),
    "no tools were offered": ("<tool_call>a</tool_call>", plan(), [(SAID, "<tool_call>a</tool_call>")]),
    "no call after all": (
        "a <tool_call>none</tool_call> b", plan(JSON_CALLS), [(SAID, "a <tool_call>none</tool_call> b")],
    ),
    "a call without an end": (f"<tool_call>{CALL}", plan(JSON_CALLS), [ADDED]),
    "words after the marker that ends with the answer": (
        'a [TOOL_CALLS]add[ARGS]{"a": 1}', plan(tool_format("mistral")), [(SAID, "a"), ADDED],
    ),
    "a bare call": (f" {CALL}", plan(LLAMA_CALLS), [ADDED]),
    "an answer in braces": ('{"a": 1} b', plan(LLAMA_CALLS), [(SAID, '{"a": 1} b')]),
    "braces later on": ('a {"name"', plan(LLAMA_CALLS), [(SAID, 'a {"name"')]),
    "a marker in an argument": (
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>yes',
        plan(JSON_CALLS),
        [(CALLED, 'say {"text": "</tool_call>"}'), (SAID, "yes")],
    ),
    "a marker in an argument that must come": (
        '{"name": "say", "arguments": {"text": "</tool_call>"}}',
        plan(JSON_CALLS, forced=True),
        [(CALLED, 'say {"text": "</tool_call>"}')],
    ),
    "a word like a marker": ("use <think> x </think> here", plan(), [(SAID, "use <think> x </think> here")]),
    "a call that must come": (CALL, plan(JSON_CALLS, forced=True), [ADDED]),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_an_answer_in_one_piece(name: str) -> None:
    text, how, expected = STORIES[name]
    assert read([text], fresh(how)) == expected


@quick
@given(st.sampled_from(sorted(STORIES)), sizes)
def test_an_answer_in_any_pieces(name: str, steps: list[int]) -> None:
    text, how, expected = STORIES[name]
    assert read(cut(text, steps), fresh(how)) == expected


def fresh(how: ReadingPlan) -> ReadingPlan:
    """Plans hold the reader of one answer."""
    if how.calls is None:
        return how
    return ReadingPlan(
        how.markup, how.thinking, CallReader(how.calls.format, TOOLS, how.calls.forced), how.forced
    )


def test_special_tokens_are_not_said_but_mark_and_fill_calls() -> None:
    kimi = tool_format("kimi_k2")
    call: list[str | tuple[str]] = [
        ("<|tool_calls_section_begin|>",), ("<|tool_call_begin|>",), "functions.add:0",
        ("<|tool_call_argument_begin|>",), '{"a": 1}', ("<|tool_call_end|>",),
        ("<|tool_calls_section_end|>",),
    ]  # fmt: skip
    assert read([("<|x|>",), "a", ("<|y|>",), "b", *call], plan(kimi)) == [(SAID, "ab"), ADDED]


def test_a_special_token_that_could_begin_a_marker_is_not_said_either() -> None:
    how = ReadingPlan(Markup(("<|open|>think<|sep|>", "<|close|>think<|sep|>")))
    parts: list[str | tuple[str]] = [("<|open|>",), "response", ("<|sep|>",), "yes"]
    assert read(parts, how) == [(SAID, "responseyes")]
    thought: list[str | tuple[str]] = [("<|open|>",), "think", ("<|sep|>",), "hm", ("<|close|>",), "think"]
    assert read([*thought, ("<|sep|>",), "yes"], how) == [(THOUGHT, "hm"), (SAID, "yes")]


START, CHANNEL, MESSAGE, END = ("<|start|>",), ("<|channel|>",), ("<|message|>",), ("<|end|>",)
ARGUMENTS: list[str | tuple[str]] = [("<|constrain|>",), "json", MESSAGE, '{"a": 1}', ("<|call|>",)]
HARMONY: dict[str, tuple[list[str | tuple[str]], list[tuple[str, str]]]] = {
    "for everybody": ([CHANNEL, "final", MESSAGE, "yes"], [(SAID, "yes")]),
    "in a format": ([CHANNEL, "final ", ("<|constrain|>",), "json", MESSAGE, "{}"], [(SAID, "{}")]),
    "two, the first before a call": (
        [CHANNEL, "commentary", MESSAGE, "Well.", END, START, "assistant", CHANNEL,
         "commentary to=functions.add ", *ARGUMENTS],
        [(SAID, "Well."), ADDED],
    ),
    "for a tool, by its channel": ([CHANNEL, "commentary to=functions.add ", *ARGUMENTS], [ADDED]),
    "for a tool, by its role": ([" to", "=functions.add", CHANNEL, "commentary ", *ARGUMENTS], [ADDED]),
    "for a tool, in a thought": ([CHANNEL, "analysis to=functions.add ", *ARGUMENTS], [ADDED]),
    "without a header": ([" to", " be"], [(SAID, " to be")]),
    "a header in letters": (
        [CHANNEL, "final", MESSAGE, "<|channel|>x<|message|>"], [(SAID, "<|channel|>x<|message|>")],
    ),
}  # fmt: skip


def gpt_oss() -> ReadingPlan:
    harmony = tool_format("harmony")
    markup = thinking_markup({"<|start|>", "<|channel|>", "<|message|>", "<|call|>"}).with_calls(harmony)
    return ReadingPlan(markup, calls=CallReader(harmony, TOOLS))


@pytest.mark.parametrize("name", HARMONY)
def test_gpt_oss_says_in_headers_what_comes(name: str) -> None:
    message, expected = HARMONY[name]
    assert read(message, gpt_oss()) == expected
    thought: list[str | tuple[str]] = [CHANNEL, "analysis", MESSAGE, "hm", END, START, "assistant"]
    if name != "without a header":
        assert read([*thought, *message], gpt_oss()) == [(THOUGHT, "hm"), *expected]


def test_a_header_without_an_end() -> None:
    for cut_off, expected in ((True, []), (False, [(SAID, "final yes")])):
        assert read([CHANNEL, "final yes"], gpt_oss(), cut_off) == expected


def test_a_header_for_a_tool_where_there_are_none() -> None:
    plain = ReadingPlan(gpt_oss().markup)
    assert read([CHANNEL, "commentary to=functions.add ", *ARGUMENTS], plain) == [(SAID, '{"a": 1}')]


def test_a_marker_that_the_budget_cut_is_not_shown() -> None:
    calls = plan(JSON_CALLS)
    assert read(["Let me see. <too"], calls, cut_off=True) == [(SAID, "Let me see. ")]
    assert read(["Let me see. <too"], calls) == [(SAID, "Let me see. <too")]
    assert read(["1 <"], calls, cut_off=True) == [(SAID, "1 <")]


def test_a_cut_call_of_a_family_that_is_read_at_the_end_is_shown_as_it_is() -> None:
    text = 'a[TOOL_CALLS]add[ARGS]{"a": 1}'
    assert read([text], plan(tool_format("mistral")), cut_off=True) == [(SAID, text)]


DROPPED: dict[str, tuple[ReadingPlan, list[str | tuple[str]], list[tuple[str, str]]]] = {
    "JSON": (plan(JSON_CALLS), [f"Sure. <tool_call>{CALL}</tool_call> Done."], [(SAID, "Sure.Done.")]),
    "bare": (plan(LLAMA_CALLS), ['{"name": "add", "parameters": {"a": 1}}'], []),
    "another object": (plan(LLAMA_CALLS), ['{"name": "Ada"}'], [(SAID, '{"name": "Ada"}')]),
    "gpt-oss": (gpt_oss(), [*HARMONY["two, the first before a call"][0]], [(SAID, "Well.")]),
    "cut": (plan(tool_format("mistral")), ['a[TOOL_CALLS]add[ARGS]{"a": 1'], [(SAID, "a")]),
}


@pytest.mark.parametrize("name", DROPPED)
def test_calls_that_must_not_come_are_left_out(name: str) -> None:
    how, message, expected = DROPPED[name]
    assert read(message, replace(how, dropped=True), cut_off=name == "cut") == expected


def test_calls_are_counted() -> None:
    channels = ReasoningParser(plan(JSON_CALLS))
    for expected in (1, 2):
        list(channels.push(f"<tool_call>{CALL}</tool_call>"))
        assert channels.calls == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"name": "add", "par', ""), (' [ {"type": "function"', ""), ('{"parameters": {', ""),
        ('{"na', ""), ('{"name": "a', ""), ("[", ""),
        ('{"name": "Al', '{"name": "Al'), ('{"title', '{"title'), ("[1", "[1"), ("{}", "{}"),
        ("[link]", "[link]"), ("{" + " " * 2000, "{"),
    ],
)  # fmt: skip
def test_braces_wait_as_long_as_they_may_open_a_call(text: str, shown: str) -> None:
    channels = ReasoningParser(plan(LLAMA_CALLS))
    said = [part.text for piece in text for part in channels.push(piece)]
    assert "".join(said) == shown


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


@pytest.mark.parametrize("before", ["", "a", "<think>a", "[{"])
def test_an_endless_row_of_blanks_takes_linear_work(before: str) -> None:
    channels, blanks, times = ReasoningParser(plan(LLAMA_CALLS)), " " * 10, 2000
    list(channels.push(before))
    work = handled(lambda: [list(channels.push(blanks)) for _ in range(times)])
    assert work < 20 * times * len(blanks)
