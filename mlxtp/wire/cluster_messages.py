"""Messages of links between agents.

A *control* link joins two agents. Both send mostly the same messages: their identity, heartbeats, the
deployments. The owner of a group also has the others start and end its ranks over it. A *requests* link
carries requests from an agent with clients to the owner of a group; its messages are those of a pipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import Code
from .codecs import (
    U32,
    U63,
    Message,
    binary,
    boolean,
    choice,
    group_id,
    hexes,
    integer,
    integers,
    joined,
    number,
    numbers,
    record,
    records,
    text,
    texts,
)
from .codecs import holding as _f
from .messages import (
    DIGEST_BYTES,
    MAX_GROUP_ID,
    MAX_LAYERS,
    MAX_RANKS,
    Bootstrap,
    Gathered,
    Pong,
    SideChannel,
)
from .peer_messages import MAX_CERTIFICATE_BYTES, POINT_BYTES

# --- a Mac: chip, memory, addresses, cables --------------------------------------------------------------
# `placement/hardware.py` fills it in, `MachineReport` carries it, `placement/planner.py` judges it.

MAX_INTERFACES = 32
MAX_PORTS = 16
MAX_NOTES = 16
MAX_CACHES = 32
MAX_SERVICE = 60  #: Characters of the name of a network service.

_count = integer(0, U63)


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of a network interface. `mbps` 0 is unknown."""

    name: str = _f(text(40))
    address: str = _f(text(15))
    prefix: int = _f(integer(0, 32))
    kind: str = _f(choice("ethernet", "wifi", "thunderbolt", "bridge", "loopback", "other"))
    mbps: int = _f(integer(0, 10**7))
    up: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class Port:
    """One Thunderbolt port.

    `receptacle` is the number Apple gives it (1, 2, ...), `interface` its network device ("en5") or empty.
    `domain` is the UUID of its own Thunderbolt domain. `peer_domain` is that of the Mac at the other end of
    the cable, empty without one; with `hub`, a hub or dock is in between. `gbps` is the link's speed, 0 when
    unknown. `rdma` is its RDMA device ("rdma_en5"), empty for a port without; `active` is its state.
    `formations` counts the attempts to form a JACCL group over it since the Mac started whose ranks have not
    given it back. `service` is the network service of its interface, which most ports have none of.
    """

    receptacle: int = _f(integer(0, 64))
    interface: str = _f(text(40))
    domain: str = _f(text(64))
    peer_domain: str = _f(text(64))
    hub: bool = _f(boolean())
    gbps: int = _f(integer(0, 1000))
    rdma: str = _f(text(60))
    active: bool = _f(boolean())
    formations: int = _f(integer(0, U32), default=0)
    service: str = _f(text(MAX_SERVICE), default="")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. Sizes are in bytes.

    A value that could not be found out is 0 or empty, and `notes` has the reason. `chip` is Apple's name for
    it ("Apple M3 Ultra"). `gpu_bytes` is the most memory its GPU may wire, `free_bytes` the memory that is
    free now, `stranded_bytes` what ended ranks may have left wired until its restart. `rdma` is "enabled",
    "disabled" or "unsupported". `power` is "ac", "battery" or "unknown". `notes` are sentences for people.
    `bridge_service` is the network service of bridge0, empty without one; its name is translated, and users
    change it. `caches` names the models with KV caches of several ranks on its disk, each behind its rank:
    "1 Qwen3-32B-4bit".
    """

    system: str = _f(choice("macos", "linux", "other"))
    release: str = _f(text(60))
    build: str = _f(text(60))
    model: str = _f(text(60))
    chip: str = _f(text(80))
    cpu_cores: int = _f(integer(0, 4096))
    gpu_cores: int = _f(integer(0, 4096))
    memory_bytes: int = _f(_count)
    free_bytes: int = _f(_count)
    wired_bytes: int = _f(_count)
    gpu_bytes: int = _f(_count)
    power: str = _f(choice("ac", "battery", "unknown"))
    rdma: str = _f(choice("enabled", "disabled", "unsupported"))
    bridge_up: bool = _f(boolean())
    interfaces: tuple[Interface, ...] = _f(records(Interface, 0, MAX_INTERFACES), default=())
    ports: tuple[Port, ...] = _f(records(Port, 0, MAX_PORTS), default=())
    notes: tuple[str, ...] = _f(texts(MAX_NOTES, 1000), default=())
    bridge_service: str = _f(text(MAX_SERVICE), default="")
    stranded_bytes: int = _f(_count, default=0)
    caches: tuple[str, ...] = _f(texts(MAX_CACHES, 400), default=())


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

    nodes: tuple[str, ...] = _f(texts(_NODES, 32))
    backend: str = _f(choice("ring", "jaccl"))
    kind: str = _f(text(60))
    fast_fences: bool = _f(boolean())
    metal: bool = _f(boolean())
    at: int = _f(integer(0, U63))
    collective_s: float = _f(number(_SHORTEST_S, _LONGEST_S))
    sizes: tuple[int, ...] = _f(integers(1, 2**31 - 1, 1, MAX_SIZES))
    sums_s: tuple[float, ...] = _f(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))
    gathers_s: tuple[float, ...] = _f(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))


# --- messages --------------------------------------------------------------------------------------------


MAX_MEMBERS = 64
MAX_TOLD = 32  #: Deployments in one message: what one frame may hold in objects.
MAX_ENTERED = 24  #: Entries of the roster in one message, for the same reason.
MAX_PARTING = 3000  #: Characters of one part; frames before a link is open hold 4 KiB.
MAX_PAST = 8  #: Authorities before the present one whose signatures are believed.
MAX_MODEL = 1000
MAX_HASHES = 512  #: Digests of beginnings that one group reports: 131,072 tokens.
MAX_TRIP_US = 60_000_000
MAX_STORED = 64

_epoch = integer(1, U63)
_rank = integer(0, MAX_RANKS - 1)
_id = text(32)
_detail = text(1000, cut=True)
_state = choice(
    "starting", "forming", "loading", "idle", "ready", "draining", "restarting", "failed", "stopped"
)


@dataclass(frozen=True, slots=True)
class AgentHello(Message):
    """First frame of both ends: the agent's identity, its start, and its versions.

    `boot_id` is new at each start of the agent. `versions` and `flags` ("mlx=0.32.4") must be compatible for
    ranks to compute alike. `addresses` are where this agent listens ("ip:port"), `http` is its endpoint.
    `clock` is its time, in seconds since 1970. Fields of other versions are ignored, and none is ever taken
    away: two versions that cannot work together must read each other's.
    """

    TYPE: ClassVar[int] = 0x30
    GROWS: ClassVar[bool] = True
    version: int = _f(integer(0, U32))
    node_id: str = _f(_id)
    cluster_id: str = _f(text(16))
    boot_id: str = _f(_id)
    name: str = _f(text(80))
    versions: tuple[str, ...] = _f(texts(16, 80))
    flags: tuple[str, ...] = _f(texts(32, 120))
    addresses: tuple[str, ...] = _f(texts(16, 64))
    http: str = _f(text(120))
    clock: int = _f(_count, default=0)


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Heartbeat of each end, twice a second: its coordinator, and digests of its state.

    `term` and `coordinator` are its claim; `epoch` is the highest it has seen. `desired` and `roster` are the
    digests of its deployments and its roster. `pulse` is the highest it has received; the coordinator
    increments it with each Beat of its own. `draining`: it is about to stop, and must not be counted on.
    `short`: it has less free memory than new requests need. `clock` is its time, in seconds since 1970.
    """

    TYPE: ClassVar[int] = 0x31
    term: int = _f(_count)
    coordinator: str = _f(_id)
    desired: int = _f(_count)
    roster: int = _f(_count)
    epoch: int = _f(_count)
    healthy: bool = _f(boolean())
    pulse: int = _f(_count)
    draining: bool = _f(boolean(), default=False)
    short: bool = _f(boolean(), default=False)
    clock: int = _f(_count, default=0)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One row of the table of deployments: a model that the cluster should serve, or one `removed`.

    `name` is the model without its revision. `replicas` is the number of groups, 0 for as many as fit.
    `nodes` is "auto", "all" or the number of Macs of each group, `on` has the node ids of the Macs that may
    serve it, none for any. `keep_s` is the disuse in seconds after which it ends; -1 is never: a user pinned
    it. The higher `version` of a name holds; `writer` is the node that wrote it. `since` is the version that
    pinned it, 0 for this one. `parallel` is "auto", "tensor" or "pipeline", empty for what the owner's
    settings have. `split` has the layers of each rank of a pipeline, divided by commas, or is "auto".
    """

    name: str = _f(text(MAX_MODEL))
    model: str = _f(text(MAX_MODEL), default="")
    replicas: int = _f(integer(0, MAX_MEMBERS), default=1)
    nodes: str = _f(text(8), default="auto")
    on: tuple[str, ...] = _f(joined(MAX_MEMBERS, 32), default=())
    keep_s: int = _f(integer(-1, U32), default=-1)
    version: int = _f(_count, default=0)
    writer: str = _f(_id, default="")
    removed: bool = _f(boolean(), default=False)
    since: int = _f(_count, default=0)
    parallel: str = _f(text(8), default="")
    split: str = _f(text(40), default="auto")

    @property
    def pinned(self) -> bool:
        """True for a deployment that stays however long it is not used."""
        return self.keep_s < 0 and not self.removed


@dataclass(frozen=True, slots=True)
class Deployments(Message):
    """Part of the table of deployments; the other parts follow at once while there is `more`.

    `floor`: rows up to this version that the table lacks are over. `cluster.cluster_state` merges two tables.
    """

    TYPE: ClassVar[int] = 0x05
    rows: tuple[Deployment, ...] = _f(records(Deployment, 0, MAX_TOLD))
    floor: int = _f(_count)
    more: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """One member, or one that was removed. `fingerprint` is its key's, as 64 hex digits.

    `admitted_by` is the member that requested its token; the founder names itself. It joined from `address`,
    at `at` (seconds since 1970). `admission` is the authority's signature over all that, in hex. The member
    with the key `remover` (hex) removed it in version `removed_in`; `removal` is that key's signature.
    `authorized` is the authority's signature over the same, if the remover held its key. `holds`: this member
    holds the authority's key, as written in version `holds_in`; `holding` is the authority's signature.
    """

    node_id: str = _f(_id)
    name: str = _f(text(80))
    fingerprint: str = _f(text(64))
    removed: bool = _f(boolean())
    version: int = _f(_count)
    admitted_by: str = _f(_id, default="")
    address: str = _f(text(64), default="")
    at: int = _f(_count, default=0)
    admission: str = _f(text(160), default="")
    removed_in: int = _f(_count, default=0)
    remover: str = _f(text(130), default="")
    removal: str = _f(text(160), default="")
    authorized: str = _f(text(160), default="")
    holds: bool = _f(boolean(), default=False)
    holds_in: int = _f(_count, default=0)
    holding: str = _f(text(160), default="")


@dataclass(frozen=True, slots=True)
class Members(Message):
    """Part of the roster: members, present or not, and those that were removed."""

    TYPE: ClassVar[int] = 0x06
    entries: tuple[RosterEntry, ...] = _f(records(RosterEntry, 0, MAX_ENTERED))


@dataclass(frozen=True, slots=True)
class RosterParting(Message):
    """Part of the roster of an end that cannot work with the other one, sent before the link ends.

    The parts together are a text of `cluster_state.roster_text`, with a version of its own: this message
    stays as it is in all protocol versions.
    """

    TYPE: ClassVar[int] = 0x5C
    part: str = _f(text(MAX_PARTING))
    more: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class RosterSaved(Message):
    """Report that the roster with this digest is on the sender's disk."""

    TYPE: ClassVar[int] = 0x54
    roster: int = _f(_count)


