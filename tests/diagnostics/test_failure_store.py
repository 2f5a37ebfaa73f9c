"""Records of a failed epoch: their readers, their size, and what is not in them."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from mlxtp.diagnostics import failure_store
from mlxtp.diagnostics.failure_store import (
    FOLDER,
    KEPT,
    FailedEpoch,
    RankEnd,
    epoch_id,
    keep,
    newest,
    read_recording,
    recorder_memory,
    recording_file,
)
from mlxtp.engine.telemetry import STEP, Recorder
from mlxtp.errors import TERMINATED_STATUS, Code, ConfigError, FailureReport, GroupError, exit_status
from mlxtp.wire.messages import Error, Pong
from mlxtp.wire.rank_stats import RankStats
from mlxtp.wire.recording import RECORDING_BYTES, decode

KEY = bytes(range(32))
DESYNC = exit_status(Code.DESYNC)
FAILED = FailedEpoch(7, "studio", GroupError("rank 1 is gone"), ("studio", "mini"))


def memory(*digests: int, rows: int = 1, fed: int = 0, words: tuple[str, str] | None = None) -> bytes:
    """Return the memory of a rank's recorder that finished a step for each digest, and began one more."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        descriptor, recorder = recording_file(path), Recorder.at(path)
    try:
        for seq, digest in enumerate(digests, 1):
            place = recorder.started(seq, STEP, rows, monotonic())
            recorder.queued(place, seq, 9 * seq)
            recorder.finished(place, monotonic(), digest, fed or digest)
        recorder.started(len(digests) + 1, STEP, rows, monotonic())
        if words:
            recorder.last_words(*words)
        return read_recording(descriptor)
    finally:
        os.close(descriptor)


def end(rank: int = 0, **fields: Any) -> RankEnd:
    return RankEnd(rank, **{"pid": 4711, "status": 0, "ended_at": monotonic(), "key": KEY} | fields)


