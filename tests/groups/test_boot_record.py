"""`boot.json`, what this boot of the Mac has used up; and memory that stays wired after an epoch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlxtp.groups import boot_record
from mlxtp.groups.boot_record import (
    FILE,
    GB,
    LOOK_S,
    LOOKS,
    BootRecord,
    WiredMemory,
    count_formation,
    left_bytes,
    load,
    mac_start_id,
    save,
    wired_bytes,
    with_counts,
)  # fmt: skip
from mlxtp.identity.private_files import write_private
from mlxtp.wire.messages import Bootstrap

from ..placement.made_up_macs import GIB, cabled, mac, on_lan


def test_what_a_boot_used_up_outlives_the_agent_and_ends_with_the_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, record := BootRecord({"rdma_en5": 2, "rdma_en4": 1}, 90 * GIB))
    assert load(tmp_path) == record
    for start in ("another", ""):
        monkeypatch.setattr(boot_record, "mac_start_id", lambda start=start: start)
        assert load(tmp_path) == BootRecord()


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"boot": 1}', "\xff"])
def test_an_unreadable_file_counts_as_empty_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    (tmp_path / FILE).chmod(0o600)
    assert load(tmp_path) == BootRecord()
    save(tmp_path, BootRecord({"rdma_en5": 1}))
    assert load(tmp_path) == BootRecord({"rdma_en5": 1})


@pytest.mark.parametrize(
    "nonsense",
    [*({"formations": {"a": each}} for each in (-1, "2", True, 0)), {"formations": [1]}]
    + [{"stranded_bytes": each} for each in (-1, "1", None)],
)
def test_a_record_that_makes_no_sense_counts_as_empty(tmp_path: Path, nonsense: dict[str, object]) -> None:
    good = {"boot": mac_start_id(), "formations": {"a": 1}, "stranded_bytes": 5}
    for kept, expected in ((good, BootRecord({"a": 1}, 5)), (good | nonsense, BootRecord())):
        write_private(tmp_path / FILE, json.dumps(kept).encode())
        assert load(tmp_path) == expected


MESH = ("", "rdma_en5", "rdma_en4", "rdma_en3", "", "rdma_en2", "x", "rdma_en7,rdma_en8", "")


@pytest.mark.parametrize(
    ("rank", "backend", "rdma", "ring", "devices"),
    [
        (0, "jaccl", MESH, False, {"rdma_en5", "rdma_en4"}),
        (2, "jaccl", MESH, True, {"x", "rdma_en7", "rdma_en8"}),
        (1, "ring", (), False, set()),
        (2, "jaccl", MESH[:7], False, {"x"}),
    ],
)
def test_each_attempt_counts_once_for_each_device_of_the_rank_until_it_gives_back(
    tmp_path: Path, rank: int, backend: str, rdma: tuple[str, ...], ring: bool, devices: set[str]
) -> None:
    bootstrap = Bootstrap(rank, 3, backend, (), "", bytes(32), 5, 5, 1, rdma=rdma, jaccl_ring=ring)
    count_formation(tmp_path, bootstrap)
    count_formation(tmp_path, bootstrap)
    assert load(tmp_path).formations == dict.fromkeys(devices, 2)
    for left in (dict.fromkeys(devices, 1), {}, {}):
        count_formation(tmp_path, bootstrap, by=-1)
        assert load(tmp_path).formations == left


def test_a_mac_reports_its_attempts_and_the_last_one_beforehand(tmp_path: Path) -> None:
    studio = cabled(on_lan([mac(0, power="battery"), mac(1), mac(2)]), [(0, 1), (0, 2)])[0].machine
    first, second = (port for port in studio.ports if port.peer_domain)
    save(tmp_path, BootRecord({first.rdma: 2, second.rdma: 1}))
    machine = with_counts(tmp_path, studio)
    assert {port.rdma: port.formations for port in machine.ports if port.formations} == {
        first.rdma: 2,
        second.rdma: 1,
    }
    assert machine.notes[0].startswith(
        f"the next RDMA group over {first.rdma} may need a restart of this Mac"
    )
    assert machine.notes[1:] == studio.notes
    assert max(map(len, machine.notes)) <= 1000
    save(tmp_path, BootRecord())
    assert with_counts(tmp_path, studio) == studio


def test_stranded_memory_is_taken_until_the_mac_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = mac(0, memory=512, gpu_bytes=0).machine

    def agent(boot: str) -> WiredMemory:
        """One that has just started."""
        monkeypatch.setattr(boot_record, "mac_start_id", lambda: boot)
        monkeypatch.setattr(boot_record, "HERE", here := WiredMemory(lambda: 300 * GIB))
        assert with_counts(tmp_path, studio).system == "macos"
        return here

    agent("first").left = 90 * GIB
    assert with_counts(tmp_path, studio).stranded_bytes == 90 * GIB
    again = agent("first")
    assert with_counts(tmp_path, studio).stranded_bytes == again.stranded_bytes() == 90 * GIB
    agent("second")
    assert with_counts(tmp_path, studio).stranded_bytes == 0
    agent("third").left = 90 * GIB
    assert with_counts(tmp_path, studio).stranded_bytes == 90 * GIB
    late = agent("third")
    late.look = lambda: 80 * GIB
    assert with_counts(tmp_path, studio).stranded_bytes == 0, "so little is wired that it came back"
    late.look = lambda: 300 * GIB
    assert with_counts(tmp_path, studio).stranded_bytes == 0


def test_mlx_knows_better_what_the_gpu_may_wire_unless_the_user_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot_record, "HERE", here := WiredMemory(lambda: 0))
    here.gpu_bytes = 465 * GIB
    assert with_counts(tmp_path, mac(0, memory=512, gpu_bytes=464 * GIB).machine).gpu_bytes == 465 * GIB
    assert with_counts(tmp_path, mac(0, memory=512, gpu_bytes=480 * GIB).machine).gpu_bytes == 480 * GIB


@pytest.mark.parametrize(
    ("before", "after", "held", "left"),
    [
        (5, 5, 400, 0),
        (5, 405, 400, 400),
        (5, 300, 400, 295),
        (5, 900, 400, 400),  # the rest is another program's
        (5, 40, 400, 0),  # a tenth may be
        (5, 6, 3, 0),
        (405, 5, 400, 0),
    ],
)
def test_what_is_wired_beyond_what_others_may_have_taken_was_left(
    before: int, after: int, held: int, left: int
) -> None:
    assert left_bytes(before * GB, after * GB, held * GB) == left * GB


class Mac(WiredMemory):
    """A machine whose wired memory is in `now`, in GB; after `settles` looks it is as low as before.

    So many ranks have `begun`, and `wired` more has been since.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, settles: int = -1, begun: int = 0, wired: int = 0
    ) -> None:
        self.now, self.low, self.looks = 5, 5, 0
        self.settles = settles
        self.slept_s = 0.0
        super().__init__(self._look)

        async def sleep(seconds: float) -> None:
            self.slept_s += seconds

        # Not asyncio's own: servers of other tests run on in their threads.
        monkeypatch.setattr(boot_record, "asyncio", SimpleNamespace(sleep=sleep))
        for _ in range(begun):
            self.began()
        self.now += wired

    def _look(self) -> int:
        self.looks += 1
        return (self.low if self.looks > self.settles >= 0 else self.now) * GB

    def end(self, held: int, *, stuck: bool = False) -> int:
        """In bytes, what its agent calls stranded."""
        return asyncio.run(self.ended(7, held * GB, stuck=stuck))

    def epoch(self, *held: int) -> None:
        for _ in held:
            self.began()
        self.now += sum(held)
        for each in held:
            asyncio.run(self.ended(7, each * GB))


