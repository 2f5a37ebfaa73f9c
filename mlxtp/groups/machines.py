"""The present members as placement sees them, and their failed groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from dataclasses import replace

from ..cluster.membership import MemberState as Standing
from ..cluster.node import ClusterNode
from ..cluster.place import PlaceView, WantedDeployment, place
from ..config import EMBEDDED_MODEL, Settings, split_layers
from ..errors import Code, MlxtpError, ModelError
from ..models.inspect import is_hub_id
from ..placement.formation import FailedGroup, FailedGroups, FailedLink
from ..placement.model_shape import ModelShape
from ..placement.planner import PlacementOptions
from ..placement.topology import MemberMachine, Topology
from ..wire.cluster_messages import Deployment, LeftOutGroup, Machine, ModelStatus
from .fabric import FabricResults

log = logging.getLogger(__name__)

MEMORY_STEP_BYTES = 1 << 30


class Machines:
    def __init__(self, node: ClusterNode, results: FabricResults) -> None:
        self.failed = FailedGroups()
        self._node = node
        self._results = results
        node.rounds.add(lambda _now: self.tell())

    def members(self, held_bytes: Callable[[str], int] = lambda _: 0) -> list[MemberMachine]:
        """Return the present members by id. `held_bytes` returns the memory of a node's ranks: a new plan may
        use it.
        """
        node, machines = self._node, self._node.links.reports.of(Machine)
        return [
            MemberMachine(
                node_id,
                node.name_of(node_id),
                replace(machine, free_bytes=in_steps(machine.free_bytes), wired_bytes=0, notes=()),
                link.remote if (link := node.links.to(node_id)) is not None else "",
                held_bytes=held_bytes(node_id),
                boot_id=status.boot_id,
            )
            for node_id, status in sorted(node.membership.statuses().items())
            if status.present and (machine := machines.get(node_id)) is not None
        ]

    def _by_id(self) -> dict[str, MemberMachine]:
        return {member.node_id: member for member in self.members()}

    def topology(self, admitted: str = "any") -> Topology:
        return Topology(self.members(), self.devices_by_hand(), admitted)

    def devices_by_hand(self) -> dict[str, dict[str, str]]:
        """Return the RDMA devices in all members' settings, by the ids of a node and its peer."""
        machines = self._node.links.reports.of(Machine)

        def nodes(text: str) -> list[str]:
            named = [node for node in machines if text == self._node.name_of(node)]
            return named or [node for node in machines if node.startswith(text)]

        found: dict[str, dict[str, str]] = {}
        for item in (item for node_id in sorted(machines) for item in machines[node_id].by_hand):
            ends, _, device = item.partition("=")
            one, _, other = ends.partition("/")
            for node in nodes(one):
                for peer in nodes(other) if other else machines.keys() - {node}:
                    found.setdefault(node, {})[peer] = device
        return found

    def options(self, row: Deployment, model: str) -> PlacementOptions:
        """Return a plan's options for a deployment. Raises MlxtpError for impossible values."""
        return replace(
            placement_options(self._node.settings, row, model),
            measured=self._results.measured(),
            rdma=self.devices_by_hand(),
            failed=self.all_failed(over=False),
        )

    def all_failed(self, *, over: bool) -> tuple[FailedGroup, ...]:
        """Return groups that failed at any owner; without `over`, only if plans leave them out now."""
        table = self._node.links.reports
        told = [*table.by(self._node.node_id, LeftOutGroup), *(row for _, row in table.others(LeftOutGroup))]
        found = [
            FailedGroup(each.kind, frozenset(map(_link, each.links)), each.reason)
            for each in told
            if over or not each.over
        ]
        return tuple(dict.fromkeys(found))

    def links_options(self) -> PlacementOptions:
        return PlacementOptions(
            rdma=self.devices_by_hand(), fabric_networks=self._node.settings.fabric_networks
        )

    def no_place(self, shape: ModelShape, row: Deployment, only: Container[str] | None = None) -> str:
        """Return why the present members (of `only`) have no place for a deployment, even if all had the
        model and ran nothing else; empty if there may be a place, as while a suspect may come back.
        """
        node = self._node
        if any(each.state is Standing.SUSPECT for each in node.membership.statuses().values()):
            return ""
        members = [
            replace(member, machine=replace(member.machine, free_bytes=0))
            for member in self.members()
            if member.node_id not in node.leadership.draining
            and (only is None or member.node_id in only)
            and (not row.on or member.node_id in row.on)
        ]
        try:
            wanted = WantedDeployment(row, self.options(row, shape.name), shape)
        except MlxtpError as error:
            return error.detail
        [assigned] = place(PlaceView(members, [replace(wanted, row=replace(row, replicas=1))])).assignments
        allowed = f"--on allows {', '.join(map(node.name_of, row.on))}: " if row.on and assigned.why else ""
        return allowed + assigned.why

    def tell(self) -> None:
        table, told = self._node.links.reports, list[LeftOutGroup]()
        if self.failed:
            known = self.failed.known(self._by_id(), time.monotonic())
            latest = sorted(known, key=lambda each: -each[1])[: LeftOutGroup.MOST]
            told = [_row(each, over=left_s <= 0) for each, left_s in latest]
        if told != table.by(self._node.node_id, LeftOutGroup):
            table.publish(LeftOutGroup, *told)
            self._node.changed()

    def left_out(self) -> tuple[tuple[FailedGroup, float], ...]:
        """Return this node's failed groups, and the seconds until plans may use them again."""
        return self.failed.left_out(self._by_id(), time.monotonic())

    def left_out_lines(self) -> list[str]:
        return [
            f"{each.kind} on {' + '.join(sorted(map(self._node.name_of, each.nodes)))} is left out: "
            f"{each.reason}. The next try is in {left_s:.0f} s"
            for each, left_s in self.left_out()
        ]


