"""The file of an agent's beliefs is written in a thread: in order, and to the end before the agent ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from mlxtp.cluster import state_file
from mlxtp.cluster.cluster_state import ClusterState
from mlxtp.cluster.state_file import Saving
from mlxtp.errors import UserError
from mlxtp.wire.cluster_messages import RosterSaved

WAIT_S = 20
SAVE = state_file.save


def kept(epoch: int) -> state_file.SavedState:
    return state_file.SavedState(ClusterState(epoch=epoch))


def test_a_slow_drive_holds_up_nothing_and_the_latest_state_wins(
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
        disk = Saving(tmp_path, reports.append)
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
        disk = Saving(tmp_path, lambda _report: None)
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
        disk = Saving(tmp_path, lambda _report: None)
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
