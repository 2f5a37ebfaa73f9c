"""Probe of this machine, which only reads: with the commands of `probe_macos.py`, or psutil."""

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

OUTPUT_LIMIT = 2 * 2**20  #: Bytes of a command's output; `system_profiler` prints some 30 KB.
_END_DEADLINE_S = 2.0  #: Seconds to wait for the end of a killed command.
#: For Apple's own commands only, in English if possible.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "LANG": "C"}

#: Runs a command with arguments and a deadline in seconds; does not raise.
RunProbe = Callable[[str, tuple[str, ...], float], Awaitable[Output]]


async def probe(address: str = "", *, system: str = sys.platform, run: RunProbe | None = None) -> Machine:
    """Probe everything, which takes seconds on a Mac. With `address`, only the interface with this IPv4
    address counts; notes report its absence, and values that no command reports in time.
    """
    if system != "darwin":
        return elsewhere(await asyncio.to_thread(_look), address)
    return mac(await outputs(run), address)


async def refresh(machine: Machine, address: str = "", *, run: RunProbe | None = None) -> Machine:
    """Return the machine with its present memory, interfaces, power and RDMA ports."""
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
    """Run a command to its end, not as root. Return its output or the problem."""
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


#: Keeps this process's rights, for files that only root may read.
run_as_self = partial(run_command, never_root=False)


async def _started(name: str, arguments: tuple[str, ...], never_root: bool) -> asyncio.subprocess.Process:
    starting = asyncio.create_task(_start(name, arguments, never_root))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio loses a process if its creation is cancelled, so finish that first.
        with suppress(OSError, ValueError, LookupError):
            await _end(await starting)
        raise


async def _start(name: str, arguments: tuple[str, ...], never_root: bool) -> asyncio.subprocess.Process:
    """Start a command, not as root even if the agent is (under a LaunchDaemon)."""
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
    """Read everything. Beyond the limit, kill the process."""
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
    """Kill the process and its children, and wait for its end, but not for long."""
    _kill(process)
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_DEADLINE_S):
            await _printed(process)  # its pipes end with it
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
