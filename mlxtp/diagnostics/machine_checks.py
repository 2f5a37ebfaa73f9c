"""Findings about the machine itself: programs, cables, memory, power. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..placement.formation import ADDRESS, BRIDGE, CABLE, POWER, RDMA, RDMA_SINCE, THUNDERBOLT_5_GBPS, notes
from ..wire.reports import Machine, Port
from .facts import Finding, MachineFacts, error, info, ok, warning

GB = 10**9
GIB = 2**30
#: Required by MLX.
MACOS_FLOOR = (14, 0)
#: With less free room than this, most models will not fit.
CACHE_BYTES = 20 * GB
HOME_BYTES = GB
LITTLE_MEMORY_BYTES = 2 * GIB
#: Open files: connections of clients, links, and some for ranks to start.
FILES = 1024
_RESTART = "restart this machine"


def of_settings(facts: MachineFacts) -> Iterator[Finding]:
    """Report the settings that keep an agent from starting."""
    for problem in facts.wrong_settings:
        yield error(problem, "fix it there; `mlxtp config show --origin` shows where each setting is from")
    if not facts.wrong_settings:
        yield ok("nothing is wrong in config.toml or in variables")


def of_checks(facts: MachineFacts) -> Iterator[Finding]:
    """Report failed lookups, which leave other rows unknown."""
    for problem in facts.crashed:
        yield warning(
            f"a lookup failed: {problem}",
            "fix what it names; if you cannot, report it with `mlxtp version --verbose`",
        )
    if not facts.crashed:
        yield ok("all lookups succeeded")


def of_python(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether MLX runs in this Python."""
    software, machine = facts.software, facts.machine
    if version(software.python) < version(software.python_floor):
        yield error(
            f"Python {software.python} is too old; mlxtp needs {software.python_floor}",
            "remove the folder .venv and run `make setup` with a newer Python",
        )
    if machine.system == "macos" and software.architecture == "x86_64":
        yield error(
            f"this Python ({software.program}) is made for Intel, and runs translated",
            "install a Python for Apple silicon, remove the folder .venv, and run `make setup`",
            "MLX runs on Apple silicon only",
        )
        return
    yield ok(f"{software.python} for {software.architecture}")


def of_packages(facts: MachineFacts) -> Iterator[Finding]:
    """Report packages that are missing or too old."""
    for package in facts.software.packages:
        needs = f"mlxtp needs {package.floor} or newer"
        if not package.installed:
            yield error(f"{package.name} is not installed; {needs}", "make setup")
        elif version(package.installed) < version(package.floor):
            yield error(f"{package.name} {package.installed} is too old; {needs}", "make setup")
    if not facts.software.packages:
        yield info("not known: mlxtp is not installed as a package, so its requirements are not known")
    shown = [each for each in facts.software.packages if each.name in ("mlx", "mlx-lm") and each.installed]
    if shown:
        yield ok(", ".join(f"{each.name} {each.installed}" for each in shown))


