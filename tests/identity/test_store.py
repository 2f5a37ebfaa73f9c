"""A Mac's identity on the disk: a crash loses nothing, and nothing foreign or half is taken for one."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtp.errors import ConfigError, UserError
from mlxtp.identity import store as module
from mlxtp.identity.store import AUTHORITY, MEMBER, NEXT_KEY, NODE_ID, NODE_KEY, Store
from mlxtp.wire.certificates import MemberCertificates, check_node, key_to_pem, new_key

from ..wire.members import founder, member_of

FILES = (NODE_ID, NODE_KEY, MEMBER, AUTHORITY)


def refusal(store: Store) -> str:
    with pytest.raises(ConfigError) as caught:
        store.load()
    assert str(store.folder) in caught.value.detail
    return caught.value.detail


def test_a_new_mac_draws_an_id_and_keeps_it(tmp_path: Path) -> None:
    first = Store(tmp_path / "home").load_or_create()
    assert len(bytes.fromhex(first.node_id)) == 16
    assert (first.membership, first.authority, first.cluster_id) == (None, None, "")
    again = Store(tmp_path / "home").load_or_create()
    assert (again.node_id, again.fingerprint) == (first.node_id, first.fingerprint)
    other = Store(tmp_path / "other").load_or_create()
    assert (other.node_id, other.fingerprint) != (first.node_id, first.fingerprint)
    assert "key" not in repr(first)


def test_the_founder_of_a_cluster_is_its_first_member(tmp_path: Path) -> None:
    first = founder(tmp_path)
    node = check_node(first.membership.certificate, first.membership.authority)
    assert node.node_id == first.identity.node_id
    assert node.cluster_id == first.identity.cluster_id
    assert len(bytes.fromhex(node.cluster_id)) == 8
    assert node.fingerprint == first.identity.fingerprint
    with pytest.raises(UserError, match=f"is a member of cluster {node.cluster_id}"):
        first.store.found_cluster()


def test_another_mac_becomes_a_member_and_holds_no_key_but_its_own(tmp_path: Path) -> None:
    first = founder(tmp_path)
    second = member_of(first, tmp_path)
    assert second.identity.cluster_id == first.identity.cluster_id
    assert second.identity.authority is None
    assert not (second.store.folder / AUTHORITY).exists()
    assert second.store.load().membership == second.membership


def test_leaving_and_coming_back(tmp_path: Path) -> None:
    first, elsewhere = founder(tmp_path), founder(tmp_path)
    second = member_of(first, tmp_path)
    left = second.store.leave()
    assert (left.node_id, left.membership) == (second.identity.node_id, None)
    assert left.fingerprint != second.identity.fingerprint  # its cluster never lets the old key in again
    left = second.store.leave()
    assert left.membership is None
    certificate = elsewhere.authority.certify(left.node_id, left.key.public_key())
    back = second.store.save_membership(MemberCertificates(certificate, elsewhere.authority.certificate))
    assert back.cluster_id == elsewhere.identity.cluster_id


def test_a_member_cannot_slip_into_another_cluster(tmp_path: Path) -> None:
    second, elsewhere = member_of(founder(tmp_path), tmp_path), founder(tmp_path)
    certificate = elsewhere.authority.certify(second.identity.node_id, second.identity.key.public_key())
    with pytest.raises(UserError, match="`mlxtp cluster leave` ends that"):
        second.store.save_membership(MemberCertificates(certificate, elsewhere.authority.certificate))
    assert second.store.load().membership == second.membership


def test_a_foreign_certificate_is_not_saved(tmp_path: Path) -> None:
    first = founder(tmp_path)
    second = member_of(first, tmp_path)
    store = Store(tmp_path / "third")
    store.load_or_create()
    with pytest.raises(UserError, match=f"is for node {second.identity.node_id}"):
        store.save_membership(second.membership)
    assert store.load().membership is None


class Crash(Exception):
    pass


def crash_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The power fails while the file `name` is written."""
    write = module.write_private

    def cut_short(path: Path, data: bytes) -> None:
        if path.name == name:
            path.with_name(f".{path.name}.new").write_bytes(data[: len(data) // 2])
            raise Crash
        write(path, data)

    monkeypatch.setattr(module, "write_private", cut_short)


@pytest.mark.parametrize("name", [NODE_ID, NODE_KEY])
def test_a_crash_while_an_identity_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = Store(tmp_path)
    crash_at(monkeypatch, name)
    with pytest.raises(Crash):
        store.load_or_create()
    assert not store.folder.exists()
    monkeypatch.undo()
    store.load_or_create()
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


def test_a_founding_that_was_cut_short_is_finished_or_does_not_keep_from_joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, store = founder(tmp_path), Store(tmp_path / "second")
    crash_at(monkeypatch, MEMBER)
    with pytest.raises(Crash):
        store.found_cluster()
    monkeypatch.undo()
    begun = store.load()
    assert begun.membership is None
    shutil.copytree(tmp_path / "second", tmp_path / "third")
    finished = Store(tmp_path / "third").found_cluster()
    assert finished.membership.authority == begun.authority.certificate
    certificate = first.authority.certify(begun.node_id, begun.key.public_key())
    joined = store.save_membership(MemberCertificates(certificate, first.authority.certificate))
    assert (joined.cluster_id, joined.authority) == (first.identity.cluster_id, None)


class Disk:
    """Every change on the disk is counted; the power fails before change number `last`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.changes = 0
        self._last = last
        for owner, name in ((os, "unlink"), (os, "replace"), (os, "fsync"), (os, "open")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, change: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            if self.changes == self._last:
                raise Crash
            self.changes += 1
            return change(*given, **named)

        return counted


@pytest.mark.slow
@pytest.mark.parametrize("founds", [True, False], ids=["the founder", "another"])
def test_wherever_leaving_is_cut_short_a_mac_is_a_member_or_can_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, founds: bool
) -> None:
    """Its old key is worth nothing once it may count as having left."""
    first, stages = founder(tmp_path), set()
    for crash, again in itertools.product(range(30), range(8)):
        member = founder(tmp_path) if founds else member_of(first, tmp_path)
        with monkeypatch.context() as patch:
            Disk(patch, crash)
            with contextlib.suppress(Crash):
                member.store.leave()
                break
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            Disk(patch, again)  # at the next start the power fails once more
            Store(member.store.folder.parent).load_or_create()
        after = Store(member.store.folder.parent).load_or_create()
        if after.membership is not None:
            assert after.membership == member.membership
            assert (after.authority is not None) is founds
            assert after.fingerprint == member.identity.fingerprint
            stages.add("a member")
        else:
            assert after.authority is None
            assert after.node_id == member.identity.node_id
            assert after.fingerprint != member.identity.fingerprint
            stages.add("left")
        assert NEXT_KEY not in {path.name for path in member.store.folder.iterdir()}
        assert member.store.leave().membership is None
    assert 8 < crash < 29
    assert stages == {"a member", "left"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_open(tmp_path: Path, name: str, mode: int) -> None:
    first = founder(tmp_path)
    (first.store.folder / name).chmod(mode)
    text = refusal(first.store)
    assert f"mode {mode:04o}, should be 0600" in text
    assert f"chmod 600 '{first.store.folder / name}'" in text


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_folder_that_others_can_look_into(tmp_path: Path, mode: int) -> None:
    first = founder(tmp_path)
    first.store.folder.chmod(mode)
    assert f"run: chmod 700 '{first.store.folder}'" in refusal(first.store)


def test_everything_is_written_for_the_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = founder(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(first.store.folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in first.store.folder.iterdir()}
    assert modes == dict.fromkeys(FILES, 0o600)


@pytest.mark.parametrize("name", [NODE_ID, NODE_KEY])
def test_half_an_identity(tmp_path: Path, name: str) -> None:
    first = founder(tmp_path)
    (first.store.folder / name).unlink()
    text = refusal(first.store)
    assert f"{name} is missing" in text
    assert "restore the whole folder from one backup, or remove the folder and join again" in text
    with pytest.raises(ConfigError):
        first.store.load_or_create()


def first_of(pem: bytes) -> bytes:
    """Return the first part of a file that has several."""
    return pem[: pem.index(b"-----BEGIN", 10)]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        (NODE_ID, lambda _, theirs: theirs, "this is node"),
        (NODE_KEY, lambda _, theirs: theirs, "is for another key than that in node.key"),
        (MEMBER, lambda _, theirs: theirs, "is for node"),
        (MEMBER, lambda ours, _: first_of(ours), "it holds 1 certificates instead of 2"),
        (
            MEMBER,
            lambda ours, theirs: first_of(ours) + theirs.removeprefix(first_of(theirs)),
            "was not made by the authority",
        ),
        (AUTHORITY, lambda _, theirs: theirs, "authority.pem is of another cluster than member.pem"),
        (
            AUTHORITY,
            lambda ours, _: first_of(ours) + key_to_pem(new_key()),
            "the certificate and the key in authority.pem do not belong together",
        ),
    ],
)
def test_a_file_that_does_not_belong_to_the_others(
    tmp_path: Path, name: str, change: Callable[[bytes, bytes], bytes], why: str
) -> None:
    first, other = founder(tmp_path), founder(tmp_path)
    ours, theirs = first.store.folder / name, other.store.folder / name
    ours.write_bytes(change(ours.read_bytes(), theirs.read_bytes()))
    assert why in refusal(first.store)


def test_a_link_a_folder_or_a_pipe_is_no_file_of_ours(tmp_path: Path) -> None:
    first = founder(tmp_path)
    path = first.store.folder / AUTHORITY
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "authority.pem cannot be read" in refusal(first.store)
    path.unlink()
    path.mkdir(mode=0o700)
    assert "is not a file" in refusal(first.store)
    path.rmdir()
    os.mkfifo(path, 0o600)
    assert "is not a file" in refusal(first.store)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "garbage", [b"", b"\0\xff" * 100, b"-----BEGIN PRIVATE KEY-----\nAAAA\n", b"x" * (2 << 20)]
)
def test_garbage(tmp_path: Path, name: str, garbage: bytes) -> None:
    first = founder(tmp_path)
    (first.store.folder / name).write_bytes(garbage)
    assert name in refusal(first.store)


def test_no_folder_of_ours(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.folder.write_text("a file")
    with pytest.raises(ConfigError, match="is not a folder"):
        store.load_or_create()
    store.folder.unlink()
    store.folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        store.load_or_create()


def test_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = founder(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to user" in refusal(first.store)


def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    first = founder(tmp_path)
    second = Store(tmp_path / "second")
    joining = second.load_or_create()
    certificate = first.authority.certify(joining.node_id, joining.key.public_key())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"member\.pem cannot be written: No space left on device"):
        second.save_membership(MemberCertificates(certificate, first.authority.certificate))
    assert second.load().membership is None
