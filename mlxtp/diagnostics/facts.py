"""Facts about one machine, which `diagnostics/checkup.py` collects. Pure.

None stands for an unknown fact; a `problem` field next to it says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..wire.cluster_messages import Machine


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Layers of one rank of a pipeline, and its seconds of computing and of waiting for other ranks."""

    rank: int
    layers: int
    busy_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """The agent that collected the facts. State, reason, waiting and model are as in `mlxtp status`.

    problem            the agent of this home could not be queried
    left_out           groups that planning leaves out
    fabric             kind of the shown group and its Macs, if it has several
    proof, slow_link   results of the golden proof, and of the links' speed
    failures           number of failed groups with stored files
    left_wired         memory that ended ranks left wired, in words
    formations         as in `BootRecord`
    stages             of the shown group, if it is a pipeline with rank 0 here
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
    fabric: str = ""
    proof: str = ""
    slow_link: str = ""
    model: str = ""
    has_rank: bool = False
    keep_awake: bool = True
    failures: int = 0
    left_wired: str = ""
    formations: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[StageFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A TCP port of an agent. `problem`: why it is not available. `by_mlxtp`: another mlxtp answers there."""

    name: str
    flag: str
    address: str
    ours: bool
    problem: str = ""
    by_mlxtp: bool = False

    @property
    def number(self) -> str:
        return self.address.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to reach "ip:port". `shared`: both ends have the address's network."""

    address: str
    problem: str = ""
    errno: int = 0
    shared: bool = True


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """Another member. `state` is "" if no agent knows it; `ours` are this machine's tries to reach it.

    `called`: it opened a link to this machine. `unlike`: a warning about its mlx-metal. `refused`: why one of
    the two refused the other last.
    """

    name: str
    state: str
    linked: bool
    heard: bool
    ours: tuple[Attempt, ...] = ()
    called: bool = False
    fingerprint: str = ""
    model_problem: str = ""
    unlike: str = ""
    refused: str = ""

    @property
    def answering(self) -> list[str]:
        return [each.address for each in self.ours if not each.problem]


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Facts about the network.

    loopback         this process reaches itself
    multicast        errno of a send to the group of multicast DNS, 0 if it succeeded, None if not tried
    unicast          sends to addresses of other members
    heard            announced names; `listened`: discovery was tried
    beyond_loopback  the endpoint is open to other machines
    """

    loopback: bool = True
    multicast: int | None = None
    multicast_problem: str = ""
    unicast: tuple[Attempt, ...] = ()
    listened: bool = False
    heard: tuple[str, ...] = ()
    ports: tuple[PortFacts, ...] = ()
    beyond_loopback: bool = False


@dataclass(frozen=True, slots=True)
class FirewallFacts:
    """On macOS the application firewall. On Linux `drops`: netfilter drops incoming packets."""

    enabled: bool | None = None
    blocks_all: bool | None = None
    app: str = ""  #: State of this Python: "allowed", "blocked", "unlisted", or "" if unknown.
    drops: bool | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PowerFacts:
    """The power settings in use, by their macOS names; empty if unreadable."""

    settings: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Name and validity of a certificate. `renews`: mlxtp renews it at its start."""

    name: str
    begins: datetime
    ends: datetime
    renews: bool = False


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """`problem`: why this home's identity cannot be used; `keys_problem`: the same for its API keys.

    authority_here  this Mac holds the authority's key and can let others in
    authority_lost  the cluster expects the key here, but it is missing
    holders         names of the other Macs that hold it; `holders_here`: of these, the linked ones
    alone           there are no other members
    keys_asked      the endpoint requires a key from other machines
    """

    cluster_id: str = ""
    problem: str = ""
    certificates: tuple[Certificate, ...] = ()
    https_problem: str = ""
    authority_here: bool = False
    authority_lost: bool = False
    holders: tuple[str, ...] = ()
    holders_here: tuple[str, ...] = ()
    alone: bool = True
    keys: int = 0
    keys_problem: str = ""
    keys_asked: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The first deployed model by name, and this machine's copy of it."""

    wanted: str = ""
    fingerprint: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts. `members` are the other members; `now` has a time zone; `program` is this Python.

    The agent refuses requests if less than `min_free_bytes` is free, or the kernel's pressure is critical.
    `alone`: the settings forbid a cluster.
    """

    name: str
    now: datetime
    machine: Machine
    agent: AgentFacts
    program: str
    min_free_bytes: int
    pressure_critical: bool
    network: NetworkFacts
    firewall: FirewallFacts
    power: PowerFacts
    identity: IdentityFacts
    model: ModelFacts = ModelFacts()
    members: tuple[MemberFacts, ...] = ()
    discovery: bool = True
    alone: bool = False

    @property
    def among_others(self) -> bool:
        """True if other machines must reach this one now, or would after it joins."""
        joins = not self.agent.runs_here and not self.alone
        return bool(self.identity.cluster_id) or self.network.beyond_loopback or joins
