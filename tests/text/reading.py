"""Answers of models, read in pieces: for tests of what the pieces may not change."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mlxtp.text.answers import AnswerParser, AnswerPart, PartKind, ReadingPlan
from mlxtp.text.calls import CallReader
from mlxtp.text.conversation import Tool
from mlxtp.text.markups import CALLS, THOUGHTS, CallFormat, Markup

FORMATS: Mapping[str, CallFormat] = {row.format.name: row.format for row in CALLS}
THINK = Markup(("<think>", "</think>"))
MARKUPS: Mapping[str, Markup] = {row.markup.think[0]: row.markup for row in THOUGHTS if row.markup.think}


def tool(name: str, schema: Mapping[str, Any] | None = None, **properties: object) -> Tool:
    """Return a tool; `a="integer"` describes an argument, and so does a whole schema."""
    described = {key: {"type": each} if isinstance(each, str) else each for key, each in properties.items()}
    return Tool(name, "A tool.", {"type": "object", "properties": described} | dict(schema or {}))


ADD = tool("add", a="integer", b="integer")
WRITE = tool("write_file", path="string", content="string")
SEARCH = tool("search", query="string")


@dataclass(frozen=True)
class Read:
    """What the client sees."""

    said: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


def parser(
    name: str = "",
    tools: Sequence[Tool] = (ADD, WRITE, SEARCH),
    *,
    markup: Markup = THINK,
    thinking: bool = False,
    most: int = 0,
    dropped: bool = False,
) -> AnswerParser:
    reader = CallReader(FORMATS[name], tools, most=most) if name else None
    return AnswerParser(ReadingPlan(markup, thinking, reader, dropped=dropped))


def pieces(text: str, specials: Sequence[str], random: Random) -> list[tuple[str, bool]]:
    """Cut a text anywhere but within special tokens."""
    cut: list[tuple[str, bool]] = []
    split = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
    for part in split:
        if part in specials:
            cut.append((part, True))
            continue
        at = 0
        while at < len(part):
            size = random.choice((1, 2, 3, 7, 1000))
            cut.append((part[at : at + size], False))
            at += size
    return cut


def collected(parts: Sequence[AnswerPart]) -> Read:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.call is not None and part.call.name:
            assert part.call.index == len(calls)
            assert part.call.id
            calls.append((part.call.name, ""))
        elif part.call is not None:
            calls[-1] = calls[-1][0], calls[-1][1] + part.call.text
    kinds = {
        kind: "".join([part.text for part in parts if part.kind is kind])
        for kind in (PartKind.SAID, PartKind.THOUGHT)
    }
    found = [(name, json.loads(text) if text else None) for name, text in calls]
    return Read(kinds[PartKind.SAID], kinds[PartKind.THOUGHT], tuple(found))


def read(
    how: Mapping[str, Any], text: str, specials: Sequence[str] = (), *, cut: bool = False, seed: int = 0
) -> Read:
    """Read an answer in random pieces with a new parser; `how` are its arguments."""
    reading = parser(**how)
    parts: list[AnswerPart] = []
    for piece, special in pieces(text, specials, Random(seed)):
        parts += reading.push(piece, special)
    parts += reading.finish(cut)
    assert reading.held == 0
    return collected(parts)
