"""The table of faults: for each a test over facts, its meaning and the remedy.

Preflight, plans, the notes of a Mac, the doctor, failed groups and docs/doctor.md render it. Commands are for
people. Visible faults are checked before a group forms, because JACCL's error numbers are ambiguous.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

from ..wire import rdma
from ..wire.cluster_messages import Interface, Machine, Port
from .probe_macos import self_assigned

THUNDERBOLT_5_GBPS = 80  #: Gb/s in each direction; Thunderbolt 4 and USB4 end at 40.
RDMA_SINCE = (26, 2)  #: The first macOS with RDMA over Thunderbolt (Apple's TN3205).
MUCH_SLOWER = 10  #: Warn users if a link's expected speed is so many times the measured speed.
#: Formations that an RDMA device is said to allow until its Mac restarts, unless ranks give them back: owners
#: report two or three.
FORMATIONS_A_BOOT = 3

REPLUG = "unplug the cable and plug it in again; on a Mac, look with: system_profiler SPThunderboltDataType"
_RDMA_ON = (
    "shut this Mac down, hold the power button until the options load, choose Options, then Utilities > "
    "Terminal, and run: rdma_ctl enable"
)
_PORT_UP = (
    "plug the cable in at both ends, wake the other Mac, see that its RDMA is on (rdma_ctl status), and look "
    "for PORT_ACTIVE in `ibv_devinfo`"
)
_FREE = (
    "end other programs that use RDMA on this Mac, above all ranks of an earlier group; if there are none, "
    "restart it"
)
_BY_HAND = "name the device by hand (--rdma NODE=DEVICE)"


class Level(StrEnum):
    """Levels from good to bad. Only an error keeps this machine from working."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ORDER = tuple(Level)