@dataclass(frozen=True, slots=True)
class MachineReport(Machine, Message):
    """Hardware and state of the sender's machine."""

    TYPE: ClassVar[int] = 0x32


@dataclass(frozen=True, slots=True)
class MachineWanted(Message):
    """Request to read the machine again. Reply: MachineReport, even if nothing changed."""

    TYPE: ClassVar[int] = 0x3C


@dataclass(frozen=True, slots=True)
class ModelStatus(Message):
    """Status of one wanted model at the sender: `fingerprint` of its files, or in `problem` why it has none.

    Both are empty while it still checks or downloads. `model` is its name in a deployment, `revision`
    its commit, if known. `weight_mib` is the size of its weights in MiB, rounded up; 0 while unknown.
    """

    TYPE: ClassVar[int] = 0x33
    model: str = _f(text(MAX_MODEL))
    fingerprint: str = _f(text(64))
    problem: str = _f(_detail)
    revision: str = _f(text(40), default="")
    weight_mib: int = _f(_count, default=0)


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """Owner to participant: start a rank process for `epoch`. Reply: Prepared or RankTrouble.

    `fabric` is the participant's own address for MLX's sockets, empty where there are none. `model` is its
    name in its deployment. `trial`: the group only proves itself, beside the serving one, and ends.
    `group` is the id of the group, whose earlier rank ends.
    """

    TYPE: ClassVar[int] = 0x34
    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    fabric: str = _f(text(64))
    model: str = _f(text(MAX_MODEL))
    trial: bool = _f(boolean(), default=False)
    group: str = _f(group_id(MAX_GROUP_ID), default="")


