"""`boot.json`: what this boot of the Mac has used up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxtp.groups import boot_record
from mlxtp.groups.boot_record import (
    FILE,
    BootRecord,
    WiredMemory,
    count_formation,
    load,
    mac_start_id,
    save,
    with_counts,
)
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


def test_this_machine_has_a_mac_start_id() -> None:
    assert mac_start_id()


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
