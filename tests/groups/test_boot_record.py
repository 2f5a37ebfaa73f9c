"""`boot.json`: what this boot of the Mac has used up."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtp.groups.boot_record import FILE, BootRecord, boot_id, load, save


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
    assert BootRecord.from_object({"formations": [1]}) == BootRecord()


def test_this_machine_has_a_boot_id() -> None:
    assert boot_id()
