"""The present members as placement sees them, with what is known of groups of them that failed to form."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

from ..cluster.membership import MemberState as Standing
from ..cluster.node import ClusterNode
from ..cluster.place import PlaceView, WantedDeployment, place
from ..config import EMBEDDED_MODEL, Settings, split_layers
from ..errors import Code, GroupError, MlxtpError, ModelError
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
    """Source of what every plan is made from."""

    def __init__(self, node: ClusterNode, results: FabricResults) -> None:
        self.failed = FailedGroups()
        self._node = node
        self._results = results
        node.rounds.add(lambda _now: self.tell())

    def members(self, held_bytes: Callable[[str], int] = lambda _: 0) -> list[MemberMachine]:
        """Return the members that are present, in the form that placement needs.

        `held_bytes` returns the bytes of a node's memory that ranks hold and that are free for a new plan.
        """
        node = self._node
        found = []
        for node_id, status in node.membership.statuses().items():
            machine = node.links.reports.of(Machine).get(node_id)
            if not status.present or machine is None:
                continue
            link = node.links.to(node_id)
            found.append(
                MemberMachine(
                    node_id,
                    node.name_of(node_id),
                    replace(machine, free_bytes=in_steps(machine.free_bytes), wired_bytes=0, notes=()),
                    link.remote if link is not None else "",
                    held_bytes=held_bytes(node_id),
                    boot_id=status.boot_id,
                )
            )
        return sorted(found, key=lambda member: member.node_id)

    def topology(self, admitted: str = "any") -> Topology:
        """Return the connections between the members that are present; see `Topology` for `admitted`."""
        return Topology(self.members(), self.devices_by_hand(), admitted)

    def devices_by_hand(self) -> dict[str, dict[str, str]]:
        """Return the RDMA devices of all members' settings, by the ids of a node and of its peer."""
        machines = self._node.links.reports.of(Machine)
        items = [item for node_id in sorted(machines) for item in machines[node_id].by_hand]
        names = {each: self._node.name_of(each) for each in machines}
        return devices_by_hand(items, names)

    def options(self, row: Deployment, model: str) -> PlacementOptions:
        """Return the options of a plan for a deployment. Raises MlxtpError if it has impossible values."""
        options = placement_options(self._node.settings, row, model)
        return replace(
            options,
            measured=self._results.measured(),
            rdma=self.devices_by_hand(),
            failed=self.all_failed(over=False),
        )

    def all_failed(self, *, over: bool) -> tuple[FailedGroup, ...]:
        """Return the groups that failed at any owner; without `over` those that are left out of plans now."""
        table = self._node.links.reports
        told = [*table.by(self._node.node_id, LeftOutGroup), *(row for _, row in table.others(LeftOutGroup))]
        found = (
            FailedGroup(each.kind, frozenset(map(_link, each.links)), each.reason)
            for each in told
            if over or not each.over
        )
        return tuple(dict.fromkeys(found))

    def links_options(self) -> PlacementOptions:
        """Return the options that concern the links of any group."""
        return PlacementOptions(
            rdma=self.devices_by_hand(), fabric_networks=self._node.settings.fabric_networks
        )

    def no_place(self, shape: ModelShape, row: Deployment, only: Container[str] | None = None) -> str:
        """Return the reason why the present members have no place for a deployment's model of this shape.

        Each member counts as if it had the model, and as if nothing else ran on its machine. The reason is
        empty where there is a place, and as long as a suspect may come back. `only` these may take part, of
        those that the row allows.
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

    def without_jaccl(self, nodes: list[str]) -> GroupError:
        """Return the failure of a group over JACCL, because MLX on these nodes has none."""
        who = " and ".join(map(self._node.name_of, nodes))
        return GroupError(
            f"MLX on {who} has no JACCL; it needs macOS 26.2 or newer and librdma", Code.FORM_FAILED
        )

    def tell(self) -> None:
        """Tell all members which groups are left out, after a change: the coordinator plans without them."""
        table, told = self._node.links.reports, list[LeftOutGroup]()
        if self.failed:
            members = {member.node_id: member for member in self.members()}
            known = self.failed.known(members, time.monotonic())
            latest = sorted(known, key=lambda each: -each[1])[: LeftOutGroup.MOST]
            told = [_row(each, over=left_s <= 0) for each, left_s in latest]
        if told != table.by(self._node.node_id, LeftOutGroup):
            table.publish(LeftOutGroup, *told)
            self._node.changed()

    def left_out(self) -> tuple[tuple[FailedGroup, float], ...]:
        """Groups that failed to form, and the seconds until each is tried again."""
        members = {member.node_id: member for member in self.members()}
        return self.failed.left_out(members, time.monotonic())

    def left_out_lines(self) -> list[str]:
        """Return one sentence for each group that is left out, for users."""
        lines = []
        for each, left_s in self.left_out():
            names = " + ".join(sorted(map(self._node.name_of, each.nodes)))
            lines.append(
                f"{each.kind} on {names} is left out: {each.reason}. The next try is in {left_s:.0f} s"
            )
        return lines


def _row(failed: FailedGroup, *, over: bool) -> LeftOutGroup:
    return LeftOutGroup(failed.kind, tuple(map(" ".join, sorted(failed.links))), failed.reason, over)


def _link(row: str) -> FailedLink:
    one, other, at_one, at_other = (*row.split(" "), "", "", "", "")[:4]
    return one, other, at_one, at_other


def parallel_of(settings: Settings, row: Deployment) -> str:
    """Return how several Macs share a deployment with these settings: as it is set, "auto" for one Mac."""
    return "auto" if row.nodes == "1" else row.parallel or settings.parallel


def placement_options(settings: Settings, row: Deployment, model: str) -> PlacementOptions:
    """Return the options of a deployment with these settings. Raises MlxtpError for impossible ones."""
    wanted: str | int = int(row.nodes) if row.nodes.isdecimal() else row.nodes
    parallel = parallel_of(settings, row)
    split = split_layers(row.split, parallel, row.nodes)
    if settings.ranks > 1:  # they share the model, on one Mac
        parallel, split = "auto", ()
    if model == EMBEDDED_MODEL and (wanted, parallel, split) == ("auto", "auto", ()):
        wanted, parallel = "all", "tensor"  # it is there to show that the cluster works, not to be fast
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
    """Return the layers of each rank of this machine, where several share a model as a pipeline; else ().

    They do where they are told to, and where they could not divide its layers. Raises ModelError
    (MODEL_NOT_DIVISIBLE) for ranks that can share it neither way, or not as they are told to.
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
    """Return why no Macs can serve a deployment as its row has it; empty if some can, or it is not known.

    `shape` is None as long as that of its model is not known.
    """
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
    """Return the reason why the Mac called `there` cannot serve the model with this one; empty for none."""
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


def devices_by_hand(items: Iterable[str], names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the RDMA devices that users set, by node id. Users give names of nodes, or starts of ids."""

    def nodes(text: str) -> list[str]:
        named = [node for node, name in names.items() if text == name]
        return named or [node for node in names if node.startswith(text)]

    found: dict[str, dict[str, str]] = {}
    for item in items:
        who, _, device = item.partition("=")
        one, _, other = who.partition("/")
        for node in nodes(one):
            for peer in nodes(other) if other else names.keys() - {node}:
                found.setdefault(node, {})[peer] = device
    return found


def in_steps(size: int) -> int:
    """Round a free or held size down: measurements waver, and a plan must not change with every report."""
    return size // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES
