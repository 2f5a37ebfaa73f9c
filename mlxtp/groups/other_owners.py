"""Orders and reports of agents that own groups: ranks here for them, and the state of their groups."""

from __future__ import annotations

import contextlib
from typing import Protocol

from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..cluster.reconcile import lost, refusal
from ..errors import Code, GroupError, MlxtpError
from ..wire.cluster_messages import Prepare, RankTrouble, Serving
from .group import Group
from .hosted_rank import HostedRank, HostedRanks


class KnownGroups(Protocol):
    """The groups that an agent knows, by id."""

    @property
    def by_id(self) -> dict[str, Group]: ...


class OtherOwners:
    """Takes in what owners of groups on other Macs send. `groups` are those that this agent knows."""

    def __init__(self, node: ClusterNode, hosted: HostedRanks, groups: KnownGroups) -> None:
        self._node = node
        self._hosted = hosted
        self._groups = groups
        node.links.on(self._prepare, Prepare)
        node.links.on(self._serving, Serving)

    def end_lost(self) -> None:
        """End the ranks here whose owner is gone, or was restarted."""
        for rank in self._hosted.serving:
            how = lost(self._node.membership.status_of(rank.host), rank.host_boot)
            if how is not None:
                name = self._node.name_of(rank.host)
                self._end(rank, f"epoch {rank.order.epoch} lost {name} (rank 0): {how}")

    def may_leave(self) -> bool:
        """Return True when no owner needs this node any longer, which is about to stop."""
        servings = self._node.peer_info.servings
        reports = [servings.get((rank.host, rank.order.group)) for rank in self._hosted.serving]
        return all(
            each is not None and each.state == "draining" and not each.open_requests for each in reports
        )

    def _end(self, rank: HostedRank, why: str) -> None:
        self._hosted.clear(why, lambda each: each is rank)

    def _serving(self, link: ControlLink, serving: Serving) -> None:
        node, node_id = self._node, link.node_id
        node.peer_info.serves(node_id, serving)
        node.replica.saw_epoch(serving.epoch)
        if self._hosted.serves(node_id, serving.group, serving.epoch):
            why = f"{node.name_of(node_id)} serves as epoch {serving.epoch}"
            self._end_elsewhere(node_id, serving.group, why)
        node.changed()

    def _end_elsewhere(self, owner: str, name: str, why: str) -> None:
        """End ranks of a group that another node, or this one, owned before: it has this owner now."""
        self._hosted.clear(why, lambda rank: rank.order.group == name and rank.host != owner)
        if (group := self._groups.by_id.get(name)) is not None:
            group.supervisor.end_epoch(GroupError(why, Code.REPLANNED))

    def _prepare(self, link: ControlLink, order: Prepare) -> None:
        node, node_id = self._node, link.node_id
        group, forms = (
            self._groups.by_id.get(order.group),
            f"{node.name_of(node_id)} forms epoch {order.epoch}",
        )
        assignee = group.scope.assignment.owner if group is not None else ""
        if not node.membership.status_of(assignee).present:  # the next assignment is still on its way here
            assignee = ""
        no = refusal(node_id, order.epoch, assignee, self._hosted.last_epoch(node_id))
        if no is None and node.node_id in node.leadership.draining:
            no = f"{node.name} is about to stop"
        if no is None and group is not None and group.supervisor.status.in_epoch and not order.trial:
            no = f"{node.name} still ends an epoch of its own"
            # The coordinator assigned the group to another owner. Its order holds, or neither would give in.
            self._end_elsewhere(node_id, order.group, forms)
        if no is not None:
            with contextlib.suppress(MlxtpError):
                trouble = RankTrouble(order.epoch, order.rank, Code.NOT_READY, no, outside=False)
                link.send(trouble)
            return
        node.replica.saw_epoch(order.epoch)
        if not order.trial:
            self._end_elsewhere(node_id, order.group, forms)
        self._hosted.received(node_id, order)