@dataclass(frozen=True, slots=True)
class Prepared(Message):
    """The rank process sent its Hello.

    `ring` is a free port on its fabric address ("ip:port"), `path` the folder of the model on its machine.
    """

    TYPE: ClassVar[int] = 0x35
    epoch: int = _f(_epoch)
    ring: str = _f(text(64))
    path: str = _f(text(4000, raw=True))


@dataclass(frozen=True, slots=True)
class StartRank(Message):
    """Owner to participant: pass this to the rank process. Reply: RankStarted or RankTrouble."""

    TYPE: ClassVar[int] = 0x36
    epoch: int = _f(_epoch)
    bootstrap: Bootstrap = _f(record(Bootstrap))  # noqa: RUF009 - a field


@dataclass(frozen=True, slots=True)
class RankStarted(Message):
    """The rank process has its decode link."""

    TYPE: ClassVar[int] = 0x37
    epoch: int = _f(_epoch)
    jaccl: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class RankPong(Message):
    """Heartbeat of a rank, from its agent to the owner of its group."""

    TYPE: ClassVar[int] = 0x40
    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    pong: Pong = _f(record(Pong))  # noqa: RUF009 - a field


@dataclass(frozen=True, slots=True)
class RankTrouble(Message):
    """Failure of a rank, from its agent. `outside`: the agent saw it, the rank did not report it."""

    TYPE: ClassVar[int] = 0x41
    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    code: str = _f(choice(*(code.value for code in Code)))
    detail: str = _f(_detail)
    outside: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class EndEpoch(Message):
    """Owner to participant: end the rank of `epoch`, in order or at once. Reply: EpochEnded."""

    TYPE: ClassVar[int] = 0x42
    epoch: int = _f(_epoch)
    in_order: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class EpochEnded(Message):
    """Report that the rank process of `epoch` is gone."""

    TYPE: ClassVar[int] = 0x43
    epoch: int = _f(_epoch)


