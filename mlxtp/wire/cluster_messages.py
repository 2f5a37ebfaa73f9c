"""Messages of links between agents.

A *control* link carries identity, heartbeats, deployments, orders about ranks; a *requests* link, requests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import Code
from .codecs import (
    NUMBERED,
    U32,
    U63,
    Message,
    NodeRow,
    binary,
    boolean,
    choice,
    group_id,
    integer,
    integers,
    joined,
    number,
    numbers,
    record,
    records,
    row,
    text,
    texts,
)
from .codecs import holding as _f
from .messages import MAX_GROUP_ID, MAX_LAYERS, MAX_RANKS, Bootstrap, Gathered, Pong, SideChannel
from .peer_messages import MAX_CERTIFICATE_BYTES

# --- a Mac: chip, memory, addresses, cables --------------------------------------------------------------
# `placement/hardware.py` reads it, and `cluster/peer_reports.py` reports it.

MAX_MEMBERS = 64
MAX_INTERFACES = 32
MAX_PORTS = 16
MAX_NOTES = 16
MAX_CACHES = 32
MAX_BY_HAND = 32
MAX_SHAPE_BYTES = 1 << 16
MAX_SERVICE = 60  #: Characters of the name of a network service.

_count = integer(0, U63)


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of a network interface."""

    name: str = _f(text(40))
    address: str = _f(text(15))
    prefix: int = _f(integer(0, 32))
    kind: str = _f(choice("ethernet", "wifi", "thunderbolt", "bridge", "loopback", "other"))
    mbps: int = _f(integer(0, 10**7))  #: 0 is unknown
    up: bool = _f(boolean())


@dataclass(frozen=True, slots=True)
class Port:
    """One Thunderbolt port."""

    receptacle: int = _f(integer(0, 64))  #: Apple's number for it: 1, 2, ...
    interface: str = _f(text(40))  #: its network device ("en5"), or empty
    domain: str = _f(text(64))  #: UUID of its own Thunderbolt domain
    peer_domain: str = _f(text(64))  #: of the Mac at the other end of the cable, empty without one
    hub: bool = _f(boolean())  #: a hub or dock is in between
    gbps: int = _f(integer(0, 1000))  #: of the link, 0 when unknown
    rdma: str = _f(text(60))  #: its RDMA device ("rdma_en5"), empty for a port without
    active: bool = _f(boolean())  #: state of the RDMA device
    formations: int = _f(integer(0, U32), default=0)  #: JACCL groups tried since boot and not given back
    service: str = _f(text(MAX_SERVICE), default="")  #: of its interface; most ports have none


class Machine(NodeRow, number=0x32):
    """One machine. An unknown value is 0 or empty, and `notes` has the reason."""

    LAST = True

    system: str = _f(choice("macos", "linux", "other"))
    release: str = _f(text(60))
    build: str = _f(text(60))
    model: str = _f(text(60))
    chip: str = _f(text(80))  #: Apple's name for it, such as "Apple M3 Ultra"
    cpu_cores: int = _f(integer(0, 4096))
    gpu_cores: int = _f(integer(0, 4096))
    memory_bytes: int = _f(_count)
    free_bytes: int = _f(_count)  #: now
    wired_bytes: int = _f(_count)
    gpu_bytes: int = _f(_count)  #: the most memory that its GPU may wire
    power: str = _f(choice("ac", "battery", "unknown"))
    rdma: str = _f(choice("enabled", "disabled", "unsupported"))
    bridge_up: bool = _f(boolean())
    interfaces: tuple[Interface, ...] = _f(records(Interface, 0, MAX_INTERFACES), default=())
    ports: tuple[Port, ...] = _f(records(Port, 0, MAX_PORTS), default=())
    notes: tuple[str, ...] = _f(texts(MAX_NOTES, 1000), default=())  #: sentences for people
    bridge_service: str = _f(text(MAX_SERVICE), default="")  #: network service of bridge0, or empty
    stranded_bytes: int = _f(_count, default=0)  #: that ended ranks may have left wired until a restart
    caches: tuple[str, ...] = _f(texts(MAX_CACHES, 400), default=())  #: on disk: rank and model ("1 tiny")
    reached: tuple[str, ...] = _f(texts(MAX_MEMBERS, 100), default=())  #: both addresses of each link
    by_hand: tuple[str, ...] = _f(texts(MAX_BY_HAND, 200), default=())  #: its setting `rdma`


