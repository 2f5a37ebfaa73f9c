"""Calls as each family's template writes them, read back in random pieces: the same, whatever is in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from mlxtp.text.answers import AnswerParser, ReadingPlan
from mlxtp.text.call_syntax import TaggedSyntax
from mlxtp.text.calls import CallFormat, CallReader
from mlxtp.text.conversation import Tool
from mlxtp.text.markups import CALLS, JSON_CALLS, Markup, call_format

from .families import SPECIALS, WRITERS
from .reading import ADD, FORMATS, MARKUPS, THINK, collected, read, tool

pytestmark = pytest.mark.fault

NAMES = ("add", "fs-v2.read_file", "a/b", "ns__do.it", "x")
KEYS = ("path", "content", "user-id", "n", "opt.x", "flag")
TYPES = ("string", "string", "integer", "number", "boolean", "array", "object")
WORDS = [
    *"\"'\\{}[]()\né=ab", "  ", "word ", ", ", ": ", "\t", "```", "<think>", "</think>", "</tool_call>",
    "<function=add>", "</function>", "<parameter=x>", '<parameter name="x">', "</parameter>", "<arg_key>",
    "</arg_value>", "</invoke>",
]  # fmt: skip


def tagged(format_: CallFormat) -> list[TaggedSyntax]:
    return [syntax for syntax in format_.syntaxes if isinstance(syntax, TaggedSyntax)]


def words(format_: CallFormat, alone: bool) -> list[str]:
    """Return what texts of arguments are made of; where a call stands `alone`, of tags of values, too."""
    if any(syntax.nested for syntax in tagged(format_)):  # where no schema says that text inside is not JSON
        return [each for each in WORDS if each not in "[{"]
    if format_.name in SPECIALS:
        return WORDS
    found = [*WORDS, *format_.starts, *format_.ends]
    if alone:
        return found
    return [each for each in found if not any(tag.tags.search(each) for tag in tagged(format_))]


def ambiguous(format_: CallFormat, calls: Any) -> bool:
    """Return True if a text closes itself and opens another value: that can be read in two ways."""
    for syntax in tagged(format_):
        ends = "|".join(map(re.escape, (syntax.end, *format_.ends)))
        pattern = rf"{syntax.closings.pattern}(?:\s*|.*(?:{ends}).*){syntax.opening.pattern}"
        if any(re.search(pattern, str(each), re.DOTALL) for _, given in calls for each in given.values()):
            return True
    return False


def value(random: Random, letters: Sequence[str], kind: str, depth: int = 0) -> Any:
    match kind:
        case "string":
            return "".join(random.choices(letters, k=random.randrange(8)))
        case "integer":
            return random.randrange(-5, 10**6)
        case "number":
            return random.choice((0.5, -1.25, 3000.5))
        case "boolean":
            return random.random() < 0.5
        case "array":
            return [
                value(random, letters, random.choice(TYPES[:5]), 1) for _ in range(random.randrange(1, 4))
            ]
    kinds = ("string", "integer") if depth else ("string", "integer", "object")
    return {
        key: value(random, letters, random.choice(kinds), 1)
        for key in random.sample("klm", random.randrange(1, 4))
    }


def case(random: Random, format_: CallFormat) -> tuple[list[Tool], list[tuple[str, dict[str, Any]]]]:
    """Return tools, and calls of them."""
    tools = [
        tool(name, **{key: random.choice(TYPES) for key in random.sample(KEYS, random.randrange(len(KEYS)))})
        for name in random.sample(NAMES, random.randrange(1, 4))
    ]
    count = random.randrange(1, 4)
    letters = words(format_, alone=count == 1)
    while True:
        calls = []
        for chosen in random.choices(tools, k=count):
            described = (chosen.parameters or {})["properties"].items()
            given = {
                key: value(random, letters, each["type"]) for key, each in described if random.random() < 0.8
            }
            calls.append((chosen.name, given))
        if not ambiguous(format_, calls):
            return tools, calls


def check(name: str, seed: int) -> None:
    random = Random(f"{name} {seed}")
    tools, calls = case(random, FORMATS[name])
    before = (
        random.choice(("", "I will.\n", "Sure. "))
        if not FORMATS[name].bare and not FORMATS[name].addressed
        else ""
    )
    text = before + WRITERS[name](calls)
    markup = MARKUPS["<|channel|>analysis<|message|>"] if FORMATS[name].addressed else Markup()
    how = {"name": name, "tools": tools, "markup": markup}
    found = read(how, text, SPECIALS.get(name, ()), seed=seed)
    assert (found.said.strip(), found.calls) == (before.strip(), tuple(calls)), text


@pytest.mark.parametrize("times", [100, pytest.param(10_000, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_read_as_they_were_written(name: str, times: int) -> None:
    for seed in range(times):
        check(name, seed)


def test_each_row_has_a_writer() -> None:
    assert WRITERS.keys() == FORMATS.keys()
    assert len(FORMATS) == len(CALLS)


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.format.name)
def test_a_row_is_found_by_what_it_shows(row: Any) -> None:
    for group in row.texts:
        assert call_format(f"tools {' x '.join(group)}", ()) is row.format
    if row.tokens:
        assert call_format("tools", row.tokens) is row.format


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.format.name)
def test_a_call_in_words_is_read_back(row: Any) -> None:
    if row.format.addressed or not row.format.starts:
        return
    text = row.format.written("add", {"a": 1, "b": "two"})
    tools = (tool("add", a="integer", b="string"),)
    assert read({"name": row.format.name, "tools": tools}, text).calls == (("add", {"a": 1, "b": "two"}),)


def test_what_shows_no_markup() -> None:
    assert call_format("x", {"a"}) is None


@pytest.mark.parametrize("name", ["mistral", "json"])
def test_a_format_beside_another_reads_the_calls_of_both(name: str) -> None:
    both = FORMATS["mistral"].beside(JSON_CALLS)
    answer = AnswerParser(ReadingPlan(THINK, calls=CallReader(both, (ADD,))))
    written = WRITERS[name]([("add", {"a": 1, "b": 2})])
    assert collected([*answer.push(written), *answer.finish(False)]).calls == (("add", {"a": 1, "b": 2}),)
