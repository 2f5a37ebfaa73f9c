"""Answers that a client began: only what follows is shown, read as if the model had written all of it."""

from __future__ import annotations

import re
from array import array
from itertools import accumulate
from random import Random
from typing import Any

import pytest

from mlxtp.errors import RequestError
from mlxtp.text.answers import AnswerParser, ReadingPlan, StopFinder
from mlxtp.text.conversation import ChatMessage
from mlxtp.text.token_bytes import Detokenizer, TokenBytes
from mlxtp.text.transcript import ContentDelta, Transcript

from .families import SPECIALS, WRITERS
from .reading import FORMATS, MARKUPS, THINK, Read, collected, parser, pieces

HARMONY = MARKUPS["<|channel|>analysis<|message|>"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADDED = ("add", {"a": 1})


def goes_on(reading: AnswerParser, given: str, rest: str) -> Read:
    reading.begin_with([(given, False)])
    parts = [part for sign in rest for part in reading.push(sign)]
    parts += reading.finish(False)
    assert reading.held == 0
    return collected(parts)


@pytest.mark.parametrize(
    ("how", "given", "rest", "shown"),
    [
        ({}, "Hello", " world", Read(" world")),
        ({}, "Hello ", "world", Read("world")),
        ({}, "", " Hello ", Read(" Hello ")),
        # half a marker of text, of thoughts, and of a call
        ({}, "a <", "b", Read("b")),
        ({}, "a <thi", "ng", Read("ng")),
        ({}, "<thi", "nk>hm</think>Hi", Read("Hi", "hm")),
        ({"name": "json"}, "a <tool", CALL.removeprefix("<tool"), Read("", "", (ADDED,))),
        ({"name": "json"}, "a <tool", "box>", Read("box>")),
        # thoughts: open, half closed, closed, or without their opening marker
        ({}, "<think>hm", " so</think>\n\nHi", Read("Hi", " so")),
        ({}, "<think>hm</thi", "nk>Hi", Read("Hi")),
        ({}, "<think>hm</thi", "s>", Read("", "s>")),
        ({}, "<think>\n\n</think>\n\n", "Hi", Read("Hi")),
        ({"thinking": True}, "hm ", "so</think>Hi", Read("Hi", "so")),
        ({}, "Hi", " <think> is a word", Read(" <think> is a word")),
        # calls: after text, begun, begun before their name, and none
        ({"name": "json"}, "Let me see.", f"\n{CALL}", Read("", "", (ADDED,))),
        ({"name": "json"}, f"See. {CALL[:35]}", CALL[35:], Read("", "", (ADDED,))),
        ({"name": "json"}, f"See. {CALL[:49]}", f"{CALL[49:]} Done", Read("Done", "", (ADDED,))),
        ({"name": "json"}, CALL[:14], CALL[14:], Read("", "", (ADDED,))),
        ({"name": "json"}, 'I write <tool_call>{"na', "h\"} so", Read('h"} so')),
        ({"name": "llama"}, '{"name": "a', 'dd", "parameters": {"a": 1}}', Read("", "", (ADDED,))),
        ({"name": "llama"}, '{"na', 'h": 1}', Read('h": 1}')),
        # gpt-oss: the header ended before the text
        ({"name": "harmony", "markup": HARMONY}, "Go ", "to=x ", Read("to=x ")),
    ],
)  # fmt: skip
def test_what_follows_is_read_from_the_state_that_the_beginning_leaves(
    how: dict[str, object], given: str, rest: str, shown: Read
) -> None:
    assert goes_on(parser(**how), given, rest) == shown  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRITERS)
def test_calls_of_all_families_may_be_begun_anywhere(name: str) -> None:
    wanted = ("search", {"query": "two words"})
    how: Any = {"name": name, "markup": HARMONY if name == "harmony" else THINK}
    specials, random = SPECIALS.get(name, ()), Random(1)
    words = "" if FORMATS[name].bare else "Let me see. "
    answer = words + WRITERS[name]([wanted])
    marks = [mark.span() for each in specials for mark in re.finditer(re.escape(each), answer)]
    places = [at for at in range(len(answer)) if not any(start < at < end for start, end in marks)]
    begun = 0
    for at in random.sample(places, 15):
        reading = parser(**how)
        try:
            reading.begin_with(pieces(answer[:at], specials, random))
        except RequestError:  # it had the whole call
            continue
        parts = [part for piece in pieces(answer[at:], specials, random) for part in reading.push(*piece)]
        read = collected([*parts, *reading.finish(False)])
        assert (read.calls, read.said.strip()) == ((wanted,), answer[at : len(words)].strip()), at
        begun += at > len(words)
    assert begun > 2


def test_a_whole_call_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match=r"whole call in its text.*send it in tool_calls, with its result"):
        parser("json").begin_with([(f"{CALL} and", False)])


@pytest.mark.parametrize("plan", [None, ReadingPlan(THINK)])
def test_stop_strings_count_behind_the_beginning_alone(plan: ReadingPlan | None) -> None:
    pieces = ["OP", " on STOP no"]
    table = TokenBytes(array("I", accumulate(map(len, pieces), initial=0)), "".join(pieces).encode(), False)
    transcript = Transcript(Detokenizer(table, ()), StopFinder(["STOP"]), plan=plan)
    transcript.begin_with(ChatMessage("assistant", "STOP ST"))
    events = [event for token in (0, 1) for event in transcript.push([token])]
    assert "".join([event.text for event in events if isinstance(event, ContentDelta)]) == "OP on "
    assert transcript.stopped_by == "STOP"


def test_an_initial_space_is_the_tokenizer_s_unless_text_goes_before_it() -> None:
    table = TokenBytes(array("I", [0, 3]), b" Hi", True)
    assert [Detokenizer(table, (), inside=inside).push([0]) for inside in (False, True)] == ["Hi", " Hi"]