# --- measurements of the collectives of one group of ranks -----------------------------------------------
# `groups/fabric.py` takes them, and `placement/measurements.py` keeps and judges them.

MAX_SIZES = 16
_NODES = 8
_SHORTEST_S, _LONGEST_S = 1e-9, 1e4  #: limits of a plausible time: a nanosecond, and some hours


class FabricResult(NodeRow, number=0x4A):
    """Seconds that collectives took, on the slowest rank: sums and gathers of each size, one by one."""

    KEYS = ("nodes", "backend", "kind", "fast_fences")
    MOST = 32
    nodes: tuple[str, ...] = _f(texts(_NODES, 32))  #: node ids in rank order
    backend: str = _f(choice("ring", "jaccl"))
    kind: str = _f(text(60))  #: how they were joined, as `backend`
    fast_fences: bool = _f(boolean())
    metal: bool = _f(boolean())  #: a GPU computes
    at: int = _f(integer(0, U63))  #: time of day, in seconds since 1970
    collective_s: float = _f(number(_SHORTEST_S, _LONGEST_S))  #: of a chain of small sums, fence included
    sizes: tuple[int, ...] = _f(integers(1, 2**31 - 1, 1, MAX_SIZES))  #: bytes of each rank, ascending
    sums_s: tuple[float, ...] = _f(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))
    gathers_s: tuple[float, ...] = _f(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))


# --- messages --------------------------------------------------------------------------------------------


MAX_TOLD = 32  #: Deployments in one message, within the limit of objects in a frame.
MAX_ENTERED = 24  #: Entries of the roster in one message, for the same reason.
MAX_PARTING = 3000  #: Characters of one part; frames before a link is open hold 4 KiB.
MAX_MODEL = 1000
MAX_TRIP_US = 60_000_000

_epoch = integer(1, U63)
_rank = integer(0, MAX_RANKS - 1)
_id = text(32)
_detail = text(1000, cut=True)
_state = choice(
    "starting", "forming", "loading", "idle", "ready", "draining", "restarting", "failed", "stopped"
)


class AgentHello(Message, number=0x30, grows=True):
    """First frame of both ends: the agent's identity, its start, and its versions.

    No version may remove a field, and unknown fields are ignored, so incompatible versions can still read
    each other's. `versions` and `flags` must be compatible, so that ranks compute the same.
    """

    version: int = _f(integer(0, U32))
    node_id: str = _f(_id)
    cluster_id: str = _f(text(16))
    boot_id: str = _f(_id)  #: new at each start of the agent
    name: str = _f(text(80))
    versions: tuple[str, ...] = _f(texts(16, 80))  #: such as "mlx=0.32.4"
    flags: tuple[str, ...] = _f(texts(32, 120))
    addresses: tuple[str, ...] = _f(texts(16, 64))  #: where this agent listens ("ip:port")
    http: str = _f(text(120))  #: its endpoint


class Beat(Message, number=0x31):
    """Heartbeat of each end, twice a second."""

    term: int = _f(_count)  #: of its coordinator
    coordinator: str = _f(_id)  #: its claim
    desired: int = _f(_count)  #: digest of its deployments
    roster: int = _f(_count)  #: digest of its roster
    epoch: int = _f(_count)  #: the highest it has seen
    healthy: bool = _f(boolean())
    pulse: int = _f(_count)  #: the highest received; the coordinator counts it up with each Beat
    draining: bool = _f(boolean(), default=False)  #: it is about to stop: do not rely on it


