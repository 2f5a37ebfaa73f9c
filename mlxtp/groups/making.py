"""Making of the parts of each group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..background import Background
from ..cluster.node import ClusterNode
from ..cluster.peer_reports import MachineReports
from ..gateway.gateway import Gateway
from ..models.local_model import LocalModels
from ..wire.cluster_messages import Serving
from ..wire.tls import Credentials
from .controller import GroupController, Trials
from .forwarding import ForwardingBackend
from .group import Group
from .lifecycle import StageListener, Supervisor
from .machines import Machines
from .owned_epoch import GroupBuilder, RemoteRanks, ServingReports
from .placer import Placer
from .ranks import Worker
from .scope import GroupScope


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Maker of groups, with the parts that all groups of an agent share.

    `all_reports` returns the reports of all groups that are known.
    """

    node: ClusterNode
    gateway: Gateway
    models: LocalModels
    machines: Machines
    remote: RemoteRanks
    readings: MachineReports
    credentials: Credentials
    worker: Worker
    on_stage: StageListener
    background: Background
    all_reports: Callable[[], list[Serving]]

    def make(self, name: str) -> Group:
        """Return the group of this id, which runs no epochs yet."""
        node, machines = self.node, self.machines
        scope = GroupScope(name, node, self.models)
        supervisor = Supervisor(
            node.settings, self.gateway, self.on_stage, self.worker, deployment=scope.deployment, group=name
        )
        reports = ServingReports(node, scope, supervisor)
        placer = Placer(node, scope, machines, reports.held_bytes, self.all_reports)
        builder = GroupBuilder(node, scope, machines, self.remote)
        trials = Trials(
            node,
            scope,
            supervisor,
            builder=builder,
            reports=reports,
            placer=placer,
            machines=machines,
            all_reports=self.all_reports,
        )
        controller = GroupController(
            node,
            scope,
            supervisor,
            reports=reports,
            placer=placer,
            builder=builder,
            trials=trials,
            readings=self.readings,
        )
        forwarding = ForwardingBackend(node, scope, supervisor, reports, self.credentials)
        return Group(node, scope, supervisor, reports, placer, controller, forwarding, self.background)
