"""Faults of cables and settings, and reasons why a group would not form: before it is tried, and afterwards.

Pure. Commands are for the person at the keyboard; this program runs none of them. JACCL reports the number of
the first error on each Mac by itself, and one number has several meanings: so faults that can be seen
beforehand are reported beforehand, in words. The numbers are macOS's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from zlib import crc32

from ..errors import NOBODY_BEHIND, Code
from ..wire.cluster_messages import Machine, Port
from ..wire.rdma import Matrix, devices, fault, peers
from .probe_macos import self_assigned
from .topology import MemberMachine

# --- advice about one Mac --------------------------------------------------------------------------------

THUNDERBOLT_5_GBPS = 80  #: Gb/s in each direction; Thunderbolt 4 and USB4 end at 40.
MAC_STUDIO = "Mac Studio"
RDMA_SINCE = (26, 2)  #: The first macOS with RDMA over Thunderbolt (Apple's TN3205).
MUCH_SLOWER = 10  #: Factor by which a link may be slower than it should be before users are told.
_RDMA_ON = (
    "hold the power button until the options load, choose Options, then Terminal in the Utilities menu, and"
    " run: rdma_ctl enable"
)
REPLUG = "unplug the cable and plug it in again; on a Mac, look with: system_profiler SPThunderboltDataType"
RDMA, BRIDGE, CABLE, ADDRESS, POWER = "rdma", "bridge", "cable", "address", "power"  #: Subjects of a note.


@dataclass(frozen=True, slots=True)
class Advice:
    """One fault in words, and what a person does about it. `about`: one of the subjects above."""

    about: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. {self.fix[:1].upper()}{self.fix[1:]}"


def findings(machine: Machine) -> tuple[str, ...]:
    """Return sentences for people, each of which fits into `Machine.notes`, the most important first."""
    return tuple(map(str, notes(machine)))


def notes(machine: Machine) -> tuple[Advice, ...]:
    """Return the same in parts. `machine` has all its interfaces."""
    found = list(_of_mac(machine)) if machine.system == "macos" else []
    if machine.power == "battery":
        what = "This machine runs on battery, so it may slow down or fall asleep while others wait"
        found.append(Advice(POWER, what, "Plug it in"))
    return tuple(found)


def _of_mac(machine: Machine) -> Iterator[Advice]:
    if machine.rdma == "disabled":
        yield Advice(
            RDMA,
            "RDMA over Thunderbolt is off, so Macs exchange over TCP, with a multiple of the latency",
            f"Shut down, {_RDMA_ON}",
        )
    fast = any(port.peer_domain and port.gbps >= THUNDERBOLT_5_GBPS for port in machine.ports)
    if machine.rdma == "unsupported" and fast and _is_older(machine):
        yield Advice(
            RDMA,
            f"macOS {machine.release} has no RDMA over Thunderbolt; macOS 26.2 brings it, for Thunderbolt 5",
            "Available updates: softwareupdate --list",
        )
    if machine.rdma == "enabled" and machine.bridge_up:
        yield Advice(
            BRIDGE,
            "The Thunderbolt bridge holds the Thunderbolt ports, and RDMA then fails to connect (errno 22)",
            _bridge_down(machine),
        )
    own = {port.domain for port in machine.ports if port.domain}
    cabled = [port for port in machine.ports if port.peer_domain and port.peer_domain not in own]
    if machine.rdma != "enabled" and machine.bridge_up and machine.interfaces:
        yield from _of_bridge(machine, cabled)
    for port in machine.ports:
        if port.peer_domain in own:
            what = f"{_name(port)} is cabled to another port of this same Mac: that connects nothing"
            yield Advice(CABLE, what, "Move it")
        elif port.peer_domain:
            yield from _of_cabled_port(machine, port)


def _of_cabled_port(machine: Machine, port: Port) -> Iterator[Advice]:
    if machine.rdma == "enabled":
        yield from _of_rdma(machine, port)
    # A machine whose interfaces could not be read has none, not even loopback.
    if port.interface and machine.interfaces and (machine.rdma == "enabled" or not machine.bridge_up):
        yield from _of_address(machine, port)
    if port.hub:
        what = "reaches the other Mac through a hub or dock, which adds latency and shares its bandwidth"
        yield Advice(CABLE, f"{_name(port)} {what}", "Cable the two Macs directly")


def _of_rdma(machine: Machine, port: Port) -> Iterator[Advice]:
    """Yield the reason why a cable that could carry RDMA does not."""
    if port.rdma and not port.active:
        yield Advice(
            CABLE,
            f"{_name(port)} is cabled, but its RDMA port {port.rdma} is not active: most likely the other"
            " Mac has RDMA off",
            "Look there with: rdma_ctl status",
        )
    elif port.rdma:
        return
    elif machine.model.startswith(MAC_STUDIO) and port.interface == "en2":
        yield Advice(
            CABLE,
            f"{_name(port)} is the port next to Ethernet, which has no RDMA on a Mac Studio",
            "Move the cable to another Thunderbolt port of this Mac",
        )
    elif 0 < port.gbps < THUNDERBOLT_5_GBPS:
        yield Advice(
            CABLE,
            f"{_name(port)} runs at {port.gbps} Gb/s, and RDMA needs Thunderbolt 5 (80 Gb/s), in both Macs"
            " and in the cable",
            "Look with: system_profiler SPThunderboltDataType",
        )
    else:
        what = f"{_name(port)} has no RDMA device, so it carries TCP only"
        yield Advice(CABLE, what, "Look with: ibv_devices")


def _of_bridge(machine: Machine, cabled: Sequence[Port]) -> Iterator[Advice]:
    """Yield the address that the bridge lacks where TCP goes over it: one that stays."""
    addresses = [each.address for each in machine.interfaces if each.kind == "bridge"]
    if not cabled or not all(map(self_assigned, addresses)):
        return
    if len(cabled) > 1:
        yield Advice(
            BRIDGE,
            f"The Thunderbolt bridge holds {len(cabled)} cables to Macs: a pair of addresses does not do for"
            " them, and a circle of cables through bridges makes a broadcast storm",
            f"{_bridge_down(machine)}; then each cable gets a pair of its own",
        )
        return
    own, other = cable_addresses(cabled[0].domain, cabled[0].peer_domain, "bridge ")
    service = shlex.quote(machine.bridge_service)
    now = f"sudo ifconfig bridge0 inet {own} netmask {_NETMASK}"
    keep = f"; for good: sudo networksetup -setmanual {service} {own} {_NETMASK}"
    yield Advice(
        ADDRESS,
        f"The Thunderbolt bridge has {f'only {addresses[0]}' if addresses else 'no IPv4 address'},"
        " and macOS may route self-assigned addresses over Wi-Fi, so TCP over the cable needs a lasting one",
        (f"until the next restart: {now}{keep}" if machine.bridge_service else f"after each restart: {now}")
        + f"; the other end gets {other}",
    )


def _of_address(machine: Machine, port: Port) -> Iterator[Advice]:
    """Yield the address that a cabled port lacks: an IPv4 address, better one that stays."""
    addresses = [interface.address for interface in machine.interfaces if interface.name == port.interface]
    if not addresses:
        yield Advice(
            ADDRESS,
            f"{_name(port)} is cabled to another Mac but has no IPv4 address, which RDMA and TCP both need",
            _port_address(port),
        )
    elif all(self_assigned(address) for address in addresses):
        yield Advice(
            ADDRESS,
            f"{_name(port)} has only the address {addresses[0]}, which it gave itself: it may change with the"
            " next cable, and TCP to such an address may leave by Wi-Fi or Ethernet",
            _port_address(port),
        )


#: Groups whose ranks were killed that one RDMA device is said to bear until its Mac restarts, with the group
#: that serves: owners report two or three.
FORMATIONS_A_BOOT = 3


def scarcity_advice(machine: Machine) -> Iterator[Advice]:
    """Yield each cabled RDMA device that may have one group left, or none, until this Mac restarts."""
    for port in machine.ports:
        if port.peer_domain and is_scarce(port.formations):
            yield Advice(
                RDMA,
                f"The next RDMA group over {port.rdma} may need a restart of this Mac:"
                f" {port.formations} serve or were killed since it started, and owners report room for two or"
                " three",
                "Restart it when that suits you; without RDMA, mlxtp goes on over the TCP ring",
            )


def is_scarce(formations: int) -> bool:
    """Return whether a device with so many groups that gave nothing back may have one left, or none."""
    return formations >= FORMATIONS_A_BOOT - 1


def _is_older(machine: Machine) -> bool:
    """Return True if this macOS is known to be older than RDMA over Thunderbolt."""
    version = tuple(int(part) for part in machine.release.split(".")[:2] if part.isdecimal())
    return () < version < RDMA_SINCE


def cable_addresses(domain: str, peer_domain: str, holder: str = "") -> tuple[str, str]:
    """Return (ours, theirs): two addresses of a /30 that both ends of a cable compute alike.

    The /30 is one of the 16,384 networks of 10.201.0.0/16, by the two Thunderbolt domains and by what has it:
    a bridge that is down keeps its addresses and routes. No message is needed.
    """
    low, high = sorted((domain, peer_domain))
    network = crc32(f"{holder}{low} {high}".encode()) % 2**14 * 4
    first, second = (f"10.201.{(network + host) >> 8}.{(network + host) & 255}" for host in (1, 2))
    return (first, second) if domain == low else (second, first)


_NETMASK = "255.255.255.252"


def _port_address(port: Port) -> str:
    """Return the commands for an address of a cabled port, and for its route, in words.

    `mlx.distributed_config` sets both, too: an earlier bridge may have left a route to the peer.
    """
    own, other = cable_addresses(port.domain, port.peer_domain)
    service, make = shlex.quote(port.service or f"mlxtp {port.receptacle}"), ""
    if not port.service:  # System Settings lists services, not ports
        hardware = shlex.quote(f"Thunderbolt {port.receptacle}")
        make = f"sudo networksetup -createnetworkservice {service} {hardware}; "
    return (
        f"until the next restart: sudo ifconfig {port.interface} inet {own} netmask {_NETMASK}; for good:"
        f" {make}sudo networksetup -setmanual {service} {own} {_NETMASK}; after either: sudo route change"
        f" {other} -interface {port.interface}; the other end gets {other}"
    )


def _bridge_down(machine: Machine) -> str:
    if not machine.bridge_service:
        return "after each restart: sudo ifconfig bridge0 down (no network service is known to have it)"
    service = shlex.quote(machine.bridge_service)
    return (
        "until the next restart: sudo ifconfig bridge0 down; for good: sudo networksetup"
        f" -setnetworkserviceenabled {service} off"
    )


def _name(port: Port, kind: str = "Thunderbolt") -> str:
    return f"{kind} {port.receptacle}" + (f" ({port.interface})" if port.interface else "")


# --- troubles of a group ---------------------------------------------------------------------------------


NO_ADDRESS = 22  #: The errno of a port that has no IPv4 address, or an old one.
_PORT_UP = (
    "plug the cable in at both ends, see that the other Mac is awake and has RDMA on, and look with "
    "`ibv_devinfo` for PORT_ACTIVE"
)
_FREE = (
    "end what else uses RDMA on this Mac, above all ranks of an earlier group that are still there; where "
    "there is nothing, restart it"
)
_BY_HAND = "name the device by hand (--rdma NODE=DEVICE)"


def _by_hand(named: bool) -> str:
    """Return the advice about a device; one that was `named` by hand cannot be named again."""
    return "correct the device that --rdma names" if named else _BY_HAND


@dataclass(frozen=True, slots=True)
class Trouble:
    """One reason and what to do about it.

    errno    JACCL's number for it, None without one
    used_up  the same text may come of a device that has no protection domain left
    by_hand  it helps to name a device by hand, too
    """

    what: str
    fix: str
    errno: int | None = None
    used_up: bool = False
    by_hand: bool = False

    def __str__(self) -> str:
        return f"{self.what}. To do: {self.fix}"


# --- before -----------------------------------------------------------------------------------------------


def preflight(
    rank: int,
    machine: Machine,
    matrix: Matrix,
    *,
    ring: bool = False,
    others: Mapping[int, Machine] | None = None,
    named: Collection[str] = (),
) -> Trouble | None:
    """Return the first reason why JACCL's `init` would fail on this rank's machine, or None.

    `machine` has all its interfaces and is current, because ports come and go. With the machines of `others`,
    by rank, cables are followed to their other ends. Devices that a user `named` by hand are not checked, and
    if the rank uses no others, nor is its machine.
    """
    if wrong := fault(matrix, ring=ring):
        return Trouble(wrong, f"correct the cables or the matrix, or {_by_hand(bool(named))}")
    connected = peers(rank, len(matrix), ring=ring)
    used = [(peer, name) for peer in connected for name in devices(matrix[rank][peer]) if name not in named]
    found = [_of_machine(machine)] if used else []
    for peer, name in used:
        port = next((port for port in machine.ports if port.rdma == name), None)
        if port is None:
            found.append(_no_such_device(machine, name, peer))
            continue
        found.append(_of_port(machine, port, peer))
        if others and peer in others:
            found.append(_of_cable(port, peer, devices(matrix[peer][rank]), others[peer]))
    return next(chain.from_iterable(found), None)


def _of_machine(machine: Machine) -> Iterator[Trouble]:
    if machine.rdma == "disabled":
        yield Trouble("RDMA over Thunderbolt is off on this Mac", f"shut this Mac down, {_RDMA_ON}")
    elif machine.rdma != "enabled" and machine.system == "macos" and _is_older(machine):
        yield Trouble(f"macOS {machine.release} has no RDMA over Thunderbolt", "update it to 26.2 or newer")
    elif machine.rdma != "enabled":
        yield Trouble(
            "this machine has no RDMA over Thunderbolt, which takes a Mac with Thunderbolt 5",
            f"use --backend ring; if it has an RDMA device all the same, {_BY_HAND}",
        )
    if machine.bridge_up:
        what = "bridge0, the Thunderbolt bridge, is up and holds Thunderbolt ports"
        yield Trouble(what, _bridge_down(machine), NO_ADDRESS)


def _no_such_device(machine: Machine, name: str, peer: int) -> Iterator[Trouble]:
    port = next((port for port in machine.ports if f"rdma_{port.interface}" == name), None)
    if port is not None:
        yield Trouble(
            f"the cable to rank {peer} is in {_place(port)}, which has no RDMA",
            "move it to another Thunderbolt 5 port; on a Mac Studio the one next to Ethernet has none",
        )
    present = ", ".join(port.rdma for port in machine.ports if port.rdma) or "none"
    yield Trouble(
        f"there is no RDMA device {name} for rank {peer}; this Mac has: {present}",
        f"look with `ibv_devices`, and {_BY_HAND}",
    )


def _of_port(machine: Machine, port: Port, peer: int) -> Iterator[Trouble]:
    if not port.active:
        what = f"{port.rdma} for rank {peer}, in {_place(port)}, is down, and gets no protection domain"
        yield Trouble(what, _PORT_UP)
    if not any(each.name == port.interface and each.up and each.address for each in machine.interfaces):
        what = f"{port.interface}, the interface of {port.rdma} for rank {peer}, has no IPv4 address"
        yield Trouble(what, _port_address(port), NO_ADDRESS)


def _of_cable(port: Port, peer: int, theirs: Collection[str], other: Machine) -> Iterator[Trouble]:
    """Yield a fault if the cable in this port ends in none of `theirs`, devices of the `other` machine."""
    right = [each for each in other.ports if each.rdma in theirs and each.domain]
    if not port.peer_domain or not right or port.peer_domain in {each.domain for each in right}:
        return
    end = next((each for each in other.ports if each.domain == port.peer_domain), None)
    yield Trouble(
        f"the cable in {_place(port)}, {port.rdma}, should lead to {right[0].rdma} of rank {peer} and ends "
        + (f"in {_place(end)} of it" if end else "at another machine"),
        f"move that end to {_place(right[0])} of rank {peer}, or {_BY_HAND}",
        60,
    )


def _place(port: Port) -> str:
    return _name(port, "Thunderbolt port")


# --- afterwards -------------------------------------------------------------------------------------------


#: By patterns of errors of `init`, in the order of search.
_MEANINGS: Mapping[str, Trouble] = {
    r"Changing queue pair to \w+ failed with errno 22\b|No IPv4-mapped GID": Trouble(
        "an RDMA port has no IPv4 address or an old one, or bridge0 holds it",
        "give each cabled Thunderbolt port an IPv4 address that stays, a /30 for each cable (sudo "
        "ifconfig en5 inet ADDRESS netmask 255.255.255.252; sudo route change PEER -interface en5), and "
        "set it again if it changed since the port came up; take the bridge down, until the next restart: "
        "sudo ifconfig bridge0 down; for good: the command that `mlxtp doctor` names on that Mac; where "
        "all that is right, restart this Mac, as the device may be used up",
        NO_ADDRESS,
        used_up=True,
    ),
    r"Changing queue pair to \w+ failed with errno 60\b": Trouble(
        "the cable of an RDMA device ends in another port than the matrix says",
        "move the cable to the port that `mlxtp plan` names",
        60,
        by_hand=True,
    ),
    r"queue pair\b.* failed with .*\b16\b|Couldn't create completion queue": Trouble(
        "all queue pairs of an RDMA device are taken, of which it has about 10; trying again frees none",
        _FREE,
        16,
    ),
    (
        r"Couldn't allocate protection domain|queue pair\b.* failed with .*\b96\b"
        r"|Creating the queue pair failed with .*\b22\b"
    ): Trouble(
        "JACCL got no protection domain or queue pair: the port of an RDMA device is down, or the device "
        "is used up",
        f"{_PORT_UP}; where it is active, {_FREE}; only that is said to give back those of killed ranks",
        used_up=True,
    ),
    r"Register memory region failed": Trouble(
        "JACCL could not register its memory: a device has room for 100 regions, of which one connection "
        "takes 64 or more",
        f"use each device for one cable and one group; {_FREE}",
    ),
    r"Could not (?:find|open) device (?P<device>\S+)": Trouble(
        "the matrix names an RDMA device that is not there or cannot be opened",
        "look with `ibv_devices` (where it lists none, with `rdma_ctl status`)",
        by_hand=True,
    ),
    r"valid mesh|valid ring|connectivity": Trouble(
        "the RDMA devices in the matrix join these Macs neither each with each nor in a circle",
        "look at the cables that `mlxtp plan` names",
        by_hand=True,
    ),
    r"mesh supports up to|per direction supported": Trouble(
        "JACCL joins at most 8 Macs in a mesh, and two in a ring by at most 4 cables",
        "serve it on fewer Macs, or name fewer cables in --rdma",
    ),
    r"Device names should be null": Trouble(
        "JACCL cannot read the matrix of RDMA devices", "correct the devices that --rdma names"
    ),
    r"need to provide via environment variables": Trouble(
        "JACCL got no rank, no devices or no coordinator from its environment",
        "unset variables that begin with JACCL_ or MLX_JACCL_ where the agent starts, and restart it; "
        "else report it with `mlxtp version --verbose`",
    ),
}


def explain(message: str, named: Collection[str] = ()) -> Trouble | None:
    """Return the trouble behind an error with which a group did not form; None for an unknown error.

    `named` are the devices that a user named by hand.
    """
    said = message.partition("[jaccl] ")[2]
    for pattern, trouble in _MEANINGS.items():
        if match := re.search(pattern, said):
            device = match.groupdict().get("device")
            hand = _by_hand(bool(named) if device is None else device in named)
            return replace(trouble, fix=f"{trouble.fix}, or {hand}") if trouble.by_hand else trouble
    return None


_CRASHES: Mapping[str, Trouble] = {
    "did not (form the group in time|come to round)": Trouble(
        "the RDMA driver of that Mac most likely did not return while JACCL opened or connected its devices",
        "restart that Mac; if it happens again, unplug its Thunderbolt cables and plug them in again",
    ),
    "signal 1[01] in phase (idle|proving)": Trouble(
        "JACCL crashed in a sum after it had idled, with all cables in place: a known fault of MLX "
        "(issue 4319)",
        "nothing; the group starts again by itself",
    ),
    "signal 1[01] in phase (prefill|decode|measuring)": Trouble(
        "JACCL crashed in the middle of its work, as it does when a cable is pulled (MLX issue 4192) or, "
        "seldom, after idling (issue 4319)",
        "see that both ends of each Thunderbolt cable are plugged in; the group starts again by itself",
    ),
}


def explain_crash(message: str) -> Trouble | None:
    """Return the trouble behind the end of a rank of a formed group; None if it is no known crash."""
    return next((trouble for ended, trouble in _CRASHES.items() if re.search(ended, message)), None)


def blames_fabric(code: Code, message: str) -> bool:
    """Return whether the fabric may be why a group over JACCL ended while it served.

    Signs are a crash, an error of JACCL, a wrong proof, and a stall in which one rank is behind: where none
    is, kernels may be slow on all. Lost processes, links and memory are no signs.
    """
    if code is Code.RANK_STALLED:
        return NOBODY_BEHIND not in message
    crashed = re.search(r"ended by signal (6|10|11)\b", message)
    return code is Code.PROOF_FAILED or "[jaccl] " in message or crashed is not None


def may_pass(code: Code, message: str) -> bool:
    """Return whether a failure on the way up, such as a lost link, reveals little about a fabric."""
    return code in _LOSSES or (code is Code.RANK_STALLED and NOBODY_BEHIND in message)


# --- memory of groups that failed to form, so that the next best plan takes their place ------------------
# A cable in the wrong port, a device without an address or queue pairs that are used up fail again at each
# try. The group is left out of planning for a while, or until its Macs change.

RETRY_S = 600.0  #: Until a group that failed to form may be tried again.
#: The same where the device seems used up until its Mac restarts, which is an assumption.
USED_UP_RETRY_S = 86_400.0
SOON_S = 60.0  #: The same after the loss of a process or link, which may not happen again.
ADDRESS_RETRY_S = 20.0  #: The same while an RDMA port may still get its address.
ADDRESSES_COME_S = 180.0  #: After the first failure; macOS assigns addresses minutes after a boot.

DOUBLINGS = 6  #: Of these times, while the group fails again.
DEATHS = 2  #: Ends in a row, while it served, after which a group is left out.
#: A group that served for longer begins a new row, if it was not left out for longer. As in RestartPolicy.
ROW_S = 120.0

_LOSSES = frozenset((Code.RANK_LOST, Code.LINK_LOST, Code.NOT_READY))

#: Two node ids in order, and the RDMA device of each; no devices over TCP.
FailedLink = tuple[str, str, str, str]
Links = frozenset[FailedLink]


def links_of(ranks: Sequence[str], rdma: Sequence[Sequence[str | None]]) -> Links:
    """Return what joins `ranks`: the cables of the matrix `rdma`, or all pairs without one."""
    found = set()
    for i, j in combinations(range(len(ranks)), 2):
        ends = sorted([(ranks[i], rdma[i][j] if rdma else ""), (ranks[j], rdma[j][i] if rdma else "")])
        (a, at_a), (b, at_b) = ends[0], ends[1]
        if not rdma or at_a or at_b:
            found.add((a, b, at_a or "", at_b or ""))
    return frozenset(found)


def runs_short(links: Links, machines: Mapping[str, Machine]) -> bool:
    """Return whether any RDMA device of these links may have one formation left, or none."""
    ends = {end for a, b, at_a, at_b in links for end in ((a, at_a), (b, at_b)) if end[0] in machines}
    return any(
        is_scarce(port.formations) and port.rdma in devices(entry)
        for node, entry in ends
        for port in machines[node].ports
    )


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that must not be planned. `kind` is a key of `cost_model.FABRICS`."""

    kind: str
    links: Links
    reason: str

    @property
    def nodes(self) -> list[str]:
        """Its node ids, sorted."""
        return sorted({node for link in self.links for node in link[:2]})

    def is_in(self, kind: str, links: Links) -> bool:
        """Return whether a group of `kind` with `links` contains this one."""
        return kind == self.kind and self.links <= links

    def circumstances(self, members: Mapping[str, MemberMachine]) -> object:
        """Return what may make it form where it failed before."""
        return tuple(_state_of(members[node]) if node in members else None for node in self.nodes)


