"""Tables of deployments as they are when one model is served after the other."""

from __future__ import annotations

from mlxtp.cluster.cluster_state import KEEP_S, PINNED, DeploymentTable, Replica, name_of
from mlxtp.wire.cluster_messages import Deployment


def only(
    version: int, writer: str, model: str, nodes: str = "auto", *, pinned: bool = True
) -> DeploymentTable:
    """Return a member's table in which version `version` deployed this model instead of all before."""
    if not model:
        return DeploymentTable((), version)
    keep_s = PINNED if pinned else KEEP_S
    row = Deployment(name_of(model), model, 1, nodes, (), keep_s, version, writer)
    return DeploymentTable((row,), version - 1)


def wants(replica: Replica, model: str, nodes: str = "auto", *, pinned: bool = True) -> None:
    """Deploy this model instead of all others, as a user or a request at this node does."""
    table, me = replica.deployments, replica.self_id
    row = Deployment(name_of(model), model, nodes=nodes, keep_s=PINNED if pinned else KEEP_S)
    replica.deployments = (
        table.setting(row, me, alone=True)
        if model
        else table.removing(me, *(each.name for each in table.live()))
    )
