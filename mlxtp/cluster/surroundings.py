"""What `GroupController` and `ForwardingBackend` see of the node they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..config import Settings
from ..groups.hosted_rank import HostedRank
from ..groups.lifecycle import Supervisor
from ..identity.store import Identity
from ..models.local_model import LocalModel
from ..placement.cost_model import Measured
from ..wire.cluster_messages import DesiredState, ModelStatus, Serving
from ..wire.machine import Machine
from .leadership import Leadership
from .links import PeerLinks
from .membership import Membership


@dataclass(slots=True)
class PeerInfo:
    """What other nodes told of themselves, by node id."""

    machines: dict[str, Machine] = field(default_factory=dict)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    servings: dict[str, Serving] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    https: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    short: set[str] = field(default_factory=set)
    """Who has less memory left than requests are taken with."""
    met_at: dict[str, float] = field(default_factory=dict)
    """When a node's link came up."""
    authority: str = ""
    """Who can let others in, once that node was heard of."""

    def drop(self, node_id: str) -> None:
        """It has no link any more: what it said of its model and group is old."""
        self.models.pop(node_id, None)
        self.servings.pop(node_id, None)
        self.short.discard(node_id)
        self.met_at.pop(node_id, None)


class Surroundings(Protocol):
    """The parts of one node. `waiting` says why there is no group yet."""

    settings: Settings
    identity: Identity
    node_id: str
    boot_id: str
    name: str
    waiting: str
    peer_info: PeerInfo
    leadership: Leadership
    membership: Membership
    links: PeerLinks
    supervisor: Supervisor
    model: LocalModel
    hosted_rank: HostedRank

    def name_of(self, node_id: str) -> str:
        """What people call a node."""

    def measured(self) -> Measured:
        """What placement takes over its assumptions."""

    def set_desired(self, model: str, nodes: str = "", *, by_person: bool = True) -> DesiredState:
        """What the cluster should run from now on."""

    def coming(self, model: str) -> str:
        """How far a model is on its way to this node, for people; empty when it is not."""

    async def read_machine_now(self, nodes: Iterable[str]) -> None:
        """Read this machine again and have the others of `nodes` report theirs, ports of RDMA among it."""

    def changed(self) -> None:
        """Something is different: look at everything again, soon."""
