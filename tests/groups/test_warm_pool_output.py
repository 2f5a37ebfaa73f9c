"""Output of rank processes, as lines of the agent's log: real processes, which only write."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mlxtp.groups.warm_pool import MAX_LINE, WarmPool, WorkerOutput, log_lines

from ..live_cluster import WAIT_S
from .scenes import sees

Said = list[tuple[str, Mapping[str, int]]]


def said_by(program: str, about: Mapping[str, int], *, close_early: bool = False) -> Said:
    """Return the output of a process with this program, by the time that it is gone."""
    said: Said = []

    async def run() -> None:
        command = (sys.executable, "-c", program)
        async with WarmPool(command, Path(), 0, lambda line, of: said.append((line, of))) as spares:
            started = await spares.start(())
            lines = started.lines
            assert lines is not None
            lines.about = about
            started.pipe.close()
            await asyncio.wait_for(started.process.wait(), WAIT_S)
            if not close_early:
                await sees(lambda: not lines.open, "the end of what it writes")

    asyncio.run(run())
    return said


def test_both_outputs_are_heard_line_by_line_with_epoch_and_rank() -> None:
    program = "import sys; print('one', flush=True); print('two\\n\\nthree', file=sys.stderr)"
    about = {"epoch": 3, "rank": 1}
    assert said_by(program, about) == [("one", about), ("two", about), ("three", about)]


def test_a_last_word_without_an_end_of_line_is_heard() -> None:
    assert [line for line, _ in said_by("import os; os.write(2, b'abort')", {})] == ["abort"]


def test_what_was_written_before_the_end_is_heard_in_any_order() -> None:
    lines = said_by("import os; os.write(2, b'a\\nb\\nlast')", {}, close_early=True)
    assert [line for line, _ in lines] == ["a", "b", "last"]


def test_what_is_still_in_the_pipe_at_the_end_is_heard() -> None:
    said: list[str] = []

    async def run() -> None:
        lines = WorkerOutput(lambda line, _: said.append(line))
        os.write(lines.descriptor, b"one\nlast")
        lines.close()
        os.close(lines.descriptor)

    asyncio.run(run())
    assert said == ["one", "last"]


def test_a_line_without_end_is_cut_and_does_not_grow() -> None:
    lines = [line for line, _ in said_by(f"import os; os.write(1, b'x' * {3 * MAX_LINE})", {})]
    assert max(map(len, lines)) <= MAX_LINE
    assert sum(map(len, lines)) == 3 * MAX_LINE


def test_more_than_a_pipe_holds_goes_through() -> None:
    lines = said_by("for i in range(20000): print(i)", {})
    assert [line for line, _ in lines] == [str(i) for i in range(20000)]


def test_bytes_that_are_no_text_are_heard_all_the_same() -> None:
    assert [line for line, _ in said_by("import os; os.write(1, b'\\xff\\xfe ok\\n')", {})] == [
        "\ufffd\ufffd ok"
    ]


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_no_descriptor_is_left() -> None:
    before = descriptors()
    said_by("print(1)", {})
    said_by("print(1)", {}, close_early=True)
    assert descriptors() <= before


def test_a_process_that_cannot_be_started_leaves_nothing() -> None:
    before = descriptors()

    async def run() -> None:
        async with WarmPool(("/no/such/program",), Path(), 0, lambda _line, _about: None) as spares:
            with pytest.raises(OSError, match="such"):
                await spares.start(())

    asyncio.run(run())
    assert descriptors() <= before


def test_a_line_is_logged_with_epoch_and_rank(caplog: pytest.LogCaptureFixture) -> None:
    log_lines("[ring] 100%", {"epoch": 3, "rank": 1})
    [record] = caplog.records
    assert (record.getMessage(), record.levelno) == ("[ring] 100%", logging.WARNING)
    assert (vars(record)["epoch"], vars(record)["rank"]) == (3, 1)
