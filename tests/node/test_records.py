"""Files of a failure that other Macs keep: who is asked, what is answered, and what is left out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mlxtp.diagnostics import failure_files
from mlxtp.diagnostics.failure_files import kept
from mlxtp.diagnostics.failure_store import FailedEpoch, RankEnd, keep
from mlxtp.errors import GroupError
from mlxtp.wire.cluster_messages import Record, RecordsTold, RecordsWanted

from ..wire.members import Member
from .one_node import A, B, Node, play

FAILED = FailedEpoch(7, "mini", GroupError("its host knows why"))
ID = "ab" * 6


def test_everybody_is_asked_and_what_all_say_is_taken(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        a, b = node.meet(A), node.meet(B)
        asking = asyncio.ensure_future(node.cluster.failure_files.gather(7, ID))
        await asyncio.sleep(0)
        [wanted] = a.heard(RecordsWanted)
        assert b.heard(RecordsWanted) == [wanted]
        assert (wanted.number, wanted.epoch_id) == (7, ID)
        node.hear(a, Record(bytes(16), b'{"not": "asked"}'), Record(wanted.nonce, b'{"rank": 1}'))
        node.hear(a, Record(wanted.nonce, b"garbage"), Record(wanted.nonce, b"[" * 5000))
        node.hear(a, Record(wanted.nonce, b"[]"), RecordsTold(wanted.nonce))
        node.hear(a, Record(wanted.nonce, b'{"rank": "too late"}'))
        await asyncio.sleep(0)
        assert not asking.done()
        node.hear(b, *(Record(wanted.nonce, b'{"rank": 2}') for _ in range(100)), RecordsTold(wanted.nonce))
        names = [node.cluster.name_of(each.node_id) for each in (a, b)]
        assert await asking == [
            {"rank": 1, "told_by": names[0]},
            *[{"rank": 2, "told_by": names[1]}] * 16,
        ]
        node.hear(b, RecordsTold(wanted.nonce))

    play(tmp_path, member, story)


def test_who_goes_or_says_nothing_is_waited_for_no_longer(
    tmp_path: Path, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(node: Node) -> None:
        a = node.meet(A)
        asking = asyncio.ensure_future(node.cluster.failure_files.gather(7, ID))
        await asyncio.sleep(0)
        a.close()
        assert await asking == []
        node.meet(B)
        monkeypatch.setattr(failure_files, "ANSWER_S", 0.05)
        assert await node.cluster.failure_files.gather(7, ID) == []

    play(tmp_path, member, story)


def test_who_asks_is_told_all_there_is(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        a = node.meet(A)
        keep(node.cluster.settings.home, FAILED, [RankEnd(1)])
        node.hear(a, RecordsWanted(b"n" * 16, 7, ID))
        await asyncio.gather(*node.cluster.failure_files._answers.values())
        assert a.heard(RecordsTold) == [RecordsTold(b"n" * 16)]
        kinds = [json.loads(record.body)["kind"] for record in a.heard(Record)]
        assert kinds == ["epoch", "rank"]
        node.hear(a, RecordsWanted(b"m" * 16, 8, ID))
        await asyncio.sleep(0)
        await asyncio.gather(*node.cluster.failure_files._answers.values())
        assert len(a.heard(RecordsTold)) == 2
        assert len(a.heard(Record)) == 2

    play(tmp_path, member, story)


def test_one_member_leaves_room_for_the_others(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        a, b = node.meet(A), node.meet(B)
        asking = asyncio.ensure_future(node.cluster.failure_files.gather(7, ID))
        await asyncio.sleep(0)
        [wanted] = a.heard(RecordsWanted)
        node.hear(a, *(Record(wanted.nonce, b'{"rank": 1}') for _ in range(100)), RecordsTold(wanted.nonce))
        node.hear(b, Record(wanted.nonce, b'{"rank": 2}'), RecordsTold(wanted.nonce))
        assert {"rank": 2, "told_by": node.cluster.name_of(B)} in await asking

    play(tmp_path, member, story)


def test_two_who_ask_at_one_time_are_both_told(tmp_path: Path, member: Member) -> None:
    async def story(node: Node) -> None:
        a, b = node.meet(A), node.meet(B)
        keep(node.cluster.settings.home, FAILED, [RankEnd(1)])
        node.hear(a, RecordsWanted(b"n" * 16, 7, ID), RecordsWanted(b"a" * 16, 7, ID))
        node.hear(b, RecordsWanted(b"m" * 16, 7, ID))
        assert len(node.cluster.failure_files._answers) == 2
        await asyncio.gather(*node.cluster.failure_files._answers.values())
        assert a.heard(RecordsTold) == [RecordsTold(b"n" * 16)]
        assert b.heard(RecordsTold) == [RecordsTold(b"m" * 16)]
        assert len(a.heard(Record)) == len(b.heard(Record)) == 2
        await asyncio.sleep(0)
        assert node.cluster.failure_files._answers == {}

    play(tmp_path, member, story)


def test_only_files_of_that_epoch_are_told(tmp_path: Path) -> None:
    keyed = RankEnd(1, key=b"k" * 32)
    folder = keep(tmp_path, FAILED, [keyed])
    epoch_id = json.loads((folder / "rank-1.json").read_text())["epoch_id"]
    assert epoch_id
    (folder / "notes.json").write_text("not JSON")
    assert len(kept(tmp_path, 7, epoch_id)) == len(kept(tmp_path, 7, "")) == 2
    assert kept(tmp_path, 7, ID) == kept(tmp_path, 6, epoch_id) == kept(tmp_path / "other", 7, "") == []
    keep(tmp_path, FAILED, [RankEnd(1)])  # never told the key
    assert len(kept(tmp_path, 7, ID)) == 2
