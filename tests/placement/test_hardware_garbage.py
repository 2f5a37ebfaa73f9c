"""Parsers of commands' output: each replies to any output, and its reply fits into its message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.placement import probe_machine
from mlxtp.placement.probe_machine import elsewhere, mac, mac_again
from mlxtp.placement.probe_macos import COMMANDS, MAX_LINKS, Output
from mlxtp.wire.cluster_messages import MAX_PORTS

from .recorded_macs import MACS, machine, outputs, over_the_wire, recorded

RECORDED = {
    command: [said[command] for said in map(recorded, MACS) if command in said] for command in COMMANDS
}


@st.composite
def garbled(draw: st.DrawFn, command: str) -> str:
    """Output of a command, with parts lost, doubled, or replaced by anything."""
    text = draw(st.sampled_from(RECORDED[command]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 200)))
        middle = draw(st.sampled_from(["", text[start:end] * 3, "9" * 5000, "\n"]) | st.text(max_size=20))
        text = text[:start] + middle + text[end:]
    return text[: draw(st.sampled_from([len(text), len(text) // 2]))]


KEYS = (
    "SPHardwareDataType", "SPDisplaysDataType", "SPThunderboltDataType", "_items", "domain_uuid_key",
    "receptacle_1_tag", "receptacle_id_key", "receptacle_status_key", "current_speed_key", "chip_type",
    "machine_name", "machine_model", "number_processors", "physical_memory", "sppci_cores",
)  # fmt: skip
PROFILES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=100)
    | st.sampled_from(["1", "receptacle_connected", "A0000000-0000-4000-8000-000000000000", "999 TB"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
).map(json.dumps)


def texts(command: str) -> st.SearchStrategy[str]:
    anything = st.text() | garbled(command)
    return PROFILES | anything if command == "system_profiler" else anything


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_no_text_makes_a_parser_fail(command: str) -> None:
    @settings(max_examples=40)
    @given(texts(command))
    def holds(text: str) -> None:
        reading = COMMANDS[command].parse(text)
        assert all(0 < len(name) < 50 for name in reading.missing)
        assert size(reading.value) <= 10 * MAX_LINKS

    holds()


def size(value: Any) -> int:
    """Count the values that a reading holds, all in all."""
    if isinstance(value, (str, bool, int)):
        return 1
    if isinstance(value, dict):
        return sum(map(size, value.values()))
    if isinstance(value, (tuple, frozenset)):
        return sum(map(size, value))
    return sum(size(getattr(value, name)) for name in value.__dataclass_fields__)


@settings(max_examples=40)
@given(
    st.sampled_from(MACS),
    st.fixed_dictionaries({}, optional={command: texts(command) for command in COMMANDS}),
    st.sampled_from(["", "127.0.0.1", "192.168.1.10"]) | st.text(),
    st.sampled_from(["", "ended with status 1", "x" * 500]),
)
def test_after_any_output_the_machine_fits_into_its_message(
    name: str, said: dict[str, str], address: str, problem: str
) -> None:
    garbage = {command: Output(text, problem) for command, text in said.items()}
    found = mac(outputs(name, **garbage), address)
    assert over_the_wire(found) == found
    again = mac_again(machine(name), garbage, address)
    assert over_the_wire(again) == again


LONG = st.text(min_size=0, max_size=200)
DEVICES = st.builds(
    probe_machine.linux_device,
    name=LONG,
    addresses=st.lists(
        st.tuples(
            st.sampled_from(["10.0.0.1", "127.0.0.1", "::1"]) | LONG,
            st.sampled_from(["255.255.255.0", "255.0.255.0"]) | LONG,
        ),
        max_size=3,
    ).map(tuple),
    flags=st.sampled_from(["up,broadcast", "up,pointopoint", "loopback"]) | LONG,
    speed=st.integers(),
    up=st.booleans(),
)


@settings(max_examples=40)
@given(
    st.builds(
        probe_machine.Sight,
        *(LONG for _ in range(6)),
        *(st.integers() for _ in range(3)),
        st.none() | st.booleans(),
        st.lists(DEVICES, max_size=8).map(tuple),
    )
)
def test_after_any_output_of_linux_the_machine_fits_into_its_message(sight: probe_machine.Sight) -> None:
    found = elsewhere(sight)
    assert over_the_wire(found) == found


MILLION = 10**6


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("system_profiler", json.dumps({"SPThunderboltDataType": [{"_items": [{}] * 1000}] * 300})),
        ("system_profiler", '{"SPHardwareDataType":' + '[{"_items":' * (MILLION // 11)),
        ("system_profiler", '{"SPHardwareDataType": [{"chip_type": "' + "A" * MILLION + '"}]}'),
        ("sysctl", "hw.memsize: " + "9" * MILLION),
        ("vm_stat", "page size of 16384 bytes\n" + "Pages free: 9\n" * (MILLION // 14)),
        ("networksetup", "".join(f"Hardware Port: Thunderbolt {n}\nDevice: en{n}\n" for n in range(20_000))),
        ("ifconfig", "".join(f"en{n}: flags=1<UP>\n\tmember: en1\n" for n in range(30_000))),
        ("ifconfig", "en0: flags=1<UP>\n" + "\tinet 10.0.0.1 netmask 0xffffff00\n" * 30_000),
        ("ibv_devices", "rdma_en1 1\n" * (MILLION // 11)),
        ("ibv_devinfo", "".join(f"hca_id: rdma_en{n}\nstate: PORT_ACTIVE\n" for n in range(9999))),
    ],
)
def test_a_megabyte_is_read_and_cut(command: str, text: str) -> None:
    value = COMMANDS[command].parse(text).value
    assert size(value) <= 10 * MAX_LINKS
    if command == "system_profiler":
        assert len(value.ports) <= MAX_PORTS