@dataclass(frozen=True, slots=True)
class RankSide(Message):
    """Bytes of one rank for a round of JACCL's all-gather, on their way to the owner of the group."""

    TYPE: ClassVar[int] = 0x44
    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    side: SideChannel = _f(record(SideChannel))  # noqa: RUF009 - a field


@dataclass(frozen=True, slots=True)
class RankGathered(Message):
    """Bytes of all ranks for that round, or the error in their place, on the way back."""

    TYPE: ClassVar[int] = 0x48
    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    gathered: Gathered = _f(record(Gathered))  # noqa: RUF009 - a field


@dataclass(frozen=True, slots=True)
class Serving(Message):
    """The agent of rank 0 to all: the state of one of its groups, and the model it serves when ready.

    `group` is the id of the group, `deployment` the name of what it serves. In the state "stopped", without
    participants, the group is gone.

    `participants` are node ids in rank order, `key` is the value that plans are compared by. `eos`, `context`
    and `vocabulary` are the model's. `load_s` is the time to load it, in seconds. `held_mib` is the memory of
    each rank on its Mac, in MiB; empty before all of them have loaded. `running` of the open requests have
    their first token. `speed` is in tokens per second, over the last seconds; `cached` counts tokens that the
    group keeps for later prompts. `idle_s` is the time since the last request in seconds, from 10 s on in
    steps of 10 s; 0 while one is open. `broken`: the model itself is at fault for a failure. `checkpoints` as
    in Loaded. `split` has the layers of each rank of a pipeline, of which rank 0 has the last ones. `ready_s`
    is the time for which the epoch has been ready, in seconds; 0 before.
    """

    TYPE: ClassVar[int] = 0x45
    epoch: int = _f(_count)
    state: str = _f(_state)
    reason: str = _f(_detail)
    backend: str = _f(text(20))
    kind: str = _f(text(60))
    participants: tuple[str, ...] = _f(texts(MAX_RANKS, 32))
    key: tuple[float, ...] = _f(numbers(-1e12, 1e12, 8))
    open_requests: int = _f(_count)
    model: str = _f(text(MAX_MODEL))
    desired: int = _f(_count)
    context: int = _f(integer(0, U32))
    vocabulary: int = _f(integer(0, U32))
    eos: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, 64))
    load_s: int = _f(integer(0, U32), default=0)
    held_mib: tuple[int, ...] = _f(integers(0, U32, 0, MAX_RANKS), default=())
    group: str = _f(group_id(MAX_GROUP_ID), default="")
    deployment: str = _f(text(MAX_MODEL), default="")
    running: int = _f(_count, default=0)
    speed: int = _f(_count, default=0)
    cached: int = _f(_count, default=0)
    idle_s: int = _f(integer(0, U32), default=0)
    broken: bool = _f(boolean(), default=False)
    checkpoints: bool = _f(boolean(), default=False)
    split: tuple[int, ...] = _f(integers(1, MAX_LAYERS, 0, MAX_RANKS), default=())
    ready_s: int = _f(integer(0, U32), default=0)


