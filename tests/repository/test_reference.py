"""The pages and the command that are read off the code say what the code says now."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from mlxtp.cli.main import app
from mlxtp.wire.codecs import Message
from mlxtp.wire.frames import MAX_DEPTH, MAX_FRAME, MAX_ITEMS, MAX_OBJECTS, MAX_OPENING_FRAME, messages
from mlxtp.wire.messages import PROTOCOL_VERSION
from mlxtp.wire.protocol import LinkKind, RequestFailed, table
from scripts.reference import DOCS, PAGES

from ..pseudo_terminal import terminal


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_is(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make reference`"


@pytest.fixture(scope="module")
def printed() -> str:
    """What `mlxtp wire` prints for a file or a pipe."""
    done = CliRunner().invoke(app, ["wire"])
    assert done.exit_code == 0
    return done.stdout


def test_wire_begins_with_the_version_and_the_limits_of_a_frame(printed: str) -> None:
    beginning = printed.partition("\n## ")[0]
    assert f"Protocol version {PROTOCOL_VERSION}." in beginning
    for limit in (MAX_OPENING_FRAME, MAX_FRAME, MAX_DEPTH, MAX_ITEMS, MAX_OBJECTS):
        assert re.search(rf"\b{limit}\b", beginning)


def test_wire_prints_the_fields_of_each_message(printed: str) -> None:
    sections = dict(re.findall(r"^### (0x\w+ \w+)\n(.*?)(?=^##|\Z)", printed, re.MULTILINE | re.DOTALL))
    numbered = {f"0x{number:02X} {each.__name__}": each for number, each in sorted(messages().items())}
    assert list(sections) == list(numbered)
    for title, message in numbered.items():
        rows = re.findall(r"^\| `(\w+)` \| \S", sections[title], re.MULTILINE)
        assert rows == [field.name for field in fields(message)]


def test_wire_prints_the_parts_that_fields_name(printed: str) -> None:
    titles = re.findall(r"^### (?:0x\w+ )?(\w+)$", printed, re.MULTILINE)
    holds = re.findall(r"^\| `\w+` \| (?:a list of .* )?([A-Z]\w+) \|", printed, re.MULTILINE)
    assert len(set(holds)) > 5
    assert [name for name in holds if name not in titles] == []


@pytest.mark.parametrize("kind", LinkKind)
def test_wire_prints_the_moves_of_each_link(printed: str, kind: LinkKind) -> None:
    section = printed.partition(f"\n### {str(kind).capitalize()}: ")[2].partition("\n#")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", section, re.MULTILINE)[1:]
    shown = {
        (state, sender, name, after or state)
        for state, sender, names, after in rows
        for name in names.split(", ")
    }
    assert shown == {
        (str(state), kind.who(side), _said(message), str(after))
        for state, sides in table(kind).items()
        for side, moves in sides.items()
        for message, after in moves.items()
    }


@pytest.mark.slow
def test_a_terminal_shows_the_messages_laid_out() -> None:
    with terminal("wire") as screen:
        assert screen.end() == 0
    assert "Pipe to rank 0: the agent and rank 0" in screen.shown
    assert "0x01 Hello" in screen.shown
    assert [mark for mark in ("\n#", "|---|") if mark in screen.shown] == []


def _said(message: type[Message]) -> str:
    return "Error with a uid" if message is RequestFailed else message.__name__