def test_what_stays_is_logged_once_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mac = Mac(monkeypatch)
    mac.epoch(200, 200)
    assert mac.summary().startswith("400.0 GB stayed wired after ranks of this Mac ended; only a restart")
    assert [record.message for record in caplog.records] == [f"epoch 7: {mac.summary()}"]
    mac.epoch(50)
    assert mac.summary().startswith("450.0 GB stayed wired")
    mac.now = 100
    assert mac.summary() == ""


@pytest.mark.parametrize(("stays", "left"), [(90, 90), (0, 0)])
def test_what_a_rank_killed_in_a_collective_held_counts_until_it_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, stays: int, left: int
) -> None:
    mac = Mac(monkeypatch, begun=2, wired=100)
    assert mac.end(90, stuck=True) == 90 * GB
    assert mac.stranded_bytes() == 90 * GB
    assert mac.summary().startswith("90.0 GB may have stayed wired after ranks of this Mac ended")
    mac.now = 5 + stays
    assert mac.end(10) == left * GB
    assert mac.stranded_bytes() == left * GB


def test_what_came_back_although_a_rank_was_killed_is_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=2, wired=100)
    assert mac.stranded_bytes() == 0  # a look
    mac.now -= 40
    assert mac.end(40, stuck=True) == mac.stranded_bytes() == 0


def test_what_is_left_counts_also_if_another_rank_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=1, wired=400)

    async def begin(_seconds: float) -> None:
        mac.began()

    monkeypatch.setattr(boot_record, "asyncio", SimpleNamespace(sleep=begin))
    assert mac.end(400) == mac.stranded_bytes() == 400 * GB


def test_what_another_program_had_wired_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=1, wired=2)
    assert mac.end(2) == mac.stranded_bytes() == 2 * GB
    mac.now -= 2
    assert mac.stranded_bytes() == 0


def test_what_a_rank_that_ended_by_itself_held_is_only_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch, begun=2, wired=100)
    assert mac.end(90) == mac.stranded_bytes() == 0


def test_what_comes_back_within_seconds_is_not_told_and_little_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    little = Mac(monkeypatch)
    little.epoch(0, 1)
    assert little.slept_s == 0
    mac = Mac(monkeypatch, settles=4)
    mac.epoch(400)
    assert 0 < mac.slept_s < LOOKS * LOOK_S
    assert mac.summary() == ""
    assert not caplog.records


def test_only_macos_counts_boot_record(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfMacOs:
        wired = 7 * GB

    monkeypatch.setattr(psutil, "virtual_memory", OfMacOs)
    assert wired_bytes("darwin") == 7 * GB
    assert wired_bytes("linux") is None
    idle = WiredMemory(lambda: None)
    idle.began()
    asyncio.run(idle.ended(1, 400 * GB))
    assert idle.summary() == ""