@dataclass(frozen=True, slots=True)
class ReplicaLoad(Message):
    """The owner of a replica to all: its work, and what it has cached, by which others choose a replica.

    `queued` prompt tokens of its `requests` are not computed yet; it computes `speed` of them per second, 0
    where not measured. `prefixes` are digests of beginnings in its KV caches (`PrefixDigests`), the oldest
    first. It is sent with a beat, when it has changed.
    """

    TYPE: ClassVar[int] = 0x56
    group: str = _f(group_id(MAX_GROUP_ID))
    queued: int = _f(_count)
    requests: int = _f(_count)
    speed: int = _f(integer(0, U32))
    prefixes: bytes = _f(binary(0, DIGEST_BYTES * MAX_HASHES))


@dataclass(frozen=True, slots=True)
class GroupAssignment(Message):
    """The coordinator to all: `owner` runs a group of a deployment, on Macs among `nodes`, the owner first.

    `number` counts the assignments of this `term`. An empty `owner` means that the group runs nowhere, for
    the reason in `why`. `kv_mib` bounds the KV caches of each rank; 0 is no bound. `leaving` are the nodes
    about to stop that the coordinator knew of.
    """

    TYPE: ClassVar[int] = 0x55
    group: str = _f(group_id(MAX_GROUP_ID))
    deployment: str = _f(text(MAX_MODEL))
    term: int = _f(_count, default=0)
    number: int = _f(_count, default=0)
    owner: str = _f(_id, default="")
    nodes: tuple[str, ...] = _f(texts(MAX_MEMBERS, 32), default=())
    why: str = _f(_detail, default="")
    kv_mib: int = _f(integer(0, U32), default=0)
    leaving: tuple[str, ...] = _f(texts(MAX_MEMBERS, 32), default=())


