"""The table of chips."""

from __future__ import annotations

import pytest

from mlxtp.placement.cost_model import hardware_of
from mlxtp.placement.tables import FUSED, SINGLE, chip, core_counts, names

from .made_up_macs import linux, mac, node_id


@pytest.mark.parametrize(
    ("name", "cores", "gbps"),
    [
        ("Apple M3 Ultra", 0, 819),
        ("Apple M4 Max", 0, 546),
        ("Apple M4 Max", 32, 410),
        ("Apple M5 Max", 32, 460),
        ("apple m2 ultra", 0, 800),
        ("Apple M6", 0, 170),
    ],
)
def test_bandwidths_are_apples(name: str, cores: int, gbps: float) -> None:
    assert chip(name, cores).bandwidth == gbps * 1e9
    assert chip(name, cores).known


def test_only_ultras_are_two_dies() -> None:
    assert {chip(name).efficiency for name in names() if name.endswith("Ultra")} == {FUSED}
    assert {chip(name).efficiency for name in names() if not name.endswith("Ultra")} == {SINGLE}


def test_more_cores_compute_more_and_read_no_faster() -> None:
    few, many = chip("Apple M3 Ultra", 60), chip("Apple M3 Ultra", 80)
    assert few.flops == pytest.approx(many.flops * 60 / 80)
    assert few.reading == many.reading


def test_a_newer_chip_counts_as_the_newest_of_its_kind_and_is_not_known() -> None:
    newer = chip("Apple M9 Max")
    assert newer.bandwidth == chip("Apple M5 Max").bandwidth
    assert (newer.name, newer.known) == ("Apple M9 Max", False)


@pytest.mark.parametrize(
    "name", ["", "AMD EPYC 7763", "Intel(R) Core(TM) m3-6Y30 CPU", "Apple Silicon", "Apple M0"]
)
def test_anything_else_is_a_plain_computer(name: str) -> None:
    found = chip(name)
    assert not found.known
    assert found.reading < chip("Apple M1").reading
    assert core_counts(name) == ()


def test_the_hardware_of_a_rank_is_that_of_its_machine() -> None:
    fewer = hardware_of(mac(0, chip="Apple M3 Ultra", gpu_cores=60))
    assert (fewer.node_id, fewer.chip, fewer.metal) == (node_id(0), chip("Apple M3 Ultra", 60), True)
    assert not hardware_of(linux(0)).metal
