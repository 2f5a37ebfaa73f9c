"""The part of a node that its `GroupController` and `ForwardingBackend` see."""

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
from ..wire.reports import Machine
from .leadership import Leadership
from .links import PeerLinks
from .membership import Membership


@dataclass(slots=True)
class PeerInfo:
    """Reports of other nodes about themselves, by node id."""

    machines: dict[str, Machine] = field(default_factory=dict)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    servings: dict[str, Serving] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    https: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    short: set[str] = field(default_factory=set)  #: Nodes with less free memory than new requests need.
    met_at: dict[str, float] = field(default_factory=dict)  #: Time at which a node's link came up.
    authority: str = ""  #: Node that can admit others, once this node has met it.

    def drop(self, node_id: str) -> None:
        """Forget the model and group of a node that has no link left: its reports are old."""
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
        """Return the name of a node, for users."""

    def measured(self) -> Measured:
        """Return the measurements that placement prefers to its assumptions."""

    def set_desired(self, model: str, nodes: str = "", *, by_person: bool = True) -> DesiredState:
        """Set the model that the cluster should run."""

    def coming(self, model: str) -> str:
        """Return the progress of a model's download to this node, for users; empty when there is none."""

    async def read_machine_now(self, nodes: Iterable[str]) -> None:
        """Read this machine again and have the others of `nodes` report theirs, including RDMA ports."""

    def changed(self) -> None:
        """Have the node decide again soon: something is different."""
