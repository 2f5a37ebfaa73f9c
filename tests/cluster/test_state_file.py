"""An agent's memory: written whole, read strictly, never lost in silence."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path

import pytest

from mlxtp.cluster import state_file
from mlxtp.cluster.cluster_state import ClusterState, DeploymentTable, LeaderClaim, Roster
from mlxtp.cluster.state_file import FILE, REMOVALS, SavedState, forget, from_text, load, save, to_text
from mlxtp.errors import UserError
from mlxtp.wire.cluster_messages import Deployment, RosterEntry

from ..placement.made_up_macs import unsealed

TABLE = (
    DeploymentTable((), 2)
    .setting(Deployment("mlx-community/Llama", "mlx-community/Llama@main", 2, "2", ("a", "b")), "b")
    .setting(Deployment("tiny", "tiny", keep_s=600), "a")
    .removing("a", "tiny")
)
KEPT = SavedState(
    ClusterState(
        LeaderClaim(7, "a"),
        TABLE,
        Roster()
        .admitting("a", "studio", "key-a", unsealed)
        .admitting("b", "mini", "key-b", unsealed)
        .removing("b", unsealed),
        12,
    ),
    {"a": ("192.168.1.5:52414", "10.0.0.1:52414"), "b": ()},
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, KEPT)
    assert load(tmp_path) == (KEPT, "")


def test_a_first_start_remembers_nothing_and_says_nothing(tmp_path: Path) -> None:
    assert load(tmp_path) == (SavedState(), "")
    assert load(tmp_path / "no such folder") == (SavedState(), "")


def test_an_agent_that_starts_over_remembers_nothing(tmp_path: Path) -> None:
    save(tmp_path, KEPT)
    for _ in range(2):
        forget(tmp_path)
        assert load(tmp_path) == (SavedState(), "")
    (tmp_path / FILE).mkdir()
    forget(tmp_path)
    assert load(tmp_path) == (SavedState(), "")
    assert (tmp_path / f"{FILE}.unusable-1").is_dir()


def test_no_other_user_can_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save(tmp_path, KEPT)
        save(tmp_path, KEPT)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {FILE: 0o600, REMOVALS: 0o600}


def test_a_kill_while_writing_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, KEPT)

    def dies(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, SavedState())
    monkeypatch.undo()
    assert load(tmp_path) == (KEPT, "")
    save(tmp_path, SavedState())  # what was left lying about is no obstacle
    assert from_text((tmp_path / FILE).read_text()) == SavedState()


def test_a_full_disk_is_told_and_the_last_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, KEPT)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"state\.json cannot be written: No space left on device"):
        save(tmp_path, SavedState())
    monkeypatch.undo()
    assert load(tmp_path) == (KEPT, "")


def changed(**fields: object) -> str:
    return json.dumps(json.loads(to_text(KEPT)) | fields)


ROW = json.loads(to_text(KEPT))["roster"][0]
DEPLOYED = json.loads(to_text(KEPT))["deployments"][0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        (to_text(KEPT)[:-40], ""),
        ("[]", "has no format number"),
        (changed(format=5), "format 5; this version reads format 4"),
        (changed(format=True), "has no format number"),
        (changed(more=1), "exactly the fields"),
        (changed(epoch=-1), "epoch: expected an integer"),
        (changed(deployments=[{"version": 1}]), "deployments: expected a map"),
        (changed(deployments=[DEPLOYED, DEPLOYED]), "deployments: no table has such a row"),
        (changed(roster=[ROW | {"name": 1}]), "roster.name: expected a string"),
        (changed(floor=-1), "floor: expected an integer"),
        (changed(peers=[]), "peers: expected a map"),
        (changed(peers={"a": [1]}), "peers: expected a string"),
        (changed(peers={str(i): [] for i in range(65)}), "at most 64"),
        ("[" * 100_000, ""),
    ],
)
def test_what_cannot_be_used_is_told_and_set_aside(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    kept, told = load(tmp_path)
    assert kept == SavedState()
    assert str(path) in told
    assert said in told
    assert f"{FILE}.unusable-1" in told
    assert (tmp_path / f"{FILE}.unusable-1").read_text() == text
    assert load(tmp_path) == (SavedState(), "")


def test_bytes_that_are_no_text_and_files_that_never_end_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for number, data in enumerate((b"\xff\xfe\x00", b" " * (1 << 20) + b"{}"), start=1):
        path.write_bytes(data)
        assert load(tmp_path)[1]
        assert (tmp_path / f"{FILE}.unusable-{number}").read_bytes() == data


def test_a_folder_in_its_place_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE / "inside").mkdir(parents=True)
    kept, told = load(tmp_path)
    assert kept == SavedState()
    assert "(it is a folder). It was set aside as state.json.unusable-1" in told
    assert (tmp_path / f"{FILE}.unusable-1" / "inside").is_dir()
    save(tmp_path, KEPT)
    assert load(tmp_path) == (KEPT, "")


def test_a_file_that_cannot_be_opened_is_not_taken_for_a_first_start(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to(FILE)
    with pytest.raises(UserError, match=r"state\.json: Too many levels of symbolic links"):
        load(tmp_path)


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    save(tmp_path, KEPT)
    with pytest.raises(ValueError, match="epoch"):
        save(tmp_path, SavedState(ClusterState(epoch=-1)))
    assert load(tmp_path) == (KEPT, "")


def test_only_the_latest_addresses_of_a_peer_are_kept() -> None:
    many = tuple(f"10.0.0.{i}:1" for i in range(40))
    assert from_text(to_text(SavedState(peers={"a": many}))).peers == {"a": many[:16]}


@pytest.mark.parametrize("state", [None, b"{", b'{"format": 99}'], ids=["gone", "damaged", "of a later one"])
def test_a_removed_member_stays_removed_without_the_state(tmp_path: Path, state: bytes | None) -> None:
    save(tmp_path, KEPT)
    if state is None:
        (tmp_path / FILE).unlink()
    else:
        (tmp_path / FILE).write_bytes(state)
    roster = load(tmp_path)[0].beliefs.roster
    assert roster.removed("key-b")
    assert not roster.removed("key-a")
    forget(tmp_path)
    assert load(tmp_path) == (SavedState(), "")


def test_removals_are_written_once_stay_and_mend_a_torn_line(tmp_path: Path) -> None:
    save(tmp_path, KEPT)
    path = tmp_path / REMOVALS
    before, at = path.read_bytes(), path.stat().st_ino
    save(tmp_path, KEPT)
    assert path.stat().st_ino == at
    path.write_bytes(before[:-9])
    save(tmp_path, KEPT)
    assert path.read_bytes() == before
    other = RosterEntry("c", "air", "key-c", True, 9, removed_in=9)
    save(tmp_path, SavedState(ClusterState(roster=Roster((other,)))))
    assert set(state_file.removals_at(tmp_path)) == {"key-b", "key-c"}, "a state without it forgets none"


def test_no_byte_of_the_removals_ends_a_start(tmp_path: Path) -> None:
    save(tmp_path, KEPT)
    path, numbers = tmp_path / REMOVALS, random.Random(7)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"mini", b"zini"))  # the checksum tells
    assert load(tmp_path) == (KEPT, "")
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(numbers.randint(1, 4)):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        path.write_bytes(bytes(data[: numbers.randint(0, len(data))]))
        assert load(tmp_path) == (KEPT, "")