def _row(failed: FailedGroup, *, over: bool) -> LeftOutGroup:
    return LeftOutGroup(failed.kind, tuple(map(" ".join, sorted(failed.links))), failed.reason, over)


def _link(row: str) -> FailedLink:
    one, other, at_one, at_other = (*row.split(" "), "", "", "", "")[:4]
    return one, other, at_one, at_other


def parallel_of(settings: Settings, row: Deployment) -> str:
    """Return how several Macs share a deployment: as it or the settings say, "auto" for one Mac."""
    return "auto" if row.nodes == "1" else row.parallel or settings.parallel


def placement_options(settings: Settings, row: Deployment, model: str) -> PlacementOptions:
    """Return a plan's options for a deployment. Raises MlxtpError for impossible values."""
    wanted: str | int = int(row.nodes) if row.nodes.isdecimal() else row.nodes
    parallel = parallel_of(settings, row)
    split = split_layers(row.split, parallel, row.nodes)
    if settings.ranks > 1:  # they share the model, on one Mac
        parallel, split = "auto", ()
    if model == EMBEDDED_MODEL and (wanted, parallel, split) == ("auto", "auto", ()):
        wanted, parallel = "all", "tensor"  # its purpose is to show that the cluster works
    return PlacementOptions(
        backend=settings.fabric,
        fabric_networks=settings.fabric_networks,
        nodes=wanted,
        max_context=settings.max_context,
        fast_fences=settings.fast_fences,
        repeatable=settings.repeatable,
        parallel=parallel,
        split=split,
    )


def local_split(settings: Settings, row: Deployment, shape: ModelShape) -> tuple[int, ...]:
    """Return the layers of each rank of this machine's pipeline; () unless one is set, or tensor parallelism
    is impossible. Raises ModelError (MODEL_NOT_DIVISIBLE) if the ranks cannot share the model (as set).
    """
    parallel, ranks = row.parallel or settings.parallel, settings.ranks
    obstacles, uncuttable = shape.obstacles(ranks), shape.uncuttable(ranks)
    if parallel == "auto" and obstacles and not uncuttable:
        parallel = "pipeline"
    split = split_layers(row.split, parallel, "auto")
    if not split and parallel != "pipeline":
        if obstacles:
            both = (*obstacles, uncuttable) if parallel == "auto" else obstacles
            raise ModelError("; ".join(both), Code.MODEL_NOT_DIVISIBLE)
        return ()
    fewest, more = divmod(shape.layers, ranks)
    split = split or tuple(fewest + (rank >= ranks - more) for rank in range(ranks))
    why = shape.uncuttable(ranks, split)
    if len(split) != ranks:
        why = f"--split {row.split} is for {len(split)} ranks, and {ranks} share the model"
    if why:
        raise ModelError(why, Code.MODEL_NOT_DIVISIBLE)
    return split


def contradiction(settings: Settings, row: Deployment, shape: ModelShape | None) -> str:
    """Return why no Macs can serve a deployment as set, or empty. `shape` is None while unknown."""
    try:
        options = placement_options(settings, row, row.model)
        if settings.ranks > 1 and shape is not None:
            local_split(settings, row, shape)
    except MlxtpError as error:
        return error.detail
    pipeline = options.parallel == "pipeline"
    needed = options.nodes if isinstance(options.nodes, int) else 1 + (pipeline and bool(row.parallel))
    if row.on and needed > len(row.on):
        return f"{row.name} needs {needed} Macs, --on allows {len(row.on)}"
    stages = len(options.split) or 2
    return shape.uncuttable(stages, options.split) if pipeline and shape is not None else ""


def model_lack(ours: ModelStatus, theirs: ModelStatus | None, here: str, there: str) -> str:
    """Return why the Mac named `there` cannot serve the model together with `here`, or empty."""
    if theirs is None:
        return "it has not yet reported whether it has the model"
    if theirs.problem:
        return theirs.problem
    if not theirs.fingerprint:
        return "it is still getting the model"
    if ours.revision and theirs.revision and theirs.revision != ours.revision:
        return (
            f"it has the model at commit {theirs.revision[:12]}, {here} at {ours.revision[:12]}; "
            "`mlxtp pull MODEL --everywhere` brings the newest to all"
        )
    if ours.fingerprint and theirs.fingerprint != ours.fingerprint:
        if is_hub_id(ours.model):
            repair = f"`mlxtp verify {ours.model} --repair`"
            remedy = f"{repair} on {there}, then on {here}, gets the damaged files again"
        else:
            remedy = f"bring the same files to {there} and {here}"
        return (
            f"its files of the model differ: {theirs.fingerprint[:12]} there, {ours.fingerprint[:12]} on "
            f"{here}; {remedy}"
        )
    return ""


def in_steps(size: int) -> int:
    """Round a size down, so that plans do not change with every report."""
    return size // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES
