"""Recorded machines for the doctor: what every command said, and what it makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxtp.config import Settings
from mlxtp.diagnostics.checkup import Checkup
from mlxtp.diagnostics.facts import MachineFacts
from mlxtp.placement.probe_macos import COMMANDS, NOT_INSTALLED, Output

from ..placement.recorded_macs import MAX, outputs

FOLDER = Path(__file__).with_name("recordings")
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def said(name: str) -> dict[str, str]:
    """Return the output of each command of that file, by the whole command."""
    texts: dict[str, str] = {}
    command = ""
    for line in (FOLDER / f"{name}.txt").read_text().splitlines(keepends=True):
        if line.startswith("$ "):
            command = line[2:].strip()
            texts[command] = ""
        else:
            texts[command] += line
    return texts


class Machine:
    """Runs commands as a recorded machine would; `changed` outputs by command. Counts what it was asked."""

    def __init__(self, settings: str, mac: str = MAX, changed: Mapping[str, str | Output] = {}) -> None:
        self._mac = {
            " ".join((name, *COMMANDS[name].arguments)): output for name, output in outputs(mac).items()
        }
        self._said: dict[str, str | Output] = {**self._mac, **said(settings), **changed}
        self.asked: list[str] = []

    async def run(self, name: str, arguments: tuple[str, ...], deadline_s: float) -> Output:
        await asyncio.sleep(0)
        assert deadline_s > 0
        if name == FIREWALL:
            arguments = arguments[:1]  # the program it is asked about is this Python
        command = " ".join((name, *arguments))
        self.asked.append(command)
        text = self._said.get(command, NOT_INSTALLED)
        return text if isinstance(text, Output) else Output(text)


def facts(
    home: Path, machine: Machine, system: str = "darwin", problem: str = "", **settings: Any
) -> MachineFacts:
    """Return the facts that a command finds on such a machine. Its network is this one's loopback."""
    chosen: dict[str, Any] = {"control_host": "127.0.0.1", "discovery": False, "cluster": True} | settings
    here = Settings(home, "127.0.0.1", 0, 1, "tiny", control_port=0, **chosen)
    checkup = Checkup(here, problem, run=machine.run, run_as_self=machine.run, system=system)
    return asyncio.run(checkup.facts())