@dataclass(frozen=True, slots=True)
class Deployment:
    """Row of the table of deployments: a model that the cluster should serve, or a `removed` one."""

    name: str = _f(text(MAX_MODEL))  #: the model without its revision
    model: str = _f(text(MAX_MODEL), default="")
    replicas: int = _f(integer(0, MAX_MEMBERS), default=1)  #: groups; 0 for as many as fit
    nodes: str = _f(text(8), default="auto")  #: "auto", "all" or the number of Macs of each group
    on: tuple[str, ...] = _f(joined(MAX_MEMBERS, 32), default=())  #: node ids that may serve it; none for any
    keep_s: int = _f(integer(-1, U32), default=-1)  #: unload it after so much disuse; -1: never, it is pinned
    version: int = _f(_count, default=0)  #: the higher one of a name holds
    writer: str = _f(_id, default="")  #: node that wrote this version
    removed: bool = _f(boolean(), default=False)
    since: int = _f(_count, default=0)  #: version that pinned it, 0 for this one
    parallel: str = _f(text(8), default="")  #: "auto", "tensor", "pipeline"; empty: as the settings
    split: str = _f(text(40), default="auto")  #: layers of each rank of a pipeline ("20,12"), or "auto"
    again: int = _f(_count, default=0)  #: how often users requested to place its groups again

    @property
    def pinned(self) -> bool:
        return self.keep_s < 0 and not self.removed

    def wishes(self) -> dict[str, Any]:
        """Return the fields that users set, except the model, by name. `keep_s` is None if it never ends."""
        kept = ("name", "model", "version", "writer", "removed", "since", "again")
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in kept}
        return found if 0 <= self.keep_s < U32 - 1 else {**found, "keep_s": None}


class Deployments(Message, number=0x05):
    """Part of the table of deployments, for `cluster.cluster_state` to merge."""

    rows: tuple[Deployment, ...] = _f(records(Deployment, 0, MAX_TOLD))
    floor: int = _f(_count)  #: rows up to this version that the table lacks are over
    more: bool = _f(boolean())  #: the other parts follow at once


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """Member, present or removed.

    Keys and signatures are in hex; each signature includes the cluster id. The authority signed `admission`
    (`node_id`, `name`, `fingerprint`, `version`, `admitted_by`, `address`, `at`) and `holding`
    (`fingerprint`, `holds_in`, `holds`). The key `remover` signed `removal` (`fingerprint`, `removed_in`). If
    the remover held the authority's key, `authorized` is the authority's signature of the same and `remover`.
    """

    node_id: str = _f(_id)
    name: str = _f(text(80))
    fingerprint: str = _f(text(64))  #: of its key
    removed: bool = _f(boolean())
    version: int = _f(_count)
    admitted_by: str = _f(_id, default="")  #: the member that requested its token; the founder names itself
    address: str = _f(text(64), default="")  #: its address when it joined
    at: int = _f(_count, default=0)  #: time when it joined, in seconds since 1970
    admission: str = _f(text(160), default="")
    removed_in: int = _f(_count, default=0)  #: version
    remover: str = _f(text(130), default="")  #: key of the member that removed it
    removal: str = _f(text(160), default="")
    authorized: str = _f(text(160), default="")
    holds: bool = _f(boolean(), default=False)  #: this member holds the authority's key
    holds_in: int = _f(_count, default=0)  #: version of `holds`
    holding: str = _f(text(160), default="")


class Members(Message, number=0x06):
    """Part of the roster: members, present or not, and removed ones."""

    entries: tuple[RosterEntry, ...] = _f(records(RosterEntry, 0, MAX_ENTERED))


class RosterParting(Message, number=0x5C):
    """Part of the sender's roster for an agent of an incompatible version, sent before the link ends.

    The parts make a text of `cluster_state.roster_text`, which has its own version: this message is the same
    in all protocol versions.
    """

    part: str = _f(text(MAX_PARTING))
    more: bool = _f(boolean())


