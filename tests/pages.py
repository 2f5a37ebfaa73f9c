"""The documents as tests read them: fenced blocks, the commands in those, and code in sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OTHERS = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md"))
DOCS = sorted([*_OTHERS, *(ROOT / "docs").glob("*.md")])

_FENCED = re.compile(r"^ *```(?P<info>[^\n`]*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_BETWEEN = {"|", "||", "&&", ";"}


@dataclass(frozen=True, slots=True)
class Block:
    """`info` says what it is, such as sh; `before` is the last line of text before it."""

    before: str
    info: str
    text: str

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """Return commands: all of an `sh` block, the lines of a `console` block that have a prompt."""
        whole = self.text.replace("\\\n", " ")
        if self.info == "sh":
            lines = whole.splitlines()
        elif self.info == "console":
            lines = [line.removeprefix("$ ") for line in whole.splitlines() if line.startswith("$ ")]
        else:
            lines = []
        return tuple(command for line in lines for command in simple_commands(line))


def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text()
    found = []
    for fence in _FENCED.finditer(text):
        before = text[: fence.start()].rstrip().rpartition("\n")[2]
        found.append(Block(before, fence["info"].strip(), fence["text"]))
    return tuple(found)


def code_in_sentences(page: Path) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", _FENCED.sub("\n\n", page.read_text())):
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", paragraph):
            yield " ".join(code.replace("\\|", "|").split())


def simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a line, and of those within `$(…)`; without variables and `sudo`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in _BETWEEN:
            words.append(word)
            yield from (tuple(shlex.split(inner)) for inner in re.findall(r"\$\(([^)]*)\)", word))
            continue
        if ">" in words:
            del words[words.index(">") :]
        while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
            del words[0]
        if words:
            yield tuple(words)
        words = []