INFO, WARNING, ERROR = Level.INFO, Level.WARNING, Level.ERROR


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault at one place, its remedy, and why it matters; without an `id`, a mere fact."""

    level: Level
    what: str
    fix: str = ""
    why: str = ""
    id: str = ""

    def __str__(self) -> str:
        return f"{self.what}{f': {self.why}' if self.why else ''}. To do: {self.fix}"


Words = Mapping[str, object]
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Fault(Generic[F]):
    """Row of the table. `what`, `fix` and `why` have {fields}: words of `test`, and `at` for the facts."""

    id: str
    row: str  #: Id of the doctor's row that shows it, or empty.
    level: Level
    test: Callable[[F], bool | Iterable[Words]]  #: True if facts have it, or words of each place.
    what: str
    fix: str
    why: str = ""
    stops_rdma: bool = False  #: JACCL cannot form over a Mac, or a port, with the fault.

    def found(self, facts: F) -> Iterator[Finding]:
        seen = self.test(facts)
        for words in [{}] if seen is True else seen or ():
            what, fix, why = (text.format(at=facts, **words) for text in (self.what, self.fix, self.why))
            yield Finding(self.level, what, fix, why, self.id)


# --- of one Mac -------------------------------------------------------------------------------------------


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 32, 4) for 0.32.4.dev2, () for none."""
    found = re.match(r"\d{1,9}(?:\.\d{1,9})*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def is_older(machine: Machine) -> bool:
    return machine.system == "macos" and () < version(machine.release) < RDMA_SINCE


def _could_have_rdma(machine: Machine) -> bool:
    fast = any(port.peer_domain and port.gbps >= THUNDERBOLT_5_GBPS for port in machine.ports)
    return machine.rdma == "unsupported" and fast and is_older(machine)


def cabled(machine: Machine) -> list[Port]:
    return [port for port in machine.ports if port.peer_domain and port.peer_domain not in _own(machine)]


def _own(machine: Machine) -> set[str]:
    return {port.domain for port in machine.ports if port.domain}


def _bridge_bare(machine: Machine, *, several: bool) -> Iterator[Words]:
    """Yield the bridge if TCP goes over it, and it has no permanent address."""
    addresses = [each.address for each in machine.interfaces if each.kind == "bridge"]
    cables = cabled(machine)
    over_tcp = machine.rdma != "enabled" and machine.bridge_up and bool(machine.interfaces)
    if over_tcp and cables and all(map(self_assigned, addresses)) and several is (len(cables) > 1):
        yield _bridge_words(machine) | {
            "has": f"only {addresses[0]}" if addresses else "no IPv4 address",
            "count": len(cables),
        }


def _bridge_words(machine: Machine) -> dict[str, object]:
    """Return words of bridge0; `down` and `give` are commands, for now and permanently."""
    cables, service = cabled(machine), shlex.quote(machine.bridge_service)
    own, other = cable_addresses(cables[0].domain, cables[0].peer_domain, "bridge ") if cables else ("", "")
    until, down = "after each restart", " (no network service is known to have it)"
    give = ""
    if machine.bridge_service:
        until = "until the next restart"
        down = f"; for good: sudo networksetup -setnetworkserviceenabled {service} off"
        give = f"; for good: sudo networksetup -setmanual {service} {own} {_NETMASK}"
    return {"until": until, "down": down, "give": give, "own": own, "other": other}


_NETMASK = "255.255.255.252"
_BRIDGE_DOWN = "{until}: sudo ifconfig bridge0 down{down}"

OF_MACS: tuple[Fault[Machine], ...] = (
    Fault("rdma-off", "rdma", WARNING, lambda mac: mac.rdma == "disabled",
        "RDMA over Thunderbolt is off",
        _RDMA_ON, "exchanges over TCP take several times as long", stops_rdma=True),
    Fault("rdma-needs-macos", "rdma", WARNING,
        _could_have_rdma,
        "macOS {at.release} has no RDMA over Thunderbolt",
        "update it to 26.2 or newer; available updates: softwareupdate --list",
        "macOS 26.2 brings it, for Thunderbolt 5", stops_rdma=True),
    Fault("rdma-none", "", WARNING, lambda mac: mac.rdma == "unsupported" and not _could_have_rdma(mac),
        "this machine has no RDMA over Thunderbolt",
        f"use --backend ring; if it has an RDMA device all the same, {_BY_HAND}",
        "it takes a Mac with Thunderbolt 5 and macOS 26.2", stops_rdma=True),
    Fault("rdma-in-use", "", WARNING,
        lambda mac: mac.rdma not in ("enabled", "disabled", "unsupported"),
        "RDMA is {at.rdma}",
        "use --backend ring, or unload the other model", stops_rdma=True),
    Fault("bridge-holds-rdma", "bridge", WARNING,
        lambda mac: [_bridge_words(mac)] if mac.rdma == "enabled" and mac.bridge_up else (),
        "the Thunderbolt bridge, bridge0, holds the Thunderbolt ports",
        _BRIDGE_DOWN, "RDMA then fails to connect (errno 22)", stops_rdma=True),
    Fault("bridge-of-several", "bridge", WARNING, lambda mac: _bridge_bare(mac, several=True),
        "the Thunderbolt bridge holds {count} cables to Macs",
        f"{_BRIDGE_DOWN}; then each cable gets a pair of its own",
        "they need a pair of addresses each, and a circle of such bridges makes a broadcast storm"),
    Fault("bridge-without-address", "addresses", WARNING, lambda mac: _bridge_bare(mac, several=False),
        "the Thunderbolt bridge has {has}",
        f"{{until}}: sudo ifconfig bridge0 inet {{own}} netmask {_NETMASK}{{give}}"
        "; the other end gets {other}",
        "macOS may route a self-assigned address over Wi-Fi"),
    Fault("cable-to-itself", "cables", WARNING,
        lambda mac: [{"port": place(port)} for port in mac.ports if port.peer_domain in _own(mac)],
        "{port} is cabled to another port of this same Mac",
        "move that end to another Mac", "it connects nothing"),
    Fault("battery", "power", WARNING, lambda mac: mac.power == "battery",
        "this machine runs on battery",
        "plug it in", "it may slow down or fall asleep while others wait"),
)  # fmt: skip


# --- of a port with a cable to another Mac ----------------------------------------------------------------


class PortOf(NamedTuple):
    machine: Machine
    port: Port

    @property
    def name(self) -> str:
        return place(self.port)

    @property
    def interfaces(self) -> list[Interface]:
        return [each for each in self.machine.interfaces if each.name == self.port.interface]

    @property
    def addresses(self) -> list[str]:
        return [each.address for each in self.interfaces if each.address]

    @property
    def is_down(self) -> bool:
        is_up = self.port.active and (not self.interfaces or any(each.up for each in self.interfaces))
        return self.machine.rdma == "enabled" and bool(self.port.rdma) and not is_up

    @property
    def is_used(self) -> bool:
        """True if TCP or RDMA uses the port directly, not the bridge."""
        return bool(self.port.interface) and (self.machine.rdma == "enabled" or not self.machine.bridge_up)

    @property
    def lacks_rdma(self) -> str:
        """The reason for no RDMA on a Mac that has it: "place", "speed" or "device"; else ""."""
        if self.machine.rdma != "enabled" or self.port.rdma:
            return ""
        return unable(self.machine.model, self.port) or "device"

    @property
    def own(self) -> str:
        return cable_addresses(self.port.domain, self.port.peer_domain)[0]

    @property
    def other(self) -> str:
        return cable_addresses(self.port.domain, self.port.peer_domain)[1]

    @property
    def service(self) -> str:
        return shlex.quote(self.port.service or f"mlxtp {self.port.receptacle}")

    @property
    def new_service(self) -> str:
        """Command to make a missing service: System Settings lists services, not ports."""
        number = self.port.receptacle
        make = f"sudo networksetup -createnetworkservice 'mlxtp {number}' 'Thunderbolt {number}'; "
        return "" if self.port.service else make


def unable(model: str, port: Port) -> str:
    """Return why a port of such a Mac can have no RDMA: "place" or "speed"; else ""."""
    if model.startswith("Mac Studio") and port.interface == "en2":
        return "place"
    return "speed" if 0 < port.gbps < THUNDERBOLT_5_GBPS else ""


def is_scarce(formations: int) -> bool:
    """Return whether a device with so many used formations may have only one left, or none."""
    return formations >= FORMATIONS_A_BOOT - 1


_GIVE_ADDRESS = (
    f"until the next restart: sudo ifconfig {{at.port.interface}} inet {{at.own}} netmask {_NETMASK}; for "
    f"good: {{at.new_service}}sudo networksetup -setmanual {{at.service}} {{at.own}} {_NETMASK}; after "
    "either: sudo route change {at.other} -interface {at.port.interface}; the other end gets {at.other}"
)  # also the route, as `mlx.distributed_config` does: an earlier bridge may have left a route to the peer

OF_PORTS: tuple[Fault[PortOf], ...] = (
    Fault("port-next-to-ethernet", "cables", WARNING, lambda at: at.lacks_rdma == "place",
        "{at.name} is the port next to Ethernet, which has no RDMA on a Mac Studio",
        "move the cable to another Thunderbolt port of this Mac", stops_rdma=True),
    Fault("slow-cable", "cables", WARNING, lambda at: at.lacks_rdma == "speed",
        "{at.name} runs at {at.port.gbps} Gb/s",
        "a Thunderbolt 5 port, or another cable; look with: system_profiler SPThunderboltDataType",
        "RDMA needs Thunderbolt 5 (80 Gb/s), in both Macs and in the cable", stops_rdma=True),
    Fault("port-without-device", "cables", WARNING, lambda at: at.lacks_rdma == "device",
        "{at.name} has no RDMA device",
        f"look with `ibv_devices`, and move the cable to another Thunderbolt 5 port, or {_BY_HAND}",
        "it carries TCP only", stops_rdma=True),
    Fault("port-not-active", "cables", WARNING, lambda at: at.is_down,
        "{at.name} is cabled, but its RDMA port {at.port.rdma} is not active",
        _PORT_UP, "most likely the other Mac has RDMA off", stops_rdma=True),
    Fault("port-without-address", "addresses", WARNING, lambda at: at.is_used and not at.addresses,
        "{at.name} is cabled to another Mac but has no IPv4 address",
        _GIVE_ADDRESS, "RDMA (errno 22) and TCP both need one", stops_rdma=True),
    Fault("port-self-assigned", "addresses", WARNING,
        lambda at: at.is_used and bool(at.addresses) and all(map(self_assigned, at.addresses)),
        "{at.name} has only the address {at.addresses[0]}, which it gave itself",
        _GIVE_ADDRESS,
        "it may change, and macOS may route it over Wi-Fi or Ethernet"),
    Fault("hub", "cables", WARNING, lambda at: at.port.hub,
        "{at.name} reaches the other Mac through a hub or dock",
        "cable the two Macs directly", "it adds latency and shares its bandwidth"),
    Fault("rdma-scarce", "rdma", WARNING, lambda at: is_scarce(at.port.formations),
        "the next RDMA group over {at.port.rdma} may need a restart of this Mac",
        "restart it when that suits you; until then mlxtp can use the TCP ring",
        "{at.port.formations} serve or were killed since it started; owners report room for two or three"),
)  # fmt: skip


RDMA_OF_MACS = tuple(fault for fault in OF_MACS if fault.stops_rdma)
RDMA_OF_PORTS = tuple(fault for fault in OF_PORTS if fault.stops_rdma)


def faults_of(machine: Machine) -> list[Finding]:
    """Return all faults of a machine with all its interfaces, the most important first."""
    *of_mac, battery = [fault for fault in OF_MACS if fault.row]
    if machine.system != "macos":
        return list(battery.found(machine))
    # A machine with unreadable interfaces has none, not even loopback.
    of_port = [each for each in OF_PORTS if machine.interfaces or each.row != "addresses"]
    found = [each for fault in of_mac for each in fault.found(machine)]
    found += [x for port in cabled(machine) for fault in of_port for x in fault.found(PortOf(machine, port))]
    return [*found, *battery.found(machine)]


def notes_of(machine: Machine) -> tuple[str, ...]:
    return tuple(map(str, faults_of(machine)))


def scarcity(machine: Machine) -> tuple[str, ...]:
    """Return the notes on formations: the agent counts these."""
    return tuple(str(each) for each in faults_of(machine) if each.id == "rdma-scarce")


def no_rdma(machine: Machine, port: Port | None = None) -> str:
    found = _first(RDMA_OF_PORTS, PortOf(machine, port)) if port else _first(RDMA_OF_MACS, machine)
    return found.what if found else ""


def place(port: Port) -> str:
    return f"Thunderbolt {port.receptacle}" + (f" ({port.interface})" if port.interface else "")


def cable_addresses(domain: str, peer_domain: str, holder: str = "") -> tuple[str, str]:
    """Return (ours, theirs): a /30 of 10.201.0.0/16 that both ends of a cable compute from their Thunderbolt
    domains and the `holder`: a bridge that is down keeps its addresses and routes.
    """
    low, high = sorted((domain, peer_domain))
    network = crc32(f"{holder}{low} {high}".encode()) % 2**14 * 4
    first, second = (f"10.201.{(network + host) >> 8}.{(network + host) & 255}" for host in (1, 2))
    return (first, second) if domain == low else (second, first)


# --- of a group that is about to form over RDMA -----------------------------------------------------------


class DeviceUse(NamedTuple):
    """A rank's device for a peer, with both machines; `theirs` are the peer's devices."""

    machine: Machine
    device: str
    peer: int
    theirs: Collection[str]
    other: Machine | None

    @property
    def port(self) -> Port | None:
        """The port that has the device, or would have it."""
        ports = (each for each in self.machine.ports if self.device in (each.rdma, f"rdma_{each.interface}"))
        return next(ports, None)

    @property
    def present(self) -> str:
        return ", ".join(port.rdma for port in self.machine.ports if port.rdma) or "none"

    def misled(self) -> Iterator[Words]:
        port, ports = self.port, self.other.ports if self.other else ()
        right = [each for each in ports if each.rdma in self.theirs and each.domain]
        if port and port.peer_domain and right and port.peer_domain not in {each.domain for each in right}:
            end = next((each for each in ports if each.domain == port.peer_domain), None)
            yield {
                "port": place(port),
                "right_device": right[0].rdma,
                "right_port": place(right[0]),
                "end": f"in {place(end)} of it" if end else "at another machine",
            }


OF_USES: tuple[Fault[DeviceUse], ...] = (
    Fault("device-absent", "", WARNING, lambda use: use.port is None,
        "there is no RDMA device {at.device} for rank {at.peer}; this Mac has: {at.present}",
        f"look with `ibv_devices`, and {_BY_HAND}"),
    Fault("cable-misled", "", WARNING, DeviceUse.misled,
        "the cable in {port}, {at.device}, should lead to {right_device} of rank {at.peer} and ends {end}",
        f"move that end to {{right_port}} of rank {{at.peer}}, or {_BY_HAND}",
        "RDMA then fails to connect (errno 60)"),
)  # fmt: skip


def preflight(
    rank: int,
    machine: Machine,
    matrix: rdma.Matrix,
    *,
    ring: bool = False,
    others: Mapping[int, Machine] | None = None,
    named: Collection[str] = (),
) -> Finding | None:
    """Return the first reason why JACCL's `init` would fail on this rank's machine, or None.

    `machine` is current, with all its interfaces. With the machines of `others`, by rank, it checks cables'
    other ends. It skips devices that a user `named` by hand, and the machine if the rank uses no others.
    """
    if wrong := rdma.fault(matrix, ring=ring):
        remedy = f"correct the cables or the matrix, or {_by_hand(bool(named))}"
        return Finding(ERROR, wrong, remedy, id="matrix")
    uses = [
        DeviceUse(machine, name, peer, rdma.devices(matrix[peer][rank]), (others or {}).get(peer))
        for peer in rdma.peers(rank, len(matrix), ring=ring)
        for name in rdma.devices(matrix[rank][peer])
        if name not in named
    ]
    found = [_first(RDMA_OF_MACS, machine)] if uses else []
    for use in uses:
        found += [_first(RDMA_OF_PORTS, PortOf(machine, use.port))] if use.port else []
        found.append(_first(OF_USES, use))
    return next((each for each in found if each is not None), None)


def _by_hand(named: bool) -> str:
    return "correct the device that --rdma names" if named else _BY_HAND


# --- of a group that failed -------------------------------------------------------------------------------


class GroupFailure(NamedTuple):
    message: str
    named: Collection[str]  #: Devices that a user named by hand.


def _init(pattern: str, error: GroupFailure) -> Iterator[Words]:
    if match := re.search(pattern, error.message.partition("[jaccl] ")[2]):
        device = match.groupdict().get("device")
        yield {"by_hand": _by_hand(bool(error.named) if device is None else device in error.named)}


def _end(pattern: str, error: GroupFailure) -> bool:
    return re.search(pattern, error.message) is not None


OF_FORMING: tuple[Fault[GroupFailure], ...] = (
    Fault("jaccl-address", "", WARNING,
        partial(_init, r"Changing queue pair to \w+ failed with errno 22\b|No IPv4-mapped GID"),
        "an RDMA port has no IPv4 address or an old one, or bridge0 holds it",
        "give each cabled Thunderbolt port a lasting IPv4 address, a /30 for each cable (sudo ifconfig en5 "
        f"inet ADDRESS netmask {_NETMASK}; sudo route change PEER -interface en5), again if it changed; take "
        "the bridge down: sudo ifconfig bridge0 down (`mlxtp doctor` there has the command that lasts); if "
        "all that is right, restart this Mac, as the device may be used up"),
    Fault("jaccl-cable", "", WARNING, partial(_init, r"Changing queue pair to \w+ failed with errno 60\b"),
        "the cable of an RDMA device ends in another port than the matrix says",
        "move the cable to the port that `mlxtp plan` names, or {by_hand}"),
    Fault("jaccl-busy", "", WARNING,
        partial(_init, r"queue pair\b.* failed with .*\b16\b|Couldn't create completion queue"),
        "all of an RDMA device's queue pairs, about 10, are taken; trying again frees none",
        _FREE),
    Fault("jaccl-used-up", "", WARNING,
        partial(_init, r"Couldn't allocate protection domain|queue pair\b.* failed with .*\b96\b"
                       r"|Creating the queue pair failed with .*\b22\b"),
        "JACCL got no protection domain or queue pair: the device's port is down, or it is used up",
        f"{_PORT_UP}; if it is active, {_FREE}; only a restart is said to free what killed ranks held"),
    Fault("jaccl-memory", "", WARNING, partial(_init, "Register memory region failed"),
        "JACCL could not register its memory: one connection takes 64 or more of a device's 100 regions",
        f"use each device for one cable and one group; {_FREE}"),
    Fault("jaccl-device", "", WARNING, partial(_init, r"Could not (?:find|open) device (?P<device>\S+)"),
        "the matrix names an RDMA device that is not there or cannot be opened",
        "look with `ibv_devices` (if it lists none, with `rdma_ctl status`), or {by_hand}"),
    Fault("jaccl-matrix", "", WARNING, partial(_init, "valid mesh|valid ring|connectivity"),
        "the RDMA devices in the matrix join these Macs neither each to each nor in a circle",
        "look at the cables that `mlxtp plan` names, or {by_hand}"),
    Fault("jaccl-size", "", WARNING, partial(_init, "mesh supports up to|per direction supported"),
        "JACCL joins at most 8 Macs in a mesh, and two in a ring by at most 4 cables",
        "serve it on fewer Macs, or name fewer cables in --rdma"),
    Fault("jaccl-names", "", WARNING, partial(_init, "Device names should be null"),
        "JACCL cannot read the matrix of RDMA devices",
        "correct the devices that --rdma names"),
    Fault("jaccl-environment", "", WARNING, partial(_init, "need to provide via environment variables"),
        "JACCL got no rank, no devices or no coordinator from its environment",
        "unset variables that begin with JACCL_ or MLX_JACCL_, and restart the agent; else report it with "
        "`mlxtp version --verbose`"),
)  # fmt: skip

OF_ENDS: tuple[Fault[GroupFailure], ...] = (
    Fault("jaccl-driver", "", WARNING, partial(_end, "did not (form the group in time|come to round)"),
        "most likely the RDMA driver of that Mac did not return when JACCL opened or connected a device",
        "restart that Mac; if it happens again, unplug its Thunderbolt cables and plug them in again"),
    Fault("jaccl-idle-crash", "", WARNING, partial(_end, "signal 1[01] in phase (idle|proving)"),
        "JACCL crashed after it had idled, with all cables in place: a known fault of MLX (issue 4319)",
        "nothing; the group starts again on its own"),
    Fault("jaccl-crash", "", WARNING, partial(_end, "signal 1[01] in phase (prefill|decode|measuring)"),
        "JACCL crashed at work, as when a cable is pulled (MLX issue 4192), seldom after idling (4319)",
        "see that each Thunderbolt cable is plugged in at both ends; the group starts again on its own"),
)  # fmt: skip

FAULTS: tuple[Fault[Any], ...] = (*OF_MACS, *OF_PORTS, *OF_USES, *OF_FORMING, *OF_ENDS)


def explain(message: str, named: Collection[str] = ()) -> Finding | None:
    """Return the fault behind an error of a group's formation; `named` as in `preflight`."""
    return _first(OF_FORMING, GroupFailure(message, named))


def explain_crash(message: str) -> Finding | None:
    return _first(OF_ENDS, GroupFailure(message, ()))


def _first(table: Iterable[Fault[F]], facts: F) -> Finding | None:
    return next((each for fault in table for each in fault.found(facts)), None)