@dataclass(frozen=True, slots=True)
class TokenWanted(Message):
    """Request to a Mac that holds the authority's key: issue a join token. Reply: TokenIssued."""

    TYPE: ClassVar[int] = 0x46
    nonce: bytes = _f(binary(16, 16))


@dataclass(frozen=True, slots=True)
class TokenIssued(Message):
    """Reply: a join token, or in `problem` why there is none."""

    TYPE: ClassVar[int] = 0x47
    nonce: bytes = _f(binary(16, 16))
    token: str = _f(text(200))
    problem: str = _f(_detail)


@dataclass(frozen=True, slots=True)
class AuthorityHandover(Message):
    """From a Mac that holds the authority's key: hold it, too. Reply: AuthorityKept.

    `certificate` (DER) and `key` (PEM) are the authority's. This message goes over the link of the two Macs
    only.
    """

    TYPE: ClassVar[int] = 0x57
    nonce: bytes = _f(binary(16, 16))
    certificate: bytes = _f(binary(1, MAX_CERTIFICATE_BYTES))
    key: bytes = _f(binary(1, 1000), repr=False)


@dataclass(frozen=True, slots=True)
class AuthorityKept(Message):
    """Reply: the key is on the sender's disk, or in `problem` why it is not."""

    TYPE: ClassVar[int] = 0x58
    nonce: bytes = _f(binary(16, 16))
    problem: str = _f(_detail)


@dataclass(frozen=True, slots=True)
class CertificateWanted(Message):
    """Request to a Mac that holds the authority's key: renew the sender's certificate.

    `public_key` is the key that the sender showed in TLS. Reply: CertificateIssued.
    """

    TYPE: ClassVar[int] = 0x59
    nonce: bytes = _f(binary(16, 16))
    public_key: bytes = _f(binary(POINT_BYTES, POINT_BYTES))


@dataclass(frozen=True, slots=True)
class CertificateIssued(Message):
    """Reply: the certificate (DER), or in `problem` why there is none."""

    TYPE: ClassVar[int] = 0x5A
    nonce: bytes = _f(binary(16, 16))
    certificate: bytes = _f(binary(0, MAX_CERTIFICATE_BYTES))
    problem: str = _f(_detail)


@dataclass(frozen=True, slots=True)
class AuthorityChange(Message):
    """The authority that the sender follows since a rotation, so that others can follow it.

    `authority`, `cross` (DER) and `past` (hex) are those of `MemberCertificates`. `moved`: the sender has a
    certificate of this authority; `holds`: it has its key; `ended`: it does, and the former one has ended.
    """

    TYPE: ClassVar[int] = 0x5B
    authority: bytes = _f(binary(1, MAX_CERTIFICATE_BYTES))
    cross: bytes = _f(binary(1, MAX_CERTIFICATE_BYTES))
    past: tuple[str, ...] = _f(hexes(MAX_PAST, 2 * MAX_CERTIFICATE_BYTES))
    moved: bool = _f(boolean())
    holds: bool = _f(boolean())
    ended: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class FabricWanted(Message):
    """Request to the agent of rank 0: measure the collectives of a group. Reply: FabricAnswer.

    `deployment` is the one that the group serves; empty for the default one.
    """

    TYPE: ClassVar[int] = 0x49
    nonce: bytes = _f(binary(16, 16))
    deployment: str = _f(text(MAX_MODEL), default="")


