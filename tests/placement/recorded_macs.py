"""Recorded Macs: what their commands printed, and that with something changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

from mlxtp.placement.probe_machine import mac
from mlxtp.placement.probe_macos import COMMANDS, NOT_INSTALLED, Output
from mlxtp.placement.topology import MemberMachine
from mlxtp.wire.cluster_messages import Machine, Port
from mlxtp.wire.codecs import record

FOLDER = Path(__file__).with_name("recordings")
ULTRA, MAX, MINI, BOOK, OLD_BOOK, FACTORY = MACS = (
    "studio_m3_ultra",
    "studio_m4_max",
    "mac_mini_m4_pro",
    "macbook_pro_m4_max",
    "macbook_pro_m3_max",
    "macbook_pro_m5_max",
)
RDMA_ON = "macbook_pro_m5_max_rdma"  #: What that Mac printed otherwise once RDMA was on.


def recorded(name: str) -> dict[str, str]:
    """Return the output of each command of that Mac."""
    return sections((FOLDER / f"{name}.txt").read_text())


def sections(recording: str) -> dict[str, str]:
    """Return the output of each command of a recording."""
    texts: dict[str, str] = {}
    command = ""
    for line in recording.splitlines(keepends=True):
        if line.startswith("$ "):
            command = key_of(line[2:].strip())
            texts[command] = ""
        else:
            texts[command] += line
    return texts


def key_of(command: str) -> str:
    """Return the name in `COMMANDS` of a command with its arguments."""
    return command if command in COMMANDS else command.split(maxsplit=1)[0]


def outputs(name: str, **changed: str | Output) -> dict[str, Output]:
    """The outputs of all commands of that Mac, some of them changed."""
    said: dict[str, str | Output] = {**recorded(name), **changed}
    return {
        command: text if isinstance(text := said.get(command, NOT_INSTALLED), Output) else Output(text)
        for command in COMMANDS
    }


def machine(name: str, **changed: str | Output) -> Machine:
    return mac(outputs(name, **changed))


def port(of: Machine, receptacle: int) -> Port:
    (found,) = (port for port in of.ports if port.receptacle == receptacle)
    return found


def factory_ends() -> list[MemberMachine]:
    """Two such Macs on one cable, each as it left the factory."""
    said = recorded(FACTORY)
    cable = said["system_profiler"].replace("E5E5E5", "own").replace("F6F6F6", "E5E5E5")
    there = {
        "system_profiler": cable.replace("own", "F6F6F6"),
        "ifconfig": said["ifconfig"].replace("169.254.31.7", "169.254.88.10").replace("1.20 ", "1.21 "),
    }
    ends = (machine(FACTORY), machine(FACTORY, **there))
    return [MemberMachine(f"{i:032x}", "ab"[i], end) for i, end in enumerate(ends)]


def profile(name: str, **parts: Any) -> str:
    """Return the output of `system_profiler`, with some of its three parts replaced."""
    return json.dumps(json.loads(recorded(name)["system_profiler"]) | parts)


def buses(name: str) -> list[Any]:
    told: list[Any] = json.loads(recorded(name)["system_profiler"])["SPThunderboltDataType"]
    return told


_CODEC = record(Machine)


def over_the_wire(sent: Machine) -> Machine:
    """Return another machine's copy of it; raises what its codecs refuse."""
    received: Machine = _CODEC.from_wire(msgpack.unpackb(msgpack.packb(_CODEC.to_wire(sent))))
    return received