def kept(folder: Path, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank-{rank}.json").read_text()))


def steps(file: dict[str, Any]) -> list[dict[str, Any]]:
    recording = file["recording"]
    return [dict(zip(recording["columns"], row, strict=True)) for row in recording["steps"]]


def test_files_that_only_their_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = keep(tmp_path, FAILED, [end(0, memory=memory(1)), end(1)])
    finally:
        os.umask(before)
    assert sorted(path.name for path in folder.iterdir()) == ["epoch.json", "rank-0.json", "rank-1.json"]
    assert folder.name.endswith("Z-epoch-7")
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for each in (folder, tmp_path / FOLDER):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_the_oldest_failures_go(tmp_path: Path) -> None:
    theirs = tmp_path / FOLDER / "notes"
    made = [keep(tmp_path, FailedEpoch(epoch, "", FAILED.cause), [end()]) for epoch in range(1, KEPT + 1)]
    theirs.mkdir()
    made += [
        keep(tmp_path, FailedEpoch(epoch, "", FAILED.cause), [end()]) for epoch in range(KEPT + 1, KEPT + 4)
    ]
    assert sorted(set((tmp_path / FOLDER).iterdir()) - {theirs}) == sorted(made[-KEPT:])
    assert theirs.exists()


def test_after_a_clock_went_back_new_failures_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names and times are older than all others'."""
    ahead = time.time() + 1e6
    made = []
    for epoch in range(1, KEPT + 4):
        with monkeypatch.context() as patch:
            if epoch <= KEPT:
                patch.setattr(time, "time", lambda now=ahead + epoch: now)
            made.append(keep(tmp_path, FailedEpoch(epoch, "", FAILED.cause), [end()]))
        if epoch <= KEPT:
            os.utime(made[-1] / "epoch.json", (ahead + epoch, ahead + epoch))
        assert made[-1].exists()
        assert newest(tmp_path) == made[-1]
    assert made[-1].name < made[0].name
    (tmp_path / FOLDER / "29991231T000000.000Z-epoch-8").mkdir()
    assert newest(tmp_path) == made[-1], "nothing was written there"
    (tmp_path / FOLDER / "29991231T000000.000Z-epoch-8").rmdir()
    assert sorted((tmp_path / FOLDER).iterdir()) == sorted(made[-KEPT:])


def test_digests_are_alike_on_all_macs_and_tell_nothing_without_the_key(tmp_path: Path) -> None:
    ranks = [end(0, memory=memory(5, 6)), end(1, memory=memory(5, 7)), end(2, memory=memory(5, 6), key=b"x")]
    folder = keep(tmp_path, FAILED, ranks)
    ours, theirs, others = (steps(kept(folder, rank)) for rank in range(3))
    assert ours[0]["digest"] == theirs[0]["digest"] != others[0]["digest"]
    assert ours[1]["digest"] != theirs[1]["digest"]
    assert ours[0]["digest"] == ours[0]["fed"] != ours[1]["digest"]
    assert (ours[2]["digest"], ours[2]["finished_us"]) == ("", 0)
    assert KEY.hex() not in (folder / "epoch.json").read_text() + (folder / "rank-0.json").read_text()


def test_files_of_one_epoch_have_one_id(tmp_path: Path) -> None:
    here, there = (keep(tmp_path / mac, FAILED, [end(rank)]) for rank, mac in enumerate("ab"))
    assert kept(here)["epoch_id"] == kept(there, 1)["epoch_id"] == epoch_id(KEY)
    assert kept(keep(tmp_path / "c", FAILED, [end(key=b"another")]))["epoch_id"] != epoch_id(KEY)
    assert kept(keep(tmp_path / "d", FAILED, [end(key=b"")]))["epoch_id"] == ""


def test_a_rank_in_its_own_words(tmp_path: Path) -> None:
    """Those in its memory count, since what it sends may not arrive."""
    told = Error(Code.RANK_LOST, "through its pipe", 0)
    own = memory(5, words=("ranks_disagree", "in its memory"))
    folder = keep(tmp_path, FAILED, [end(0, memory=own, error=told), end(1, error=told), RankEnd(2)])
    assert kept(folder, 0)["said"] == {"code": "ranks_disagree", "detail": "in its memory"}
    assert kept(folder, 1)["said"] == {"code": "rank_lost", "detail": "through its pipe"}
    nothing = ("said", "recording", "pong", "pong_age_s")
    assert [kept(folder, 2)[name] for name in nothing] == [None] * 4, "of one that was never heard of"


@pytest.mark.parametrize(
    ("status", "how", "expected"),
    [
        (-9, {}, (None, 9, "", False)),
        (-9, {"asked_at": 1.0, "deaf": True}, (None, 9, "", True)),
        (-9, {"asked_at": 1.0}, (None, 9, "", False)),
        (-15, {"asked_at": 1.0}, (None, 15, "", True)),
        (-15, {}, (None, 15, "", False)),
        (TERMINATED_STATUS, {"asked_at": 1.0}, (TERMINATED_STATUS, None, "", True)),
        (DESYNC, {"asked_at": 1.0}, (DESYNC, None, "ranks_disagree", False)),
        (7, {}, (7, None, "", False)),
        (None, {}, (None, None, "", False)),
    ],
)
def test_ends_of_ranks(
    tmp_path: Path, status: int | None, how: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """A rank that was gone before its agent wanted to end it was not ended by it."""
    file = kept(keep(tmp_path, FAILED, [end(status=status, **how)]))
    assert (file["status"], file["signal"], file["exit_code"], file["by_agent"]) == expected


def test_what_the_agent_knew(tmp_path: Path) -> None:
    pong = Pong("decode", 1.5, 1, 12, "model", RankStats(11, 99, 3))
    report = FailureReport(1, GroupError("it is gone", Code.LINK_LOST), seen_from_outside=True)
    failed = FailedEpoch(7, "studio", FAILED.cause, ("studio", "mini"), (report,), {1: pong})
    now = monotonic()
    ends = [end(pong=pong, pong_at=now - 5), end(1, pong=pong, pong_at=now - 5, asked_at=now - 3)]
    folder = keep(tmp_path, failed, ends)
    told = json.loads((folder / "epoch.json").read_text())
    assert told["cause"] == {"code": "rank_lost", "detail": "rank 1 is gone"}
    assert told["reports"] == [{"rank": 1, "code": "link_lost", "detail": "it is gone", "outside": True}]
    assert told["pongs"]["1"]["step"] == 12
    assert told["hosts"] == ["studio", "mini"]
    assert kept(folder, 0)["pong_age_s"] >= 5
    assert 2 <= kept(folder, 1)["pong_age_s"] < 3, "no heartbeat is asked for while a rank is ended"


def test_a_folder_that_others_may_read_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        keep(tmp_path, FAILED, [end()])
    assert list((tmp_path / FOLDER).iterdir()) == []


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_recording_that_has_room_in_part_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes the first bytes without an error. What it took it gets back, and the descriptor."""
    write, opened, closed = os.write, os.open, list[int]()
    monkeypatch.setattr(
        os, "write", lambda to, data: write(to, data[:5000]) if len(data) == RECORDING_BYTES else full()
    )
    monkeypatch.setattr(os, "open", lambda *how: closed.append(opened(*how)) or closed[-1])
    with pytest.raises(OSError, match="No space left"):
        recording_file(tmp_path / "recording")
    assert list(tmp_path.iterdir()) == []
    [descriptor] = closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("anonymous", [True, False])
def test_a_recorder_has_its_memory_elsewhere_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anonymous: bool
) -> None:
    if not anonymous:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("only Linux has files without a name")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(failure_store, "recording_file", full)
    found = recorder_memory(tmp_path / "epoch" / "recording")
    assert found is not None
    descriptor, path = found
    try:
        recorder = Recorder.at(path)
        recorder.started(7, STEP, 1, monotonic())
        recording = decode(read_recording(descriptor))
    finally:
        os.close(descriptor)
    assert recording is not None
    assert [step.seq for step in recording.steps] == [7]
    assert list((tmp_path / "tmp").iterdir()) == ([] if anonymous else [path])
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"the disk is full, nothing can be written in {tmp_path / 'epoch'}" in warning.getMessage()
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert recorder_memory(tmp_path / "epoch" / "recording") is None
    assert len(caplog.records) == 2