@dataclass(frozen=True, slots=True)
class FabricReport(FabricResult, Message):
    """Measurements of one group, broadcast to all."""

    TYPE: ClassVar[int] = 0x4A


@dataclass(frozen=True, slots=True)
class FabricAnswer(Message):
    """Reply: the sender's last FabricReport is the requested one; or in `problem`, why there is none."""

    TYPE: ClassVar[int] = 0x4B
    nonce: bytes = _f(binary(16, 16))
    problem: str = _f(_detail)


@dataclass(frozen=True, slots=True)
class Trip:
    """Round-trip time to this node, in microseconds."""

    node_id: str = _f(_id)
    us: int = _f(integer(0, MAX_TRIP_US))


@dataclass(frozen=True, slots=True)
class Echo(Message):
    """Probe of a link's round-trip time, or the immediate reply to one (`answer`).

    `asked_us` is the time of the probe by the clock of the agent that sent it. `trips` are the round-trip
    times of that agent's links.
    """

    TYPE: ClassVar[int] = 0x51
    asked_us: int = _f(_count)
    answer: bool = _f(boolean())
    trips: tuple[Trip, ...] = _f(records(Trip, 0, MAX_MEMBERS))


@dataclass(frozen=True, slots=True)
class ModelHeld(Message):
    """To all: how much of a requested model of the Hub (OWNER/NAME[@REVISION]) the sender has.

    `held` of `total` bytes of the commit `revision`; 0 and empty while they are unknown. `free` is the free
    space on its disk, in bytes. `wants`: the sender is to get the model. `problem`: why it cannot get it from
    the Hub. `port`: the port that serves its files to other Macs, 0 for none.
    """

    TYPE: ClassVar[int] = 0x60
    model: str = _f(text(MAX_MODEL))
    revision: str = _f(text(40))
    held: int = _f(_count)
    total: int = _f(_count)
    free: int = _f(_count)
    wants: bool = _f(boolean())
    problem: str = _f(_detail)
    port: int = _f(integer(0, 65535))


@dataclass(frozen=True, slots=True)
class ModelLender(Message):
    """The coordinator to all: this node has the model, or gets it from the Hub; the others copy it there.

    `node_id` is empty when no node can get it.
    """

    TYPE: ClassVar[int] = 0x61
    model: str = _f(text(MAX_MODEL))
    node_id: str = _f(_id)


@dataclass(frozen=True, slots=True)
class ModelPull(Message):
    """To all: get this model, at `commit` if it is not empty."""

    TYPE: ClassVar[int] = 0x62
    model: str = _f(text(MAX_MODEL))
    commit: str = _f(text(40))


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One model on a member's disk. `complete`: all of `revision` is there."""

    name: str = _f(text(MAX_MODEL))
    revision: str = _f(text(40))
    size: int = _f(_count)
    complete: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class ModelsHere(Message):
    """Models of the Hub that the sender has, the largest first."""

    TYPE: ClassVar[int] = 0x63
    models: tuple[StoredModel, ...] = _f(records(StoredModel, 0, MAX_STORED))


#: Messages that either end of an open control link may send: each may own groups, and coordinate.
BOTH_WAYS: tuple[type[Message], ...] = (
    Beat, Deployments, Members, MachineReport, MachineWanted, ModelStatus, Prepare, Prepared, StartRank,
    RankStarted, RankPong, RankTrouble, EndEpoch, EpochEnded, RankSide, RankGathered, Serving,
    ReplicaLoad, GroupAssignment, TokenWanted, TokenIssued, AuthorityHandover, AuthorityKept,
    CertificateWanted, CertificateIssued, AuthorityChange, FabricWanted, FabricReport, FabricAnswer, Echo,
    ModelHeld, ModelLender, ModelPull, ModelsHere, RosterSaved,
)  # fmt: skip

CONTROL_MESSAGES: tuple[type[Message], ...] = (AgentHello, RosterParting, *BOTH_WAYS)
