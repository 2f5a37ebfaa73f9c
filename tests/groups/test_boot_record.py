"""`boot.json`: what this boot of the Mac has used up."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtp.groups import boot_record
from mlxtp.groups.boot_record import FILE, BootRecord, boot_id, count_formation, counted, load, save
from mlxtp.groups.sleep import WiredMemory
from mlxtp.wire.messages import Bootstrap

from ..placement.made_up_macs import GIB, cabled, mac, on_lan


def test_what_a_boot_used_up_outlives_the_agent_and_ends_with_the_boot(tmp_path: Path) -> None:
    save(tmp_path, load(tmp_path).formed(["rdma_en5"]))
    save(tmp_path, load(tmp_path).formed(["rdma_en5", "rdma_en4"]))
    assert load(tmp_path).formations == {"rdma_en5": 2, "rdma_en4": 1}
    assert load(tmp_path, "another boot") == BootRecord()


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"boot": 1}', "\xff"])
def test_an_unreadable_file_counts_as_empty_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    (tmp_path / FILE).chmod(0o600)
    assert load(tmp_path) == BootRecord()
    save(tmp_path, BootRecord({"rdma_en5": 1}))
    assert load(tmp_path) == BootRecord({"rdma_en5": 1})


def test_values_that_make_no_sense_count_as_nothing() -> None:
    assert BootRecord.from_object({"formations": {"a": -1, "b": "2", "c": True, "d": 3}}) == BootRecord(
        {"d": 3}
    )
    for nothing in ({"formations": [1]}, {"stranded_bytes": -1}, {"stranded_bytes": "1"}):
        assert BootRecord.from_object(nothing) == BootRecord()


def test_this_machine_has_a_boot_id() -> None:
    assert boot_id()


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
def test_each_attempt_counts_once_for_each_device_of_the_rank(
    tmp_path: Path, rank: int, backend: str, rdma: tuple[str, ...], ring: bool, devices: set[str]
) -> None:
    bootstrap = Bootstrap(rank, 3, backend, (), "", bytes(32), 5, 5, 1, rdma=rdma, jaccl_ring=ring)
    count_formation(tmp_path, bootstrap)
    count_formation(tmp_path, bootstrap)
    assert load(tmp_path).formations == dict.fromkeys(devices, 2)


def test_a_mac_reports_its_attempts_and_the_last_one_beforehand(tmp_path: Path) -> None:
    studio = cabled(on_lan([mac(0), mac(1), mac(2)]), [(0, 1), (0, 2)])[0].machine
    first, second = (port for port in studio.ports if port.peer_domain)
    save(tmp_path, BootRecord({first.rdma: 2, second.rdma: 1}))
    machine = counted(tmp_path, studio)
    assert {port.rdma: port.formed for port in machine.ports if port.formed} == {
        first.rdma: 2,
        second.rdma: 1,
    }
    assert machine.notes[0].startswith(
        f"The next RDMA group over {first.rdma} may need a restart of this Mac"
    )
    assert machine.notes[1:] == studio.notes
    assert max(map(len, machine.notes)) <= 300
    save(tmp_path, BootRecord())
    assert counted(tmp_path, studio) == studio


def test_stranded_memory_is_taken_until_the_mac_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = mac(0, memory=512, gpu_bytes=0).machine

    def agent(boot: str) -> WiredMemory:
        """One that has just started."""
        monkeypatch.setattr(boot_record, "boot_id", lambda: boot)
        monkeypatch.setattr(boot_record, "HERE", here := WiredMemory(lambda: 300 * GIB))
        assert counted(tmp_path, studio).system == "macos"
        return here

    agent("first").left = 90 * GIB
    assert counted(tmp_path, studio).stranded_bytes == 90 * GIB
    again = agent("first")
    assert counted(tmp_path, studio).stranded_bytes == again.stranded_bytes() == 90 * GIB
    agent("second")
    assert counted(tmp_path, studio).stranded_bytes == 0
    agent("third").left = 90 * GIB
    assert counted(tmp_path, studio).stranded_bytes == 90 * GIB
    late = agent("third")
    late.look = lambda: 80 * GIB
    assert counted(tmp_path, studio).stranded_bytes == 0, "so little is wired that it came back"
    late.look = lambda: 300 * GIB
    assert counted(tmp_path, studio).stranded_bytes == 0


def test_mlx_knows_better_what_the_gpu_may_wire_unless_the_user_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot_record, "HERE", here := WiredMemory(lambda: 0))
    here.gpu_bytes = 465 * GIB
    assert counted(tmp_path, mac(0, memory=512, gpu_bytes=464 * GIB).machine).gpu_bytes == 465 * GIB
    assert counted(tmp_path, mac(0, memory=512, gpu_bytes=480 * GIB).machine).gpu_bytes == 480 * GIB
