"""Markdown in a terminal while it is being written: finished blocks stay, the last one is redrawn."""

from __future__ import annotations

import re

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown
from rich.segment import Segment

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def settled(text: str) -> int:
    """Return the number of characters that later text cannot change: those before the last block.

    A block begins after an empty line, outside of code, at a line that is not indented.
    """
    fence, position, end, empty = "", 0, 0, False
    for line in text.splitlines(keepends=True):
        if not fence and empty and not line[0].isspace():
            end = position
        empty = not line.strip()
        if (mark := _FENCE.match(line)) is not None:
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        position += len(line)
    return end


class Drawn:
    """A Markdown text, or its last `lines`, without trailing spaces."""

    def __init__(self, text: str, lines: int | None = None) -> None:
        self._text = text
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = [_trimmed(line) for line in console.render_lines(Markdown(self._text), options, pad=False)]
        while drawn and not drawn[0]:
            drawn.pop(0)
        while drawn and not drawn[-1]:
            drawn.pop()
        for line in drawn if self._lines is None else drawn[-max(1, self._lines) :]:
            yield from line
            yield Segment.line()


def _trimmed(line: list[Segment]) -> list[Segment]:
    """Remove trailing spaces, except those with a background colour, such as behind code."""
    while line and not line[-1].text.strip() and not (line[-1].style and line[-1].style.bgcolor):
        line = line[:-1]
    if line and not (line[-1].style and line[-1].style.bgcolor):
        return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)]
    return line