class Report(Message, number=0x3D):
    """A NodeRow of the sender, for every member's table of all rows (`cluster.links.ReportTable`)."""

    number: int = _f(_count)  #: counts up with each report; from two links, the later report applies
    row: NodeRow = _f(row())
    over: bool = _f(boolean())  #: the sender no longer has this row


class ReportsSent(Message, number=0x3E):
    """End of the sender's rows, which it sends over each new link: older rows are over."""

    since: int = _f(_count)  #: number of the first of these reports


class MachineWanted(Message, number=0x3C):
    """Request to read the machine again. Reply: a Report of the Machine, even if nothing changed."""


class ModelStatus(NodeRow, number=0x33):
    """Status of one wanted model at a node, which may still check or download it."""

    KEYS = ("model",)
    MOST = MAX_MEMBERS  # at most as many deployments count
    model: str = _f(text(MAX_MODEL))  #: its name in a deployment
    fingerprint: str = _f(text(64))  #: of its files; empty without them
    problem: str = _f(_detail)  #: why the node has none; empty while it checks or downloads
    revision: str = _f(text(40), default="")  #: its commit, if known
    weight_mib: int = _f(_count, default=0)  #: of its weights, rounded up; 0 while unknown
    shape: bytes = _f(binary(0, MAX_SHAPE_BYTES), default=b"")  #: `ModelFacts.packed`; empty while unknown


class Prepare(Message, number=0x34):
    """Owner to participant: start a rank process for `epoch`. Reply: Prepared or RankTrouble."""

    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    fabric: str = _f(text(64))  #: the participant's own address for MLX's sockets; may be empty
    model: str = _f(text(MAX_MODEL))  #: its name in its deployment
    group: str = _f(group_id(MAX_GROUP_ID), default="")  #: the group; its earlier rank ends


class Prepared(Message, number=0x35):
    """Report that the rank process sent its Hello."""

    epoch: int = _f(_epoch)
    ring: str = _f(text(64))  #: free port on its fabric address ("ip:port")
    path: str = _f(text(4000, raw=True))  #: folder of the model on its machine


class StartRank(Message, number=0x36):
    """Owner to participant: pass this to the rank process. Reply: RankStarted or RankTrouble."""

    epoch: int = _f(_epoch)
    bootstrap: Bootstrap = _f(record(Bootstrap))


class RankStarted(Message, number=0x37):
    """Report that the rank process has its decode link."""

    epoch: int = _f(_epoch)
    jaccl: bool = _f(boolean())


class RankPong(Message, number=0x40):
    """Heartbeat of a rank, from its agent to the owner of its group."""

    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    pong: Pong = _f(record(Pong))


class RankTrouble(Message, number=0x41):
    """Failure of a rank, from its agent. `outside`: the agent saw it, the rank did not report it."""

    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    code: str = _f(choice(*(code.value for code in Code)))
    detail: str = _f(_detail)
    outside: bool = _f(boolean())


class EndEpoch(Message, number=0x42):
    """Owner to participant: end the rank of `epoch`, in order or at once. Reply: EpochEnded."""

    epoch: int = _f(_epoch)
    in_order: bool = _f(boolean())


class EpochEnded(Message, number=0x43):
    """Report that the rank process of `epoch` is gone."""

    epoch: int = _f(_epoch)


class RankSide(Message, number=0x44):
    """Bytes of one rank for a round of JACCL's all-gather, on their way to the owner of the group."""

    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    side: SideChannel = _f(record(SideChannel))


class RankGathered(Message, number=0x48):
    """Bytes of all ranks for that round, or an error, on the way back."""

    epoch: int = _f(_epoch)
    rank: int = _f(_rank)
    gathered: Gathered = _f(record(Gathered))


