"""Purpose of one group: its deployment, its assignment, its model here."""

from __future__ import annotations

from ..cluster.cluster_state import NO_CLAIM
from ..cluster.node import ClusterNode
from ..models.local_model import LocalModel, LocalModels
from ..wire.cluster_messages import Deployment, GroupAssignment

NOTHING_WANTED = "no model is configured; run `mlxtp serve MODEL`"


class GroupScope:
    """Purpose of one group. All else about the group is of its owner and its ranks."""

    def __init__(self, group: str, node: ClusterNode, models: LocalModels) -> None:
        self.group = group
        self.deployment, _, index = group.rpartition("#")
        self.assignment = GroupAssignment(group, self.deployment)
        #: Claim of the coordinator whose assignment it is. Two coordinators apart may have had one term.
        self.assigned_in = NO_CLAIM
        self.index = int(index or 0)
        self._node = node
        self._models = models

    @property
    def row(self) -> Deployment | None:
        return self._node.desired.table.get(self.deployment)

    @property
    def in_excess(self) -> bool:
        """True while no Mac is to run it, and its deployment has enough groups without it."""
        row, replica = self.row, self._node.replica
        return row is None or (not self.assignment.owner and self.index >= replica.shown_groups(row))

    @property
    def version(self) -> int:
        row = self.row
        return row.version if row is not None else 0

    @property
    def model(self) -> LocalModel:
        row = self.row
        return self._models.of(row.model if row is not None else "")

    @property
    def unreported(self) -> list[str]:
        """Linked members that have not yet reported whether they have the model."""
        row = self.row
        return self._models.unreported(row.model) if row is not None else []

    @property
    def owned(self) -> bool:
        return self.assignment.owner == self._node.node_id

    @property
    def why_not(self) -> str:
        if self.row is None:
            if self.group:
                return f"{self.deployment} was unloaded"
            return self._node.introduction.problem or NOTHING_WANTED
        if not self.assignment.number:
            return "it has yet to be assigned to a Mac"
        return self.assignment.why or f"{self.deployment} has enough other groups"