def of_system(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether the system is new enough for MLX and for RDMA."""
    machine = facts.machine
    if machine.system != "macos":
        yield ok(f"{machine.release or machine.system}, kernel {machine.build}")
        return
    release = version(machine.release)
    if not release:
        yield info("not known: which macOS this is")
    elif release < MACOS_FLOOR:
        yield error(f"macOS {machine.release} is too old; MLX needs macOS 14", "softwareupdate --list")
    elif release < RDMA_SINCE:
        yield info(f"macOS {machine.release}; RDMA over Thunderbolt comes with 26.2", "softwareupdate --list")
    else:
        yield ok(f"macOS {machine.release} ({machine.build}), {machine.model}, {machine.chip}")


# --- Thunderbolt -----------------------------------------------------------------------------------------


def of_rdma(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether ranks can communicate by RDMA."""
    machine = facts.machine
    found = list(_noted(machine, RDMA))
    yield from found
    if unread := _unread(machine, ("rdma_ctl", "ibv_devices", "ibv_devinfo")):
        yield info(unread)
    elif not found:
        yield _rdma_as_it_should_be(machine)


def _rdma_as_it_should_be(machine: Machine) -> Finding:
    if machine.rdma == "enabled":
        devices = [port.rdma for port in machine.ports if port.rdma]
        return ok(f"enabled; devices: {', '.join(devices) or 'none'}")
    fast = any(port.gbps >= THUNDERBOLT_5_GBPS for port in machine.ports)
    why = (
        "macOS is older than 26.2" if () < version(machine.release) < RDMA_SINCE else "it takes Thunderbolt 5"
    )
    return info(f"this Mac has none{'' if fast else f': {why}'}")


def of_cables(facts: MachineFacts) -> Iterator[Finding]:
    """Report cables between Macs, and whether their ports carry RDMA."""
    machine = facts.machine
    yield from _noted(machine, CABLE)
    if unread := _unread(machine, ("system_profiler", "networksetup")):
        yield info(unread)
        return
    cabled = [port for port in machine.ports if port.peer_domain]
    if not cabled:
        yield info(f"none of {len(machine.ports)} Thunderbolt ports leads to another Mac")
    for port in cabled:
        yield ok(f"{place(port)} leads to another Mac, {port.gbps or '?'} Gb/s")


def of_bridge(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether the Thunderbolt bridge blocks RDMA."""
    machine = facts.machine
    found = list(_noted(machine, BRIDGE))
    yield from found
    if unread := _unread(machine, ("ifconfig",)):
        yield info(unread)
    elif not found:
        yield ok(
            "bridge0 is up, and not in the way: there is no RDMA" if machine.bridge_up else "bridge0 is down"
        )


def of_addresses(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether each cable has permanent addresses."""
    machine = facts.machine
    yield from _noted(machine, ADDRESS)
    for port in machine.ports:
        own = [each.address for each in machine.interfaces if each.name == port.interface and each.up]
        if port.peer_domain and own:
            yield ok(f"{place(port)} has {', '.join(own)}")
    up = [each for each in machine.interfaces if each.up]
    if machine.interfaces and facts.among_others and all(each.kind == "loopback" for each in up):
        yield warning("no network is up", "plug in a cable, or join a network")
        return
    networks = [f"{each.address} ({each.name})" for each in up if each.kind != "thunderbolt"]
    yield ok(f"networks: {', '.join(networks[:6]) or 'none but cables'}")


def place(port: Port) -> str:
    """Return the name of a port as printed on the Mac."""
    return f"Thunderbolt {port.receptacle}" + (f" ({port.interface})" if port.interface else "")


def _noted(machine: Machine, about: str) -> Iterator[Finding]:
    return (warning(note.what, note.fix) for note in notes(machine) if note.about == about)


def _unread(machine: Machine, commands: tuple[str, ...]) -> str:
    """Return the notes of these commands about what they left unknown; "" if there are none."""
    told = [each for each in machine.notes if each.partition(": ")[0] in commands]
    return "; ".join(told)


# --- memory, disk, files ---------------------------------------------------------------------------------


def of_gpu_memory(facts: MachineFacts) -> Iterator[Finding]:
    """Report how much memory the GPU may wire, and memory that ended processes left wired."""
    machine = facts.machine
    total, limit = machine.memory_bytes, machine.gpu_bytes
    if not total or not limit:
        yield info("not known: how much memory the GPU may wire")
        return
    left = max(4 * GIB, total // 16)
    if total - limit < left:
        yield warning(
            f"the GPU may wire {gb(limit)} of {gb(total)}, which leaves macOS {gb(total - limit)}",
            f"sudo sysctl iogpu.wired_limit_mb={(total - left) >> 20}, or =0 for macOS's own limit",
        )
    if facts.agent.left_wired:
        yield warning(facts.agent.left_wired, _RESTART, "wired memory is not there for the next model")
    elif not facts.agent.has_rank and machine.wired_bytes > total // 4 + 4 * GIB:
        yield warning(
            f"{gb(machine.wired_bytes)} are wired although no model of this agent is loaded",
            f"end other programs that use the GPU; if it stays, a model was killed, and only a restart "
            f"gives its memory back: {_RESTART}",
            "wired memory is not there for the next model",
        )
    yield ok(f"the GPU may wire {gb(limit)} of {gb(total)}; wired now: {gb(machine.wired_bytes)}")


def of_memory(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether there is memory for requests."""
    machine, room = facts.machine, facts.room
    free = machine.free_bytes
    close = (
        "end programs that are not needed, or serve a smaller model (`mlxtp plan --model M` shows what fits)"
    )
    if not free:
        yield info("not known: how much memory is free")
    elif free < room.min_free_bytes or room.critical:
        how = "macOS calls the pressure critical" if room.critical else f"below {gb(room.min_free_bytes)}"
        yield error(f"{gb(free)} of {gb(machine.memory_bytes)} are free, {how}: requests are refused", close)
    elif free < LITTLE_MEMORY_BYTES:
        yield warning(f"{gb(free)} of {gb(machine.memory_bytes)} are free", close)
    else:
        yield ok(f"{gb(free)} of {gb(machine.memory_bytes)} are free")


def of_disk(facts: MachineFacts) -> Iterator[Finding]:
    """Report room for models and for the agent's own files."""
    for disk in facts.room.disks:
        if disk.free_bytes is None:
            yield warning(
                f"not known: room for {disk.purpose} in {disk.folder} ({disk.problem})",
                "another folder: --home for mlxtp's own files, HF_HUB_CACHE for models",
            )
            continue
        what = f"{gb(disk.free_bytes)} free for {disk.purpose} in {disk.folder}"
        room = f"make room; see what is large with: du -sh '{disk.folder}'/*"
        if disk.free_bytes < HOME_BYTES:
            yield error(what, room)
        elif disk.free_bytes < CACHE_BYTES and disk.purpose == "models":
            yield warning(what, room)
        else:
            yield ok(what)


def of_files(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether connections may exhaust the descriptors."""
    number = facts.room.open_files
    if number < FILES:
        yield warning(
            f"this process may open {number} files", "ulimit -Hn 4096 (in the shell that starts mlxtp)"
        )
    else:
        yield ok(f"{number} files may be open at once")


# --- power -----------------------------------------------------------------------------------------------


def of_power(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether this machine stays awake, runs at full speed, and restarts after a power cut."""
    machine, power = facts.machine, facts.power
    yield from _noted(machine, POWER)
    if machine.system != "macos":
        if machine.power != "battery":
            yield ok("mains")
        return
    if power.problem:
        yield info(f"not known: {power.problem}")
    yield from _of_settings(power.settings, keeps_awake=facts.agent.keep_awake)
    if machine.power == "ac":
        yield ok("mains")


def _of_settings(settings: Mapping[str, int], *, keeps_awake: bool) -> Iterator[Finding]:
    if 1 in (settings.get("lowpowermode"), settings.get("powermode")):
        yield warning(
            "Low Power Mode is on, which slows this Mac and all Macs of its group",
            "sudo pmset -a lowpowermode 0",
        )
    minutes = settings.get("sleep", 0)
    if minutes and not settings.get("SleepDisabled"):
        said = f"this Mac falls asleep after {minutes} idle min"
        if keeps_awake:
            yield info(f"{said}, but mlxtp keeps it awake while it serves", "sudo pmset -c sleep 0")
        else:
            yield warning(said, "sudo pmset -c sleep 0, or omit --no-keep-awake")
    if settings.get("autorestart") == 0:
        yield info("after a power cut this Mac stays off", "sudo pmset -a autorestart 1")


# --- words -----------------------------------------------------------------------------------------------


def gb(size: int) -> str:
    """Return bytes as people read them."""
    return f"{size / GB:.1f} GB" if size < 100 * GB else f"{size / GB:.0f} GB"


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 32, 4) for 0.32.4.dev2, () if there are none."""
    found = re.match(r"\d{1,9}(?:\.\d{1,9})*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