class Serving(NodeRow, number=0x45):
    """State of a group, from the agent of its rank 0."""

    KEYS = ("group",)
    MOST = 128  # two for each deployment that counts
    epoch: int = _f(_count)
    state: str = _f(_state)
    reason: str = _f(_detail)
    backend: str = _f(text(20))
    kind: str = _f(text(60))
    participants: tuple[str, ...] = _f(texts(MAX_RANKS, 32))  #: node ids in rank order
    open_requests: int = _f(_count)
    model: str = _f(text(MAX_MODEL))
    desired: int = _f(_count)
    context: int = _f(integer(0, U32))
    vocabulary: int = _f(integer(0, U32))
    eos: tuple[int, ...] = _f(integers(0, 2**31 - 1, 0, 64))
    load_s: int = _f(integer(0, U32), default=0)  #: time to load the model
    held_mib: tuple[int, ...] = _f(integers(0, U32, 0, MAX_RANKS), default=())  #: by rank, once all loaded
    group: str = _f(group_id(MAX_GROUP_ID), default="")
    deployment: str = _f(text(MAX_MODEL), default="")  #: name of its deployment
    running: int = _f(_count, default=0)  #: open requests with a first token
    speed: int = _f(_count, default=0)  #: tokens per second, over the last seconds
    cached: int = _f(_count, default=0)  #: tokens kept for later prompts
    idle_s: int = _f(integer(0, U32), default=0)  #: seconds, in steps of 10 from 10 on; 0 with open requests
    broken: bool = _f(boolean(), default=False)  #: it failed because of the model itself
    checkpoints: bool = _f(boolean(), default=False)  #: as in Loaded
    split: tuple[int, ...] = _f(integers(1, MAX_LAYERS, 0, MAX_RANKS), default=())  #: as in LoadShard
    ready_s: int = _f(integer(0, U32), default=0)  #: since the epoch became ready
    used: bool = _f(boolean(), default=False)  #: it has had a request since


class GroupAssignment(NodeRow, number=0x55):
    """The coordinator's assignment of ranks to a group. The owner (the agent of rank 0) forms it."""

    KEYS = ("group",)
    MOST = 16 * MAX_MEMBERS  # as many groups as all Macs together may have ranks
    group: str = _f(group_id(MAX_GROUP_ID))
    deployment: str = _f(text(MAX_MODEL))
    term: int = _f(_count, default=0)
    number: int = _f(_count, default=0)  #: counts the assignments of this `term`
    ranks: tuple[str, ...] = _f(texts(MAX_RANKS, 32), default=())  #: node ids; () is nowhere
    kind: str = _f(text(60), default="")  #: the fabric between them
    split: tuple[int, ...] = _f(integers(1, MAX_LAYERS, 0, MAX_RANKS), default=())  #: as in LoadShard
    why: str = _f(_detail, default="")  #: the group runs nowhere
    faster: str = _f(_detail, default="")  #: a place where it would be much faster
    kv_mib: int = _f(integer(0, U32), default=0)  #: bounds the KV caches of each rank; 0 is no bound
    again: int = _f(_count, default=0)  #: as in the deployment, when this place was chosen
    leaving: tuple[str, ...] = _f(texts(MAX_MEMBERS, 32), default=())  #: then known to be about to stop

    @property
    def owner(self) -> str:
        return self.ranks[0] if self.ranks else ""


