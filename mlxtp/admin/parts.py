"""The parts of an agent in a cluster, as what reports and commands see them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from ..cluster.authority import AuthorityKeeping
from ..cluster.control_port import TokenIssuing
from ..cluster.node import ClusterNode
from ..cluster.peer_reports import MachineReports, RoundTripTimes
from ..cluster.renewal import Renewal
from ..cluster.rotation import Rotation
from ..gateway.gateway import Gateway
from ..groups.coordinator import Coordinator
from ..groups.fabric import FabricBench, FabricResults
from ..groups.groups import Groups
from ..groups.hosted_rank import HostedRanks
from ..groups.machines import Machines
from ..groups.on_request import OnRequest
from ..groups.selection import ModelSelection
from ..models.local_model import LocalModels
from ..models.transfers import TransferCoordinator


@dataclass(frozen=True, slots=True)
class AgentParts:
    """Every part, in the order of construction: each knows parts above it alone."""

    node: ClusterNode
    readings: MachineReports
    round_trips: RoundTripTimes
    authority: AuthorityKeeping
    renewal: Renewal
    rotation: Rotation
    tokens: TokenIssuing
    transfers: TransferCoordinator
    models: LocalModels
    gateway: Gateway
    hosted: HostedRanks
    results: FabricResults
    machines: Machines
    groups: Groups
    coordinator: Coordinator
    fabric_bench: FabricBench
    selection: ModelSelection
    on_request: OnRequest

    async def close(self) -> None:
        """Send a goodbye on each link, and end what runs here for others."""
        async with AsyncExitStack() as ending:  # in reverse; each part ends, even if another one fails to
            for part in (
                self.rotation,
                self.transfers,
                self.models,
                self.node,
                self.hosted,
                self.selection,
                self.fabric_bench,
                self.readings,
            ):
                ending.push_async_callback(part.close)
