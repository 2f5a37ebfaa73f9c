"""Probe of this machine: the commands of `probe_macos.py`, or psutil. It only reads."""

from __future__ import annotations

import asyncio
import os
import platform
import pwd
import signal
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..wire.cluster_messages import Machine
from .probe_machine import Sight, elsewhere, linux_device, mac, mac_again
from .probe_macos import COMMANDS, NOT_INSTALLED, NetworkDevice, Output, printable

#: Bytes of one command's output; a full `system_profiler` of these three kinds has some 30 KB.
OUTPUT_LIMIT = 2 * 2**20
_END_DEADLINE_S = 2.0  #: Seconds that a killed command may take to end before it is left to the system.
#: Only Apple's own commands are found, and they print English if they can.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "LANG": "C"}

#: Runs a command with arguments within a deadline in seconds; does not raise.
RunProbe = Callable[[str, tuple[str, ...], float], Awaitable[Output]]


async def probe(address: str = "", *, system: str = sys.platform, run: RunProbe | None = None) -> Machine:
    """Probe everything, which takes seconds on a Mac.

    With `address` only the interface that has this IPv4 address counts; if none has it, a note says so. A
    value that no command reports in time is 0 or empty and in the notes.
    """
    if system != "darwin":
        return elsewhere(await asyncio.to_thread(_look), address)
    return mac(await outputs(run), address)


async def refresh(machine: Machine, address: str = "", *, run: RunProbe | None = None) -> Machine:
    """Return the same machine with its present memory, interfaces, power and RDMA ports."""
    if machine.system != "macos":
        return elsewhere(await asyncio.to_thread(_look), address)
    return mac_again(machine, await outputs(run, cheap=True), address)


async def outputs(run: RunProbe | None = None, *, cheap: bool = False) -> Mapping[str, Output]:
    commands = {name: command for name, command in COMMANDS.items() if command.cheap or not cheap}

    async def one(name: str) -> Output:
        program, *more = name.split()
        command = commands[name]
        return await (run or run_command)(program, (*more, *command.arguments), command.deadline_s)

    return dict(zip(commands, await asyncio.gather(*map(one, commands)), strict=True))


# --- one command ------------------------------------------------------------------------------------------


async def run_command(
    name: str, arguments: tuple[str, ...], deadline_s: float, *, never_root: bool = True
) -> Output:
    """Run a command, not as root. Return what it printed or what went wrong. It has ended afterwards."""
    try:
        process = await _started(name, arguments, never_root)
    except FileNotFoundError:
        return NOT_INSTALLED
    except (OSError, ValueError, LookupError) as error:
        return Output(problem=f"could not be started ({error})")
    status: int | None = None
    try:
        async with asyncio.timeout(deadline_s):
            said, complaint = await _printed(process)
            status = await process.wait()
    except TimeoutError:
        return Output(problem=f"did not answer within {deadline_s:g} s")
    finally:
        if status is None:
            await _end(process)
    if max(len(said), len(complaint)) > OUTPUT_LIMIT:
        return Output(problem=f"printed more than {OUTPUT_LIMIT} bytes")
    text = said.decode(errors="replace")
    if status:
        first = complaint.decode(errors="replace").strip().partition("\n")[0]
        why = textwrap.shorten(printable(first, 1000), 160, placeholder=" ...")
        return Output(text, f"ended with status {status}" + (f" ({why})" if why else ""))
    return Output(text)


#: Runs a command with all rights of this process, for files that only root may read.
run_as_self = partial(run_command, never_root=False)


async def _started(name: str, arguments: tuple[str, ...], never_root: bool) -> asyncio.subprocess.Process:
    starting = asyncio.create_task(_start(name, arguments, never_root))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio loses a process whose creation is cancelled half-way, so it is created first.
        with suppress(OSError, ValueError, LookupError):
            await _end(await starting)
        raise


async def _start(name: str, arguments: tuple[str, ...], never_root: bool) -> asyncio.subprocess.Process:
    """Start a command, not as root even if the agent is, as under a LaunchDaemon."""
    unprivileged = pwd.getpwnam("nobody") if never_root and os.geteuid() == 0 else None
    return await asyncio.create_subprocess_exec(
        name,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
        user=unprivileged.pw_uid if unprivileged else None,
        group=unprivileged.pw_gid if unprivileged else None,
        extra_groups=[] if unprivileged else None,
    )


async def _printed(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    return await asyncio.gather(_read(process, process.stdout), _read(process, process.stderr))


async def _read(process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None) -> bytes:
    """Read everything, or a little more than the limit, at which the process is killed."""
    assert stream is not None
    parts, size = [], 0
    while part := await stream.read(2**16):
        size += len(part)
        if size - len(part) <= OUTPUT_LIMIT:
            parts.append(part)
        if size > OUTPUT_LIMIT:
            _kill(process)
    return b"".join(parts)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process with all that it started and wait for its end, or leave it to the system."""
    _kill(process)
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_DEADLINE_S):
            await _printed(process)  # it has ended once its pipes are read to their end
            await process.wait()


# --- Linux ------------------------------------------------------------------------------------------------


def _look() -> Sight:
    import psutil

    memory = psutil.virtual_memory()
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return Sight(
        system=sys.platform,
        cpuinfo=_file("/proc/cpuinfo"),
        os_release=_file("/etc/os-release"),
        kernel=platform.release(),
        architecture=platform.machine(),
        product=_file("/sys/class/dmi/id/product_name") or _file("/proc/device-tree/model"),
        cpu_cores=os.cpu_count() or 0,
        memory_bytes=memory.total,
        free_bytes=memory.available,
        plugged_in=battery.power_plugged if battery else None,
        devices=tuple(_devices()),
    )


def _devices() -> Iterator[NetworkDevice]:
    import psutil

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state, folder = states.get(name), Path("/sys/class/net") / name
        ipv4 = [(each.address, each.netmask or "") for each in addresses if each.family.name == "AF_INET"]
        if ipv4 and state is not None:
            kind = "wifi" if (folder / "wireless").exists() else "bridge" * (folder / "bridge").exists()
            yield linux_device(name, ipv4, state.flags, state.speed, up=state.isup, kind=kind)


def _file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(OUTPUT_LIMIT).decode(errors="replace")
    except OSError:
        return ""
