"""Reports of a Mac: itself, and the collectives that it measured."""

from __future__ import annotations

from dataclasses import dataclass

from .codecs import U63, boolean, choice, holding, integer, integers, number, numbers, records, text, texts

# --- a Mac: chip, memory, addresses, cables --------------------------------------------------------------
# `placement/hardware.py` fills it in, `MachineReport` carries it, `placement/planner.py` judges it.

MAX_INTERFACES = 32
MAX_PORTS = 16
MAX_NOTES = 16

_count = integer(0, U63)


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of a network interface. `mbps` 0 is unknown."""

    name: str = holding(text(40))
    address: str = holding(text(15))
    prefix: int = holding(integer(0, 32))
    kind: str = holding(choice("ethernet", "wifi", "thunderbolt", "bridge", "loopback", "other"))
    mbps: int = holding(integer(0, 10**7))
    up: bool = holding(boolean())


@dataclass(frozen=True, slots=True)
class Port:
    """One Thunderbolt port.

    `receptacle` is the number Apple gives it (1, 2, ...), `interface` its network device ("en5") or empty.
    `domain` is the UUID of its own Thunderbolt domain. `peer_domain` is that of the Mac at the other end of
    the cable, empty without one; with `hub`, a hub or dock is in between. `gbps` is the link's speed, 0 when
    unknown. `rdma` is its RDMA device ("rdma_en5"), empty for a port without; `active` is its state.
    """

    receptacle: int = holding(integer(0, 64))
    interface: str = holding(text(40))
    domain: str = holding(text(64))
    peer_domain: str = holding(text(64))
    hub: bool = holding(boolean())
    gbps: int = holding(integer(0, 1000))
    rdma: str = holding(text(60))
    active: bool = holding(boolean())


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. Sizes are in bytes.

    A value that could not be found out is 0 or empty, and `notes` has the reason. `chip` is Apple's name for
    it ("Apple M3 Ultra"). `gpu_bytes` is the most memory its GPU may wire, `free_bytes` the memory that the
    system calls available now. `rdma` is "enabled", "disabled" or "unsupported". `power` is "ac", "battery"
    or "unknown". `notes` are sentences for people.
    """

    system: str = holding(choice("macos", "linux", "other"))
    release: str = holding(text(60))
    build: str = holding(text(60))
    model: str = holding(text(60))
    chip: str = holding(text(80))
    cpu_cores: int = holding(integer(0, 4096))
    gpu_cores: int = holding(integer(0, 4096))
    memory_bytes: int = holding(_count)
    free_bytes: int = holding(_count)
    wired_bytes: int = holding(_count)
    gpu_bytes: int = holding(_count)
    power: str = holding(choice("ac", "battery", "unknown"))
    rdma: str = holding(choice("enabled", "disabled", "unsupported"))
    bridge_up: bool = holding(boolean())
    interfaces: tuple[Interface, ...] = holding(records(Interface, 0, MAX_INTERFACES), default=())
    ports: tuple[Port, ...] = holding(records(Port, 0, MAX_PORTS), default=())
    notes: tuple[str, ...] = holding(texts(MAX_NOTES, 300), default=())


# --- measurements of the collectives of one group of ranks -----------------------------------------------
# `groups/fabric.py` measures them, `FabricReport` carries them, `placement/measurements.py` keeps
# and judges them.

MAX_SIZES = 16
_NODES = 8
_SHORTEST_S, _LONGEST_S = 1e-9, 1e4  #: limits of a plausible time: a nanosecond, and some hours


@dataclass(frozen=True, slots=True)
class FabricResult:
    """Seconds that collectives took, on the slowest rank, over `sizes` bytes of each rank.

    `nodes` are node ids in rank order; `backend` and `kind` describe how they were joined. A fence depends on
    `fast_fences` and `metal` (a GPU computes). `at` is the time of day, in seconds since 1970. `collective_s`
    is one of a chain of small sums within one graph, its fence included. `sums_s` and `gathers_s` have one
    for each of `sizes`, which grow, run one after the other.
    """

    nodes: tuple[str, ...] = holding(texts(_NODES, 32))
    backend: str = holding(choice("ring", "jaccl"))
    kind: str = holding(text(60))
    fast_fences: bool = holding(boolean())
    metal: bool = holding(boolean())
    at: int = holding(integer(0, U63))
    collective_s: float = holding(number(_SHORTEST_S, _LONGEST_S))
    sizes: tuple[int, ...] = holding(integers(1, 2**31 - 1, 1, MAX_SIZES))
    sums_s: tuple[float, ...] = holding(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))
    gathers_s: tuple[float, ...] = holding(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))
