"""The parts of an agent in a cluster, as what reports and commands see them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from ..cluster.control_port import TokenIssuing
from ..cluster.node import ClusterNode
from ..cluster.peer_reports import MachineReports, RoundTripTimes
from ..groups.controller import GroupController
from ..groups.fabric import FabricBench, FabricResults
from ..groups.forwarding import ForwardingBackend
from ..groups.hosted_rank import HostedRanks
from ..groups.lifecycle import Supervisor
from ..groups.model_queue import ModelSwitcher
from ..groups.owned_epoch import ServingReports
from ..groups.placer import Placer
from ..groups.reconciler import Reconciler
from ..groups.selection import ModelSelection
from ..models.local_model import LocalModels
from ..models.transfers import TransferCoordinator


@dataclass(frozen=True, slots=True)
class AgentParts:
    """Every part, in the order of construction: each knows parts above it alone."""

    node: ClusterNode
    machines: MachineReports
    round_trips: RoundTripTimes
    tokens: TokenIssuing
    transfers: TransferCoordinator
    models: LocalModels
    supervisor: Supervisor
    hosted: HostedRanks
    results: FabricResults
    servings: ServingReports
    placer: Placer
    controller: GroupController
    fabric_bench: FabricBench
    reconciler: Reconciler
    forwarding: ForwardingBackend
    selection: ModelSelection
    switcher: ModelSwitcher

    async def close(self) -> None:
        """Send a goodbye on each link, and end what runs here for others."""
        async with AsyncExitStack() as ending:  # in reverse; each part ends, even if another one fails to
            for part in (
                self.transfers,
                self.models,
                self.node,
                self.hosted,
                self.controller,
                self.selection,
                self.forwarding,
                self.fabric_bench,
                self.machines,
            ):
                ending.push_async_callback(part.close)