class LeftOutGroup(NodeRow, number=0x66):
    """Failed group's fabric and links, which plans leave out for a while, and the reason."""

    KEYS = ("kind", "links")
    MOST = 16
    kind: str = _f(text(60))
    links: tuple[str, ...] = _f(texts(MAX_RANKS * (MAX_RANKS - 1) // 2, 200))  #: node, node, device, device
    reason: str = _f(_detail)
    over: bool = _f(boolean())  #: plans may use it again, but running groups do not move there


class MemoryShortage(NodeRow, number=0x53):
    """Report of a Mac with less free memory than new requests need."""


class TokenWanted(Message, number=0x46):
    """Request to a Mac that holds the authority's key: issue a join token. Reply: TokenIssued."""

    nonce: bytes = _f(binary(16, 16))


class TokenIssued(Message, number=0x47):
    """Reply: a join token, or in `problem` why there is none."""

    nonce: bytes = _f(binary(16, 16))
    token: str = _f(text(200))
    problem: str = _f(_detail)


class AuthorityHandover(Message, number=0x57):
    """Copy of the authority's key, from a Mac that holds it. Reply: AuthorityKept."""

    nonce: bytes = _f(binary(16, 16))
    certificate: bytes = _f(binary(1, MAX_CERTIFICATE_BYTES))  #: the authority's (DER)
    key: bytes = _f(binary(1, 1000), repr=False)  #: the authority's (PEM)


class AuthorityKept(Message, number=0x58):
    """Reply: the key is on the sender's disk, or in `problem` why it is not."""

    nonce: bytes = _f(binary(16, 16))
    problem: str = _f(_detail)


class FabricWanted(Message, number=0x49):
    """Request to the agent of rank 0: measure the collectives of a group. Reply: FabricAnswer."""

    nonce: bytes = _f(binary(16, 16))
    deployment: str = _f(text(MAX_MODEL), default="")  #: that the group serves; empty for the default one


class FabricAnswer(Message, number=0x4B):
    """Reply: the result, or in `problem` why there is none."""

    nonce: bytes = _f(binary(16, 16))
    problem: str = _f(_detail)
    results: tuple[FabricResult, ...] = _f(records(FabricResult, 0, 1), default=())


class RoundTrip(NodeRow, number=0x52):
    """Round-trip time of the sender's link to this node, in microseconds."""

    KEYS = ("node_id",)
    MOST = MAX_MEMBERS
    node_id: str = _f(_id)
    us: int = _f(integer(0, MAX_TRIP_US))


class Echo(Message, number=0x51):
    """Probe of a link's round-trip time, or the immediate reply to one (`answer`)."""

    asked_us: int = _f(_count)  #: time of the probe by the clock of the agent that sent it
    answer: bool = _f(boolean())


class ModelHeld(NodeRow, number=0x60):
    """Part of a requested model of the Hub (OWNER/NAME[@REVISION]) that a node has."""

    KEYS = ("model",)
    MOST = 256
    model: str = _f(text(MAX_MODEL))
    revision: str = _f(text(40), default="")  #: its commit; empty while unknown
    held: int = _f(_count, default=0)  #: bytes
    total: int = _f(_count, default=0)  #: bytes; 0 while unknown
    free: int = _f(_count, default=0)  #: bytes of space on its disk
    wants: bool = _f(boolean(), default=True)  #: the node should get the model
    problem: str = _f(_detail, default="")  #: why it cannot get it from the Hub
    port: int = _f(integer(0, 65535), default=0)  #: that serves its files to other Macs, 0 for none

    @property
    def complete(self) -> bool:
        return 0 < self.total <= self.held


class ModelLender(NodeRow, number=0x61):
    """The coordinator's choice of the node that has a model, or downloads it, for others to copy."""

    KEYS = ("model",)
    MOST = ModelHeld.MOST
    model: str = _f(text(MAX_MODEL))
    node_id: str = _f(_id)  #: empty when no node can get it


class ModelPull(Message, number=0x62):
    """Request to all nodes to get this model."""

    model: str = _f(text(MAX_MODEL))
    commit: str = _f(text(40))  #: or empty for any


class StoredModel(NodeRow, number=0x63):
    """One model of the Hub on a node's disk."""

    KEYS = ("name", "revision")
    MOST = 64
    name: str = _f(text(MAX_MODEL))
    revision: str = _f(text(40))
    size: int = _f(_count)
    complete: bool = _f(boolean())  #: the disk has all of `revision`


#: Messages that either end of an open control link may send: all of this module except rows and the two
#: below. List a new message of a handshake or another link with these two.
BOTH_WAYS: tuple[type[Message], ...] = tuple(
    message
    for message in NUMBERED.values()
    if message.__module__ == __name__
    and message not in (AgentHello, RosterParting)
    and not issubclass(message, NodeRow)
)
