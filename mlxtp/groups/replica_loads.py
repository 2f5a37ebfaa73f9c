"""Reports of the work of replicas, by which each agent chooses one for a request of its clients."""

from __future__ import annotations

from ..cluster.links import ControlLink
from ..cluster.node import BEAT_S, ClusterNode
from ..gateway.gateway import Gateway
from ..gateway.routing import GroupLoad
from ..wire.cluster_messages import ReplicaLoad
from .groups import Groups

_HASH_BYTES = 8


class ReplicaLoads:
    """Reports this agent's ready groups to the others, and takes in theirs.

    A group that is the only one of its deployment is not reported, since there is no choice.
    """

    def __init__(self, node: ClusterNode, gateway: Gateway, groups: Groups) -> None:
        self._node = node
        self._gateway = gateway
        self._groups = groups
        self._sent: dict[str, ReplicaLoad] = {}
        node.links.on(self._received, ReplicaLoad)
        node.links.on_up(self._greet)
        node.rounds.every(BEAT_S, lambda _now: self._report(), needed=node.links.nodes)

    def _report(self) -> None:
        """Send the reports that have changed to all members."""
        before, self._sent = self._sent, {each.group: each for each in self._present()}
        for name, load in self._sent.items():
            if load != before.get(name):
                self._node.links.broadcast(load)

    def _present(self) -> list[ReplicaLoad]:
        ready = [(name, each.groups) for name, each in self._gateway.deployments.by_name.items()]
        return [
            packed(name, groups.load_of(name))
            for deployment, groups in ready
            for name, group in groups.items()
            if group.here and len(self._groups.replicas_of(deployment)) > 1
        ]

    def _greet(self, link: ControlLink) -> None:
        for load in self._sent.values():
            link.send(load)

    def _received(self, link: ControlLink, load: ReplicaLoad) -> None:
        """Take in the report of a group's owner. Of any other node it does not count."""
        if (link.node_id, load.group) in self._node.peer_info.servings:
            self._gateway.load(load.group, unpacked(load))


def packed(group: str, load: GroupLoad) -> ReplicaLoad:
    """Return the message with a group's work."""
    hashes = b"".join(each.to_bytes(_HASH_BYTES, "little") for each in load.prefixes)
    return ReplicaLoad(group, load.queued, load.requests, round(load.speed), hashes)


def unpacked(load: ReplicaLoad) -> GroupLoad:
    """Return the work in a message."""
    data = load.prefixes
    starts = range(0, len(data), _HASH_BYTES)
    hashes = tuple(int.from_bytes(data[start : start + _HASH_BYTES], "little") for start in starts)
    return GroupLoad(load.queued, load.requests, float(load.speed), hashes)