@dataclass(slots=True)
class _Failure:
    """`circumstances` of its Macs, when it failed first, and when it may be tried again.

    `strikes` are failures on its way up, `deaths` ends in a row while it served. It was left out `out_s` for
    the last one, at `died_at`.
    """

    group: FailedGroup
    circumstances: object
    first_at: float
    until: float = 0.0
    strikes: int = 0
    deaths: int = 0
    died_at: float = 0.0
    out_s: float = 0.0

    def died(self, now: float, served_s: float, strikes: int) -> bool:
        """Note an end while it served; see `FailedGroups.failed`.

        In a row means: it served for less than `ROW_S`, or than it was left out, and soon after the last end.
        """
        if served_s >= max(ROW_S, self.out_s) or now - self.died_at >= RETRY_S + 2 * self.out_s:
            self.deaths, self.out_s = 0, 0.0
        self.deaths, self.died_at = self.deaths + 1, now
        if self.deaths < strikes:
            return False
        self.out_s = RETRY_S * 2 ** min(max(self.deaths - DEATHS, 0), DOUBLINGS)
        self.until = now + self.out_s
        return True


@dataclass(slots=True)
class FailedGroups:
    """The groups that failed, by kind and links. Times are of the caller's clock, in seconds."""

    _failures: dict[tuple[str, Links], _Failure] = field(default_factory=dict)

    def failed(
        self,
        group: FailedGroup,
        code: Code,
        members: Mapping[str, MemberMachine],
        now: float,
        *,
        strikes: int = 1,
        served_s: float | None = None,
    ) -> bool:
        """Note a failure. Return whether the group is left out from now on: at the `strikes`-th in a row.

        It came after `served_s` of service, or on the way up; then one over a scarce device is out at once.
        """
        key, circumstances = (group.kind, group.links), group.circumstances(members)
        known = self._failures.get(key)
        if known is None or known.circumstances != circumstances:
            known = self._failures[key] = _Failure(group, circumstances, now)
        known.group = group
        if served_s is not None:
            return known.died(now, served_s, strikes)
        trouble = explain(group.reason)
        scarce = runs_short(group.links, {node: member.machine for node, member in members.items()})
        soon = trouble is not None and trouble.errno == NO_ADDRESS and not scarce
        if soon and now < known.first_at + ADDRESSES_COME_S:
            known.until = now + ADDRESS_RETRY_S
            return True
        known.strikes += 1
        strikes = 1 if scarce else strikes
        if known.strikes < strikes:
            return False
        retry_s = SOON_S if may_pass(code, group.reason) and not scarce else RETRY_S
        if scarce and trouble is not None and trouble.used_up:
            retry_s = USED_UP_RETRY_S
        known.until = now + retry_s * 2 ** min(known.strikes - strikes, DOUBLINGS)
        return True

    def formed(self, kind: str, links: Links) -> None:
        """Forget failures to form. Ends while it served count until it has served for long."""
        known = self._failures.get((kind, links))
        if known is not None and known.deaths:
            known.strikes = 0
        else:
            self.forget(kind, links)

    def forget(self, kind: str, links: Links) -> None:
        self._failures.pop((kind, links), None)

    def absolve(self, nodes: Collection[str]) -> list[FailedGroup]:
        """Forget ends while groups of these nodes served: a request was to blame. Return those left out."""
        found = [each for each in self._failures.values() if each.deaths and {*each.group.nodes} & {*nodes}]
        for each in found:
            self.forget(each.group.kind, each.group.links)
        return [each.group for each in found if each.out_s]

    def left_out(
        self, members: Mapping[str, MemberMachine], now: float
    ) -> tuple[tuple[FailedGroup, float], ...]:
        """Return the groups not to be planned, and the seconds until each may be.

        A group whose Macs changed since is forgotten: other cables, ports, addresses, versions, or a restart.
        """
        for key, failure in list(self._failures.items()):
            if failure.circumstances != failure.group.circumstances(members):
                del self._failures[key]
        return tuple(
            (failure.group, failure.until - now) for failure in self._failures.values() if now < failure.until
        )


def _state_of(member: MemberMachine) -> tuple[object, ...]:
    machine = member.machine
    return (
        member.boot_id,
        (machine.release, machine.build, machine.rdma, machine.bridge_up),
        frozenset((each.name, each.address, each.up) for each in machine.interfaces),
        tuple(replace(port, formations=0, service="") for port in machine.ports),
    )
