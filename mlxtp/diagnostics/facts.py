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
    rank: int  #: of a pipeline
    layers: int
    busy_s: float  #: computing
    waiting_s: float  #: for other ranks


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """The agent that collected the facts. State, reason, waiting and model are as in `mlxtp status`."""

    runs_here: bool = False
    problem: str = ""  #: why the agent of this home could not be queried
    url: str = ""
    pid: int = 0
    state: str = ""
    reason: str = ""
    problem_of_cluster: str = ""
    waiting: str = ""
    left_out: tuple[str, ...] = ()  #: groups that planning leaves out
    fabric: str = ""  #: kind of the shown group and its Macs, if it has several
    proof: str = ""  #: a finding of the golden proof that is no failure
    slow_link: str = ""  #: a warning about the speed of links
    model: str = ""
    has_rank: bool = False
    keep_awake: bool = True
    failures: int = 0  #: failed groups with stored files
    left_wired: str = ""  #: memory that ended ranks left wired, in words
    formations: Mapping[str, int] = field(default_factory=dict)  #: as in `BootRecord`
    stages: tuple[StageFacts, ...] = ()  #: of the shown group, if it is a pipeline with rank 0 here


@dataclass(frozen=True, slots=True)
class PortFacts:
    name: str
    flag: str
    address: str
    ours: bool
    problem: str = ""  #: why it is not available
    by_mlxtp: bool = False  #: Another mlxtp answers there.

    @property
    def number(self) -> str:
        return self.address.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to reach an address."""

    address: str  #: "ip:port"
    problem: str = ""
    errno: int = 0
    shared: bool = True  #: Both ends have its network.


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """Another member."""

    name: str
    state: str  #: "" if no agent knows it
    linked: bool
    heard: bool
    ours: tuple[Attempt, ...] = ()  #: this machine's tries to reach it
    called: bool = False  #: It opened a link to this machine.
    fingerprint: str = ""
    model_problem: str = ""
    unlike: str = ""  #: a warning about its mlx-metal
    refused: str = ""  #: why one of the two refused the other last

    @property
    def answering(self) -> list[str]:
        return [each.address for each in self.ours if not each.problem]


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    loopback: bool = True  #: This process reaches itself.
    multicast: int | None = None  #: errno of a send to the mDNS group; 0 if it succeeded, None if not tried
    multicast_problem: str = ""
    unicast: tuple[Attempt, ...] = ()  #: sends to addresses of other members
    listened: bool = False  #: Discovery was tried.
    heard: tuple[str, ...] = ()  #: announced names
    ports: tuple[PortFacts, ...] = ()
    beyond_loopback: bool = False  #: The endpoint is open to other machines.


@dataclass(frozen=True, slots=True)
class FirewallFacts:
    enabled: bool | None = None  #: the application firewall of macOS
    blocks_all: bool | None = None
    app: str = ""  #: State of this Python: "allowed", "blocked", "unlisted", or "" if unknown.
    drops: bool | None = None  #: Linux's netfilter drops incoming packets.
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PowerFacts:
    settings: Mapping[str, int] = field(default_factory=dict)  #: in use, by macOS name; empty if unreadable
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    name: str
    begins: datetime
    ends: datetime
    renews: bool = False  #: mlxtp renews it at its start.


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    cluster_id: str = ""
    problem: str = ""  #: why this home's identity cannot be used
    certificates: tuple[Certificate, ...] = ()
    https_problem: str = ""
    authority_here: bool = False  #: This Mac holds the authority's key and can let others in.
    authority_lost: bool = False  #: The cluster expects the key here, but it is missing.
    holders: tuple[str, ...] = ()  #: names of the other Macs that hold it
    holders_here: tuple[str, ...] = ()  #: the linked ones among `holders`
    alone: bool = True  #: There are no other members.
    keys: int = 0
    keys_problem: str = ""  #: why this home's API keys cannot be used
    keys_asked: bool = True  #: The endpoint requires a key from other machines.


@dataclass(frozen=True, slots=True)
class ModelFacts:
    wanted: str = ""  #: the first deployed model by name
    fingerprint: str = ""  #: of this machine's copy
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts about this machine."""

    name: str
    now: datetime  #: with a time zone
    machine: Machine
    agent: AgentFacts
    program: str  #: this Python
    min_free_bytes: int  #: The agent refuses requests if less is free.
    pressure_critical: bool  #: It does so too while the kernel says this.
    network: NetworkFacts
    firewall: FirewallFacts
    power: PowerFacts
    identity: IdentityFacts
    model: ModelFacts = ModelFacts()
    members: tuple[MemberFacts, ...] = ()  #: the other ones
    discovery: bool = True
    alone: bool = False  #: The settings forbid a cluster.

    @property
    def among_others(self) -> bool:
        """True if other machines must reach this one now, or would after it joins."""
        joins = not self.agent.runs_here and not self.alone
        return bool(self.identity.cluster_id) or self.network.beyond_loopback or joins
