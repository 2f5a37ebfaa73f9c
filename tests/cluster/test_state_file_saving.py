"""The file of an agent's beliefs is written in a thread: in order, and to the end before the agent ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.cluster import state_file
from mlxtp.cluster.cluster_state import ClusterState, Roster
from mlxtp.cluster.state_file import RosterSaved, Saving
from mlxtp.errors import UserError
from mlxtp.wire.cluster_messages import RosterEntry

WAIT_S = 20
SAVE = state_file.save


def saving(home: Path, reports: list[RosterSaved]) -> Saving:
    table = SimpleNamespace(on=lambda *_: None, publish=lambda _kind, row: reports.append(row))
    return Saving(home, cast(Any, table))


def kept(epoch: int) -> state_file.SavedState:
    return state_file.SavedState(ClusterState(epoch=epoch))


def test_a_slow_drive_delays_nothing_and_the_latest_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, alone, written = threading.Event(), threading.Event(), threading.Lock(), list[int]()

    def slow(home: Path, what: state_file.SavedState) -> None:
        assert alone.acquire(blocking=False)
        began.set()
        assert go_on.wait(WAIT_S)
        SAVE(home, what)
        written.append(what.beliefs.epoch)
        alone.release()

    async def story() -> None:
        reports: list[RosterSaved] = []
        disk = saving(tmp_path, reports)
        live = asyncio.create_task(disk.save(kept(1)))
        assert await asyncio.to_thread(began.wait, WAIT_S)
        live.cancel()  # as at the agent's end
        await asyncio.gather(live, return_exceptions=True)
        last = asyncio.create_task(disk.save(kept(2)))
        await asyncio.sleep(0)
        assert not reports
        assert not written
        go_on.set()
        await last
        await disk.save(kept(2))  # the file has it
        await disk.close()
        assert written == [1, 2]
        assert reports == [RosterSaved(ClusterState().roster.digest())]

    monkeypatch.setattr(state_file, "save", slow)
    asyncio.run(story())
    assert state_file.load(tmp_path) == (kept(2), "")


def test_the_end_waits_for_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(home: Path, what: state_file.SavedState) -> None:
        began.set()
        assert go_on.wait(WAIT_S)
        SAVE(home, what)

    async def story() -> None:
        disk = saving(tmp_path, [])
        live = asyncio.create_task(disk.save(kept(1)))
        assert await asyncio.to_thread(began.wait, WAIT_S)
        live.cancel()
        closing = asyncio.create_task(disk.close())
        await asyncio.gather(live, return_exceptions=True)
        assert not closing.done()
        go_on.set()
        await closing
        assert state_file.load(tmp_path)[0] == kept(1)

    monkeypatch.setattr(state_file, "save", slow)
    asyncio.run(story())


def test_what_could_not_be_written_is_written_later_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_home: Path, _kept: state_file.SavedState) -> None:
        raise UserError("no space left")

    async def story() -> None:
        disk = saving(tmp_path, [])
        with monkeypatch.context() as patched:
            patched.setattr(state_file, "save", full)
            await disk.save(kept(1))
            await disk.save(kept(1))
        await disk.save(kept(1))
        await disk.close()
        await disk.save(kept(2))  # by a round while the agent ends

    asyncio.run(story())
    assert state_file.load(tmp_path)[0] == kept(1)
    assert [record.getMessage() for record in caplog.records] == ["no space left"]


def test_members_have_a_roster_once_they_report_this_very_one() -> None:
    roster = Roster().merged(RosterEntry(each * 32, each, each * 64, False, 1) for each in "ab")
    saved, rows = RosterSaved(roster.digest()), list[tuple[str, RosterSaved]]()
    heard: list[Callable[[str, RosterSaved], object]] = []
    table = SimpleNamespace(on=lambda handler, _kind: heard.append(handler), others=lambda _kind: rows)

    async def story() -> None:
        disk = Saving(Path(), cast(Any, table))
        waiting = asyncio.ensure_future(disk.elsewhere(lambda: roster))
        for node_id, row in (("a" * 32, RosterSaved(saved.roster ^ 1)), ("c" * 32, saved)):
            rows.append((node_id, row))
            heard[0](node_id, row)
            await asyncio.sleep(0.01)
            assert not waiting.done()
        rows.append(("b" * 32, saved))
        heard[0](*rows[-1])
        assert await waiting == ["b" * 32]
        await disk.close()

    asyncio.run(story())
