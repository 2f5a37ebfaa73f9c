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


def said_by(program: str, *, close_early: bool = False) -> list[str]:
    """Return the output of a process with this program, by the time that it is gone."""
    said: list[str] = []

    async def run() -> None:
        command = (sys.executable, "-c", program)
        async with WarmPool(command, Path(), 0, lambda line, _: said.append(line)) as spares:
            started = await spares.start(())
            lines = started.lines
            started.pipe.close()
            await asyncio.wait_for(started.process.wait(), WAIT_S)
            if not close_early:
                await sees(lambda: not lines.open, "the end of what it writes")

    asyncio.run(run())
    return said


BOTH = "import sys; print('one', flush=True); print('two\\n\\nthree', file=sys.stderr)"


@pytest.mark.parametrize(
    ("program", "early", "lines"),
    [
        pytest.param(BOTH, False, ["one", "two", "three"], id="both outputs, line by line"),
        pytest.param("import os; os.write(2, b'abort')", False, ["abort"], id="no end of line"),
        pytest.param(
            "import os; os.write(2, b'a\\nb\\nlast')", True, ["a", "b", "last"], id="before the end"
        ),
        pytest.param(
            "for i in range(20000): print(i)", False, [*map(str, range(20000))], id="more than a pipe holds"
        ),
        pytest.param("import os; os.write(1, b'\\xff\\xfe ok\\n')", False, ["\ufffd\ufffd ok"], id="no text"),
    ],
)
def test_all_that_a_process_writes_is_heard(program: str, early: bool, lines: list[str]) -> None:
    assert said_by(program, close_early=early) == lines


def test_what_is_still_in_the_pipe_at_the_end_is_heard_with_its_epoch_and_rank() -> None:
    said, about = list[tuple[str, Mapping[str, int]]](), {"epoch": 3, "rank": 1}

    async def run() -> None:
        lines = WorkerOutput(lambda line, of: said.append((line, of)))
        lines.about = about
        os.write(lines.descriptor, b"one\nlast")
        lines.close()
        os.close(lines.descriptor)

    asyncio.run(run())
    assert said == [("one", about), ("last", about)]


def test_a_line_without_end_is_cut_and_does_not_grow() -> None:
    lines = said_by(f"import os; os.write(1, b'x' * {3 * MAX_LINE})")
    assert max(map(len, lines)) <= MAX_LINE
    assert sum(map(len, lines)) == 3 * MAX_LINE


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_no_descriptor_is_left() -> None:
    before = descriptors()
    said_by("print(1)")
    said_by("print(1)", close_early=True)
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
