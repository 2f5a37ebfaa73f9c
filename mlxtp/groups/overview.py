"""Health of an agent over all groups that it knows."""

from __future__ import annotations

import math

from ..api.backend import DeploymentHealth, Health
from ..cluster.deployments import left_s
from ..cluster.node import ClusterNode
from ..gateway.gateway import Gateway
from ..wire.cluster_messages import Deployment
from .group import Group
from .groups import Groups, best, unused_s
from .health import COMING, ServingState
from .status import GroupStatus


def health(node: ClusterNode, groups: Groups, gateway: Gateway, model: str = "") -> Health:
    """Return the health of a deployment, by the name of it or of its model; of the whole without one.

    The whole is ready once each pinned deployment has a ready group; without a pinned one, once the first
    deployment has.
    """
    rows = [(row, of) for row in node.desired.table.live() if (of := groups.replicas_of(row.name))]
    reports = groups.reports() if any(not row.pinned for row, _ in rows) else []
    deployments = tuple(deployment_health(row, of, unused_s(reports, row.name) or 0) for row, of in rows)
    named = [of for (_, of), each in zip(rows, deployments, strict=True) if model in (each.name, each.model)]
    group = best(named[0]) if model and named else groups.shown
    status, closing = group.supervisor.status, group.supervisor.closing
    ready = status.state is ServingState.READY and not closing
    if not model and len(deployments) > 1:
        needed = [each for each in deployments if each.pinned] or deployments[:1]
        ready = not closing and all(each.ready for each in needed)
    waits = next((each for each in deployments if each.pinned and not each.ready), None)
    reason = status.reason.detail if status.reason is not None else None
    if not model and waits is not None and status.state is ServingState.READY:
        reason = f"{waits.name} is {waits.state}" + (f": {waits.reason}" if waits.reason else "")
    served = gateway.deployments.by_name.get(group.scope.deployment)
    info = served.model if served is not None else None
    return Health(
        state=str(ServingState.DRAINING if closing else status.state),
        epoch=status.epoch,
        world_size=status.group.world_size if status.group is not None else node.settings.ranks,
        backend=status.group.backend if status.group is not None else node.settings.local_backend,
        model=info.id if info is not None else None,
        reason=closing or reason,
        ready=ready,
        open_requests=gateway.open_requests,
        ranks=status.rows(),
        starting="" if closing else status.starting,
        deployments=deployments,
    )


def deployment_health(row: Deployment, groups: list[Group], unused: float = 0.0) -> DeploymentHealth:
    """Return the health of one deployment, by that of its `groups`. `unused`: seconds without requests."""
    states = [group.supervisor.status for group in groups]
    ready = sum(_ready(status) for status in states)
    shown = min(states, key=lambda status: (not _ready(status), status.state not in COMING))
    source = groups[0].scope.model.source
    reason = shown.reason.detail if shown.reason is not None else None
    if ready == 0 and not reason:
        reason = groups[0].scope.assignment.why or None
    return DeploymentHealth(
        row.name,
        source.id if source is not None else "",
        str(shown.state),
        pinned=row.pinned,
        ready=ready > 0,
        reason=reason,
        groups_ready=ready,
        groups_wanted=row.replicas,
        expires_s=max(left, 0.0) if (left := left_s(row, unused)) < math.inf else None,
    )


def _ready(status: GroupStatus) -> bool:
    return status.state is ServingState.READY and not status.closing
