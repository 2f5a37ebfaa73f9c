"""Caches on disk as an agent sees them: their room, what is listed, and what `clear` leaves."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from mlxtp.errors import UserError
from mlxtp.models import disk_cache
from mlxtp.models.disk_cache import (
    MOST_BYTES,
    DiskRoom,
    by_model,
    clear,
    folder_in,
    layouts,
    ranks_in,
    room_in,
)

Usage = namedtuple("Usage", "total used free")
HUB = "/Users/a/hub/models--org--some--model/snapshots/0123abc"
AT = 1_700_000_000.0


def layout(
    folder: Path, name: str, model: str, rank: int = 0, ranks: int = 1, sizes: tuple[int, ...] = (10,)
) -> Path:
    """Write what a rank leaves, block i last used at AT + i."""
    inside = folder / name
    inside.mkdir(mode=0o700, parents=True)
    about = {"model": model, "rank": rank, "ranks": ranks, "kv_bits": 8}
    (inside / "about.json").write_text(json.dumps(about))
    for index, size in enumerate(sizes):
        (inside / f"{index:032x}").write_bytes(bytes(size))
        os.utime(inside / f"{index:032x}", (AT + index, AT + index))
    return inside


def used(folder: Path) -> int:
    return int((folder / ".used").read_text())


@pytest.mark.parametrize(
    ("free", "kept", "expected"),
    [
        (100 * 10**9, "0", 10 * 10**9),
        (90 * 10**9, str(10 * 10**9), 10 * 10**9),  # what it keeps does not shrink its room
        (10**13, "0", MOST_BYTES),
        (0, "0", 0),
        *((1000, account, 100) for account in ("", "-5", "many")),  # no rank wrote that
        (1000, "9" * 5000, MOST_BYTES),
    ],
)
def test_the_room_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kept: str, expected: int
) -> None:
    assert room_in(tmp_path / "missing", None) == DiskRoom("", 0)
    assert [room_in(tmp_path, size).bytes for size in (7, 0)] == [7, 0], "a size that is set counts"
    folder_in(tmp_path).mkdir()
    (folder_in(tmp_path) / ".used").write_text(kept)
    monkeypatch.setattr(disk_cache.shutil, "disk_usage", lambda _: Usage(10**14, 0, free))
    folder = str(folder_in(tmp_path)) if expected else ""
    assert room_in(tmp_path, None) == DiskRoom(folder, expected)


def test_blocks_are_listed_by_model_with_the_name_that_users_know(tmp_path: Path) -> None:
    layout(tmp_path, "a", HUB, 1, 2, sizes=(10, 20))
    layout(tmp_path, "b", HUB, 0, 2, sizes=(10, 20, 30))
    layout(tmp_path, "c", "/models/plain")
    layout(tmp_path, "d", "/models/empty", sizes=())
    (tmp_path / "a" / ".0123.new").write_bytes(bytes(500))
    (tmp_path / ".used").write_text("100")
    plain, org = by_model(layouts(tmp_path))
    assert plain["model"] == "/models/plain"
    assert (org["model"], org["blocks"], org["bytes"], org["used_at"]) == ("org/some--model", 5, 90, AT + 2)
    assert [(each["rank"], each["ranks"], each["kv_bits"], each["bytes"]) for each in org["layouts"]] == [
        (0, 2, 8, 60),
        (1, 2, 8, 30),
    ]


def test_the_rank_of_the_newest_caches_is_told(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    for at, (name, model, rank, ranks) in enumerate(
        [("a", HUB, 1, 2), ("b", HUB, 0, 3), ("c", "/models/plain/", 1, 2), ("d", "/models/alone", 0, 1)]
    ):
        os.utime(layout(folder, name, model, rank, ranks), (AT + at, AT + at))
    for name, about in (("e", "[1"), ("f", "[" * 100_000), ("g", '{"ranks": 1e999}')):
        (folder / name).mkdir()
        (folder / name / "about.json").write_text(about)
    assert ranks_in(tmp_path) == ("1 plain", "0 some--model")
    assert ranks_in(tmp_path / "nowhere") == ()


def test_nothing_on_disk_and_what_is_no_cache(tmp_path: Path) -> None:
    assert layouts(tmp_path / "missing") == []
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(layout(tmp_path / "else", "a", "m"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "block").write_bytes(bytes(3))
    for about in ('["m"]', "[" * 100_000, '{"model": "m", "rank": 1e999}'):
        (tmp_path / "bad" / "about.json").write_text(about)
        [unknown] = layouts(tmp_path)
        assert (unknown.model, unknown.bytes) == ("", 3)


def test_a_model_is_cleared_and_the_account_follows(tmp_path: Path) -> None:
    one = layout(tmp_path, "a", HUB, sizes=(10, 20))
    other = layout(tmp_path, "b", "/models/plain", sizes=(5,))
    (one / ".0123.new").write_bytes(bytes(7))
    (tmp_path / ".used").write_text("42")  # 7 of them for what a rank is writing
    assert [(each.model, each.bytes) for each in clear(tmp_path, "org/some--model", agent_runs=True)] == [
        ("org/some--model", 30)
    ]
    assert sorted(each.name for each in one.iterdir()) == [".0123.new", "about.json"]
    assert used(tmp_path) == 12
    assert [each.model for each in layouts(tmp_path)] == ["/models/plain"]
    assert clear(tmp_path, agent_runs=False)[0].bytes == 5
    assert not one.exists()
    assert not other.exists()
    assert used(tmp_path) == 0, "counted again, as no rank writes"


def test_the_folder_of_a_layout_goes_unless_a_rank_may_write_there(tmp_path: Path) -> None:
    one, other = layout(tmp_path, "a", HUB), layout(tmp_path, "b", "/models/plain", sizes=())
    (layout(tmp_path, "c", HUB) / "inner").mkdir()
    layout(tmp_path, "d", "/models/another", sizes=(5,))
    clear(tmp_path, "org/some--model", agent_runs=True)
    assert (one / "about.json").exists()
    clear(tmp_path, "org/some--model", agent_runs=False)
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["b", "c", "d"]
    assert used(tmp_path) == 5, "counted without an account"
    assert (tmp_path / "c" / "about.json").exists(), "something else is in there"
    clear(tmp_path, agent_runs=False)
    assert not other.exists()
    assert used(tmp_path) == 0
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in (".used", ".lock")] == [0o600, 0o600]
    assert clear(tmp_path / "missing", agent_runs=False) == []
    assert not (tmp_path / "missing").exists()


def test_a_rank_that_changes_the_account_is_waited_for(tmp_path: Path) -> None:
    layout(tmp_path, "a", HUB, sizes=(10,))
    (tmp_path / ".used").write_text("10")
    lock = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    clearing = threading.Thread(target=clear, args=(tmp_path,), kwargs={"agent_runs": True})
    clearing.start()
    time.sleep(0.1)
    (tmp_path / ".used").write_text("25")  # the rank adds a block of 15 bytes
    os.close(lock)
    clearing.join(10)
    assert used(tmp_path) == 15


def test_a_file_that_cannot_be_removed_is_named_and_the_account_has_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = layout(tmp_path, "a", HUB, sizes=(10, 10))
    (tmp_path / ".used").write_text("20")

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=f"{inside}/0.* cannot be removed: Operation not permitted"):
        clear(tmp_path, agent_runs=True)
    assert used(tmp_path) == 20
