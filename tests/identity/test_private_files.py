"""Files that have to survive a power cut: what macOS is asked for, and where it knows no such thing."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from mlxtp.cluster import state_file
from mlxtp.cluster.cluster_state import ClusterState
from mlxtp.errors import UserError
from mlxtp.identity.private_files import sync_folder, temporary_folder, write_private
from mlxtp.models import hub_cache

F_FULLFSYNC = 51
"""As macOS has it."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the system, as on a Mac: "full" or "sync", and renames."""
    found: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def control(descriptor: int, command: int) -> int:
        assert command == F_FULLFSYNC
        os.fstat(descriptor)
        found.append("full")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (found.append("sync"), fsync(descriptor))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (found.append("rename"), replace(self, to))[1])
    return found


def test_on_a_mac_the_drive_itself_has_written_it(tmp_path: Path, asked: list[str]) -> None:
    """Also what an agent remembers, and which commit a branch is."""
    write_private(tmp_path / "file", b"content")
    assert asked == ["full", "rename", "full"]
    state_file.save(tmp_path, state_file.SavedState(ClusterState()))
    assert asked[3:] == ["full", "rename", "full"]
    repo = hub_cache.Repo("owner/name", tmp_path)
    repo.refer(["main"], "c" * 40, lambda: False, by_hub=True)
    assert asked[6:] == ["full", "rename", "full", "rename", "full"]
    assert (repo.folder / "refs" / "main").read_text() == "c" * 40


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_that_knows_no_such_thing_is_asked_for_what_it_knows(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(_descriptor: int, _command: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    write_private(tmp_path / "file", b"content")
    assert asked == ["sync", "rename", "sync"]


def test_a_drive_that_cannot_write_is_no_success(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_descriptor: int, _command: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "fcntl", broken)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
    assert asked == []


def test_where_no_disk_has_room_for_a_temporary_folder_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    with (
        pytest.raises(UserError, match=r"cannot be made: No usable .*; free space there, or set TMPDIR"),
        temporary_folder("mlxtp-"),
    ):
        pytest.fail("there is no folder")
