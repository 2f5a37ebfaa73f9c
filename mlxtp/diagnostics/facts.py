"""What the doctor knows of one machine before it judges. Pure: filled in by `diagnostics/checkup.py`.

None stands for what could not be found out, with the reason beside it where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..wire.machine import Machine


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """Who looked. `problem`: an agent holds this home, and could not be asked.

    `state`, `reason`, `problem_of_cluster` and `waiting` are what `mlxtp status` says of it; `failures`
    counts the failed groups of which something is kept, `left_out` names those that planning leaves out,
    `proof` what the golden proof found.
    `left_wired` says what ended ranks left wired.
    """

    runs_here: bool = False
    problem: str = ""
    url: str = ""
    pid: int = 0
    state: str = ""
    reason: str = ""
    problem_of_cluster: str = ""
    waiting: str = ""
    left_out: tuple[str, ...] = ()
    proof: str = ""
    model: str = ""
    has_rank: bool = False
    keep_awake: bool = True
    failures: int = 0
    left_wired: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that mlxtp needs: its version here, empty for none, and the oldest that will do."""

    name: str
    installed: str
    floor: str


@dataclass(frozen=True, slots=True)
class Software:
    """`architecture` is this Python's, as `platform.machine` says; `program` its file."""

    python: str
    python_floor: str
    architecture: str
    program: str
    packages: tuple[Package, ...]


@dataclass(frozen=True, slots=True)
class Disk:
    """Room for one purpose, in bytes; None with a `problem`."""

    purpose: str
    folder: str
    free_bytes: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """`min_free_bytes` is the memory below which nothing new is taken; `critical` the kernel's word on it."""

    min_free_bytes: int
    critical: bool
    disks: tuple[Disk, ...]
    open_files: int
    """How many this process may have, or, of a command, how many the agent will."""


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A TCP port that an agent listens on. `problem`: why it cannot be had, empty if it can, or is ours."""

    name: str
    flag: str
    address: str
    ours: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to reach an address ("ip:port"). `problem` is empty when it was reached; `errno` 0 without one.

    `shared`: the address is in a network that both ends have. `drawn`: the port was drawn for this one try.
    """

    address: str
    problem: str = ""
    errno: int = 0
    shared: bool = True
    drawn: bool = False


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """Another member, as this machine sees it: in which `state`, empty where no agent knows.

    `ours` are this machine's tries to reach it, `theirs` its tries to reach this machine, None with `unasked`
    saying why it could not be asked. `clock_s` is how far its clock is ahead of ours, with an error of
    `clock_error_s`.
    """

    name: str
    state: str
    linked: bool
    heard: bool
    ours: tuple[Attempt, ...] = ()
    theirs: tuple[Attempt, ...] | None = None
    unasked: str = ""
    clock_s: float | None = None
    clock_error_s: float = 0.0
    fingerprint: str = ""
    model_problem: str = ""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """`multicast`: the errno of a send to the group of multicast DNS, 0 when it went, None where nothing was
    sent. `loopback`: whether this process reaches itself. `unicast`: sends to addresses of other members.

    `heard` are names that announce themselves; `listened` says that they were listened for.
    """

    loopback: bool = True
    multicast: int | None = None
    multicast_problem: str = ""
    unicast: tuple[Attempt, ...] = ()
    listened: bool = False
    heard: tuple[str, ...] = ()
    ports: tuple[PortFacts, ...] = ()
    beyond_loopback: bool = False
    """Whether the endpoint is for other machines too."""


@dataclass(frozen=True, slots=True)
class FirewallFacts:
    """On macOS, of the application firewall; on Linux `drops` is what its own says of what comes in."""

    enabled: bool | None = None
    blocks_all: bool | None = None
    app: str = ""
    """Of this Python: "allowed", "blocked", "unlisted", or empty where that is not known."""
    drops: bool | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PowerFacts:
    """The settings in use, by the names that macOS has for them; empty where they could not be read."""

    settings: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ClockFacts:
    """`ahead_s`: of the time server. `synchronised`: whether the system says that it follows one."""

    ahead_s: float | None = None
    server: str = ""
    synchronised: bool | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What it is for, and from when to when it holds. `renews`: by itself."""

    name: str
    begins: datetime
    ends: datetime
    renews: bool = False


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """`problem` is why the identity of this home cannot be used, `keys_problem` the same of its API keys.

    `authority` is the name of the Mac that lets others in, empty when nobody has heard of it;
    `authority_here` says that it is this one, `authority_linked` that it can be asked now.
    """

    cluster_id: str = ""
    problem: str = ""
    certificates: tuple[Certificate, ...] = ()
    https_problem: str = ""
    authority: str = ""
    authority_here: bool = False
    authority_linked: bool = False
    keys: int = 0
    keys_problem: str = ""
    keys_asked: bool = True
    """Whether other machines are asked for a key."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model that shall be served, by what it is called, and what this machine has of it."""

    wanted: str = ""
    fingerprint: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything. `members` are the others of the cluster; `now` has a time zone.

    `wrong_settings` keep an agent from starting with this home; `crashed`: the errors of looks that failed.
    """

    name: str
    now: datetime
    machine: Machine
    agent: AgentFacts
    software: Software
    room: MemoryRoom
    network: NetworkFacts
    firewall: FirewallFacts
    power: PowerFacts
    clock: ClockFacts
    identity: IdentityFacts
    model: ModelFacts = ModelFacts()
    members: tuple[MemberFacts, ...] = ()
    discovery: bool = True
    alone: bool = False
    """Whether the settings keep it to itself."""
    wrong_settings: tuple[str, ...] = ()
    crashed: tuple[str, ...] = ()

    @property
    def among_others(self) -> bool:
        """Whether other machines have to reach this one, or will when it joins them."""
        joins = not self.agent.runs_here and not self.alone
        return bool(self.identity.cluster_id) or self.network.beyond_loopback or joins
