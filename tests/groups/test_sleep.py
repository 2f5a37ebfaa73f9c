"""Sleep, by clocks that a test moves; staying awake, by a command that only waits."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxtp.groups import sleep
from mlxtp.groups.sleep import CAFFEINATE, Clocks, KeepAwake, clocks, slept_s, watch_sleep

from .scenes import in_a_loop, run, sees, within

AT = Clocks(100.0, 5000.0)


@pytest.mark.parametrize(
    ("awake", "all_", "slept"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 1.5, 0.0),
        (1.0, 301.0, 300.0),
        (400.0, 400.0, 0.0),
        (0.0, 1e6, 1e6),
        (1.0, 0.5, 0.0),
    ],
    ids=["awake", "jitter", "asleep", "stopped, not asleep", "for days", "the other way"],
)
def test_what_one_clock_has_and_the_other_has_not_was_sleep(awake: float, all_: float, slept: float) -> None:
    assert slept_s(AT, Clocks(AT.awake + awake, AT.all + all_)) == slept


def test_the_clocks_of_this_machine_go_on_together_while_it_is_awake() -> None:
    before = clocks()
    after = clocks()
    assert after.awake >= before.awake
    assert after.all >= before.all
    assert slept_s(before, after) == 0.0


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "TICK_S", 0.01)


@in_a_loop()
async def test_waking_is_told_once() -> None:
    moments: Iterator[Clocks] = iter([AT, Clocks(101, 5001), Clocks(102, 5602), Clocks(103, 5603)])
    last = Clocks(104, 5604)
    woke: list[float] = []
    task = asyncio.ensure_future(watch_sleep(woke.append, lambda: True, None, lambda: next(moments, last)))
    await sees(lambda: bool(woke))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert woke == [600.0]


def command(folder: Path, code: str) -> tuple[str, ...]:
    """Stands for caffeinate: notes its arguments, then does as `code` says."""
    script = folder / "caffeinate.py"
    note = f"open({str(folder / 'args')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')"
    script.write_text(f"import sys, time\n{note}\n{code}\n")
    return (sys.executable, str(script), "-i")


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def test_a_mac_is_kept_awake_while_it_serves_and_no_longer(tmp_path: Path) -> None:
    serves = False

    async def story() -> None:
        nonlocal serves
        before = len(children())
        keep = KeepAwake(command(tmp_path, "time.sleep(60)"))
        task = asyncio.ensure_future(watch_sleep(lambda _: None, lambda: serves, keep))
        await asyncio.sleep(0.05)
        assert len(children()) == before
        for _ in range(2):
            serves = True
            await sees(lambda: len(children()) == before + 1)
            await sees((tmp_path / "args").exists)
            serves = False
            await sees(lambda: len(children()) == before)
        serves = True
        await sees(lambda: len(children()) == before + 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(children()) == before

    run(within(story()))
    assert (tmp_path / "args").read_text().splitlines()[0] == f"-i -w {os.getpid()}"


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "ends at once"])
@in_a_loop()
async def test_a_command_that_does_not_work_is_said_once_and_not_tried_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, missing: bool
) -> None:
    keep = KeepAwake(("/no/such/command",) if missing else command(tmp_path, "sys.exit(3)"))
    task = asyncio.ensure_future(watch_sleep(lambda _: None, lambda: True, keep))
    await sees(lambda: "may fall asleep" in caplog.text)
    await asyncio.sleep(0.1)
    assert caplog.text.count("may fall asleep") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_real_command_is_the_one_that_macs_have() -> None:
    """As its manual has it: -i prevents idle sleep, -w PID ends with that process. Never run on a Mac yet."""
    assert KeepAwake()._command == (*CAFFEINATE, "-w", str(os.getpid()))
    assert CAFFEINATE == ("/usr/bin/caffeinate", "-i")
