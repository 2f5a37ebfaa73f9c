"""Files that describe Macs one might buy, and the mistakes people make in them."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from mlxtp.errors import ConfigError
from mlxtp.placement.machines_file import read_machines
from mlxtp.placement.planner import PlacementOptions, plan

from .made_up_macs import GIB
from .made_up_models import shape

DESK = """
links = ["thunderbolt5 mesh", "ethernet 10g"]

[[node]]
name = "studio"
chip = "Apple M3 Ultra"
memory = "256GB"
count = 2

[[node]]
chip = "Apple M4 Max"
gpu_cores = 32
memory = "64GB"
free = "50GB"
"""
NODE = '[[node]]\nchip = "Apple M4 Pro"\nmemory = "48GB"\n'


def kind(text: str, nodes: int = 2, **changes: Any) -> str:
    model = shape(num_attention_heads=24, num_key_value_heads=6, intermediate_size=14592, **changes)
    chosen = plan(read_machines(text), model, options=PlacementOptions(nodes=nodes)).chosen
    return chosen.kind if chosen else ""


def test_a_file_describes_machines_and_cables() -> None:
    studio, other, book = read_machines(DESK)
    assert [m.name for m in (studio, other, book)] == ["studio-1", "studio-2", "node-2"]
    assert studio.machine.memory_bytes == 256 * GIB
    assert (book.machine.gpu_cores, book.machine.free_bytes) == (32, 50 * GIB)
    assert [len(m.machine.ports) for m in (studio, other, book)] == [2, 2, 2]
    assert len({m.node_id for m in (studio, other, book)}) == 3
    assert read_machines(json.dumps(tomllib.loads(DESK))) == read_machines(DESK)
    assert len(read_machines(f'links = "thunderbolt5 mesh"\n{NODE}count = 5\nports = 4\n')) == 5


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ("thunderbolt5 mesh", "JACCL mesh"),
        ("thunderbolt5 ring", "JACCL mesh"),
        ("thunderbolt4 mesh", "ring over Thunderbolt"),
        ("ethernet 10g", "ring over Ethernet"),
        ("wifi", "ring over Wi-Fi"),
        ("Thunderbolt5 Mesh", "JACCL mesh"),
        ("", ""),
    ],
)
def test_links_decide_the_fabric(links: str, expected: str) -> None:
    told = f'links = "{links}"\n' * bool(links)
    assert kind(f"{told}{NODE}count = 2\n") == expected
    assert kind(f"{told}{NODE}count = 2\n", nodes=1) == "one node alone"


def test_a_ring_of_three_is_a_circle() -> None:
    assert kind(f'links = "thunderbolt5 ring"\n{NODE}count = 3\n', nodes=3) == "JACCL mesh"
    four = f'links = "thunderbolt5 ring"\n{NODE}count = 4\n'
    made = plan(read_machines(four), shape(), options=PlacementOptions(nodes=4))
    assert made.chosen.kind == "JACCL ring"


@pytest.mark.parametrize("lacking", ["rdma = false\n", ""])
def test_rdma_needs_a_chip_with_thunderbolt_5(lacking: str) -> None:
    chip = "Apple M4 Pro" if lacking else "Apple M3 Max"
    text = f'links = "thunderbolt5 mesh"\n[[node]]\nchip = "{chip}"\nmemory = "64GB"\ncount = 2\n{lacking}'
    assert kind(text) == "ring over Thunderbolt"


def of_chip(name: str) -> str:
    return NODE.replace("Apple M4 Pro", name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it has no machines"),
        ("links = ", "cannot be read"),
        ("links = " + "[" * 3000, "nested too deeply"),
        ('{"links": ' + "[" * 3000, "nested too deeply"),
        ("{", "cannot be read"),
        ("node = 3", "it has no machines"),
        ('nodes = "x"', "unknown key 'nodes'"),
        ("node = [3]", "machine 1 is 3, not a table"),
        ('[[node]]\nmemory = "8GB"', "machine 1: chip is None"),
        (of_chip("Apple M4 Ultra"), "chip is 'Apple M4 Ultra'; the nearest known one is Apple M5 Ultra"),
        (of_chip("Apple M6 Max"), "chip is 'Apple M6 Max'; the nearest known one is Apple M5 Max; it"),
        (of_chip("M3Ultra"), "chip is 'M3Ultra'; the nearest known one is Apple M3 Ultra;"),
        (of_chip("Xeon"), "chip is 'Xeon'; it can be Apple M1, Apple M1 Pro, "),
        (NODE.replace('"Apple M4 Pro"', "4"), "chip is 4; it can be Apple M1, "),
        (NODE.replace("chip", "cpu"), "machine 1: unknown key 'cpu'"),
        (NODE.replace("48GB", "48"), "memory is '48'; it can be \"512GB\""),
        (NODE.replace("48GB", "0GB"), "memory is '0GB'"),
        (NODE.replace("48GB", "9" * 400 + "GB"), "memory is '999"),
        ('[[node]]\nchip = "Apple M4"', "it has no memory"),
        (NODE + 'free = "64GB"', "free is 64GB, more than the memory of 48GB"),
        (NODE + "gpu_cores = 17", "gpu_cores is 17; Apple M4 Pro has 20 or 16"),
        (NODE + "count = 0", "count is 0; it can be a whole number up to 64"),
        (NODE + "count = 65", "count is 65"),
        (NODE + "count = 40\n" + NODE + "count = 40", "80 machines are more than 64"),
        (NODE + "name = 3", "name is 3, not a text"),
        (NODE + 'name = ""', "name is ''"),
        (NODE + 'name = "a"\n' + NODE + 'name = "a"', "two machines are called 'a'"),
        (NODE + 'rdma = "yes"', "rdma is 'yes'; it can be true or false"),
        (NODE + "ports = 16", "ports is 16"),
        ("links = 3\n" + NODE, "links is 3; links are"),
        ("links = [3]\n" + NODE, r"links is \[3\]"),
        ('links = "thunderbolt6 mesh"\n' + NODE, "links is 'thunderbolt6 mesh'; links are"),
        ('links = "thunderbolt5 star"\n' + NODE, "links is 'thunderbolt5 star'"),
        ('links = "ethernet 7g"\n' + NODE, "links is 'ethernet 7g'"),
        ('links = "ethernet"\n' + NODE, "links is 'ethernet'"),
        ('links = ""\n' + NODE, "links is ''"),
        ('links = ["thunderbolt5 mesh", "thunderbolt4 ring"]\n' + NODE, "can be given once"),
        (
            'links = "thunderbolt5 mesh"\n' + NODE + "count = 5",
            "in a mesh of 5 each Mac needs 4 cables, and node-1-1 has 3 ports for them",
        ),
    ],
)
def test_mistakes_are_named_with_what_may_stand_there(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_machines(text, "desk.toml")
    assert caught.value.detail.startswith("desk.toml")


@pytest.mark.parametrize("written", ["M4 Pro", "m4 pro", "Apple  m4 PRO", " apple M4 Pro "])
def test_a_chip_is_known_however_it_is_written(written: str) -> None:
    (node,) = read_machines(of_chip(written))
    assert node.machine.chip == "Apple M4 Pro"
    assert node.machine.gpu_cores == 20
