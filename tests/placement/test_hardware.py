"""Running commands to look at a machine: each ends, none is root, and nothing is changed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from mlxtp.placement.hardware import probe, refresh, run_as_self, run_command
from mlxtp.placement.probe_macos import COMMANDS, NOT_INSTALLED, Output

from .recorded_macs import MAX, MINI, key_of, machine, outputs, over_the_wire, recorded

AGES_S = 60.0


def shell(script: str, deadline_s: float = AGES_S) -> Output:
    return asyncio.run(run_command("sh", ("-c", script), deadline_s))


@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("echo out; echo err >&2", Output("out\n")),
        (
            "echo half; echo no such thing >&2; exit 3",
            Output("half\n", "ended with status 3 (no such thing)"),
        ),
        (r"printf '\377ok'", Output("\ufffdok")),
        ("echo $PATH; pwd", Output("/usr/bin:/bin:/usr/sbin:/sbin\n/\n")),
    ],
)
def test_what_a_command_prints_is_its_output(script: str, output: Output) -> None:
    assert shell(script) == output


def test_what_a_command_complains_of_is_quoted_to_the_end_of_a_line_or_shows_the_cut() -> None:
    """As timedatectl does, whose second line would be cut in the middle of a sentence."""
    first = "System has not been booted with systemd as init system (PID 1). Can't operate."
    said = shell(f'echo "{first}" >&2; echo "Failed to connect to bus: Host is down" >&2; exit 1')
    assert said.problem == f"ended with status 1 ({first})"
    long = shell("echo " + "words " * 100 + " >&2; exit 1").problem
    assert long.endswith("words ...)")


def test_nothing_is_run_as_root_but_what_has_to_be() -> None:
    mine = str(os.geteuid())
    assert asyncio.run(run_as_self("id", ("-u",), AGES_S)).text.strip() == mine
    for option in ("-u", "-g"):
        assert shell(f"id {option}").text.strip() not in ("", "0")
    assert shell("id -u").text.strip() == mine or mine == "0"
    assert asyncio.run(run_command("no-such-command", (), AGES_S)) == NOT_INSTALLED


MARK = f"60.{os.getpid()}"
"""A number of seconds that no other process sleeps."""


def sleepers() -> list[int]:
    return [
        process.pid for process in psutil.process_iter(["cmdline"]) if MARK in (process.info["cmdline"] or ())
    ]


def test_one_that_does_not_answer_is_ended_with_all_that_it_started() -> None:
    output = shell(f"sleep {MARK} & sleep {MARK}", deadline_s=0.1)
    assert output == Output(problem="did not answer within 0.1 s")
    assert sleepers() == []


def test_one_that_never_stops_printing_is_ended() -> None:
    assert shell("yes").problem == "printed more than 2097152 bytes"
    assert shell("yes >&2").problem == "printed more than 2097152 bytes"


def test_a_command_that_reads_finds_nothing_to_read() -> None:
    ours, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    try:
        assert shell("cat", deadline_s=5.0) == Output("")
    finally:
        os.dup2(ours, 0)
        for descriptor in (ours, reading, writing):
            os.close(descriptor)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 20])
def test_ending_the_probe_ends_its_commands(steps: int) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run_command("sh", ("-c", f"sleep {MARK} & sleep {MARK}"), AGES_S))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert sleepers() == []


class Mac:
    """Answers commands as a recorded Mac did."""

    def __init__(self, name: str) -> None:
        self.outputs = outputs(name)
        self.asked: list[str] = []
        self.deadlines_s: list[float] = []

    async def __call__(self, name: str, arguments: tuple[str, ...], deadline_s: float) -> Output:
        self.asked.append(key_of(" ".join((name, *arguments))))
        self.deadlines_s.append(deadline_s)
        return self.outputs[self.asked[-1]]


def test_a_probe_asks_everything_and_reads_it() -> None:
    mac = Mac(MAX)
    assert asyncio.run(probe(system="darwin", run=mac)) == machine(MAX)
    assert set(mac.asked) == COMMANDS.keys()
    assert mac.deadlines_s == [command.deadline_s for command in COMMANDS.values()]


def test_a_refresh_asks_what_is_cheap() -> None:
    mac = Mac(MINI)
    assert asyncio.run(refresh(machine(MINI), run=mac)) == machine(MINI)
    assert set(mac.asked) == COMMANDS.keys() - {"system_profiler", "rdma_ctl", "ibv_devices"}


def test_commands_are_asked_at_once() -> None:
    async def meeting() -> None:
        all_commands = asyncio.Barrier(len(COMMANDS))

        async def run(name: str, arguments: tuple[str, ...], deadline_s: float) -> Output:
            async with asyncio.timeout(AGES_S):
                await all_commands.wait()
            return Output(recorded(MAX)[key_of(" ".join((name, *arguments)))])

        assert await probe(system="darwin", run=run) == machine(MAX)

    asyncio.run(meeting())


def test_an_address_is_passed_on() -> None:
    (interface,) = asyncio.run(probe("10.10.3.2", system="darwin", run=Mac(MAX))).interfaces
    assert interface.name == "en3"
    (interface,) = asyncio.run(refresh(machine(MAX), "192.168.1.13", run=Mac(MAX))).interfaces
    assert interface.name == "en1"


def test_every_command_only_reads() -> None:
    """A new command has to be judged here, too."""
    assert {(name, *command.arguments) for name, command in COMMANDS.items()} == {
        ("system_profiler", "SPHardwareDataType", "SPDisplaysDataType", "SPThunderboltDataType", "-json"),
        ("rdma_ctl", "status"),
        ("ibv_devices",),
        ("ibv_devinfo",),
        ("sysctl", *COMMANDS["sysctl"].arguments),
        ("vm_stat",),
        ("networksetup", "-listallhardwareports"),
        ("networksetup -listnetworkserviceorder",),
        ("ifconfig", "-a"),
        ("pmset", "-g", "batt"),
    }
    assert not [name for name in COMMANDS["sysctl"].arguments if "=" in name or name.startswith("-")]


def test_every_command_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    for name, command in COMMANDS.items():
        assert f"`{name.split()[0]}`" in text
        assert f"{command.deadline_s:g} s" in text


def test_this_machine() -> None:
    found = asyncio.run(probe())
    again = asyncio.run(refresh(found))
    assert (again.chip, again.memory_bytes) == (found.chip, found.memory_bytes)
    (interface,) = asyncio.run(probe("127.0.0.1")).interfaces
    assert (interface.kind, interface.address) == ("loopback", "127.0.0.1")
    assert found.cpu_cores == os.cpu_count()
    assert 0 < found.free_bytes <= found.memory_bytes
    assert found.interfaces
    assert over_the_wire(found) == found
