"""Reports of other nodes about themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..wire.cluster_messages import AgentHello, Beat, ModelStatus, Serving
from ..wire.reports import Machine


@dataclass(slots=True)
class PeerInfo:
    """Reports by node id. `machines` has this node's own machine, too."""

    machines: dict[str, Machine] = field(default_factory=dict)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    servings: dict[str, Serving] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    https: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    short: set[str] = field(default_factory=set)  #: Nodes with less free memory than new requests need.
    met_at: dict[str, float] = field(default_factory=dict)  #: Time at which a node's link came up.
    authority: str = ""  #: Node that can admit others, once this node has met it.

    def met(self, hello: AgentHello, now: float, founder: str) -> None:
        """Take in the hello of a node. `founder`: node id of the founder that the roster proves."""
        self.names[hello.node_id] = hello.name
        self.met_at.setdefault(hello.node_id, now)
        self.https[hello.node_id] = hello.http
        self.addresses[hello.node_id] = hello.addresses
        if hello.authority and founder in ("", hello.node_id):
            self.authority = hello.node_id

    def beat(self, node_id: str, beat: Beat) -> None:
        """Take in the beat of a node."""
        if beat.short:
            self.short.add(node_id)
        else:
            self.short.discard(node_id)

    def drop(self, node_id: str) -> None:
        """Forget the model and group of a node that has no link left: its reports are old."""
        self.models.pop(node_id, None)
        self.servings.pop(node_id, None)
        self.short.discard(node_id)
        self.met_at.pop(node_id, None)
