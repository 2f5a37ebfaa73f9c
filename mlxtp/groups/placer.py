"""Place of one group: its deployment and assignment, and the choice of its ranks among the assigned Macs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from ..cluster.assign import without_rdma
from ..cluster.cluster_state import NO_CLAIM
from ..cluster.node import ClusterNode
from ..cluster.reconcile import Wanted
from ..errors import Code, GroupError, MlxtpError
from ..models.local_model import LocalModel, LocalModels
from ..placement.candidates import Candidate
from ..placement.cost_model import CHAT
from ..placement.faults import preflight
from ..placement.formation import FailedGroup, links_of, runs_short
from ..placement.model_shape import ModelShape
from ..placement.planner import Placement, PlacementOptions, plan
from ..placement.topology import MemberMachine
from ..wire.cluster_messages import Deployment, GroupAssignment, Serving
from ..wire.rdma import Matrix
from .machines import Machines, local_split, model_lack, placement_options

log = logging.getLogger(__name__)


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
        """The row of its deployment; None if there is none."""
        return self._node.desired.table.get(self.deployment)

    @property
    def in_excess(self) -> bool:
        """True while no Mac is to run it, and its deployment has enough groups without it."""
        row, replica = self.row, self._node.replica
        return row is None or (not self.assignment.owner and self.index >= replica.shown_groups(row))

    @property
    def wanted(self) -> Wanted | None:
        """The model that it is to serve, and how it is to be spread."""
        row = self.row
        return Wanted(row.model, row.nodes, row.parallel, row.split) if row is not None else None

    @property
    def version(self) -> int:
        """Version of its row; 0 without one."""
        row = self.row
        return row.version if row is not None else 0

    @property
    def model(self) -> LocalModel:
        """The search for its model on this Mac."""
        row = self.row
        return self._models.of(row.model if row is not None else "")

    @property
    def unreported(self) -> list[str]:
        """Linked members that have not yet reported whether they have the model."""
        row = self.row
        return self._models.unreported(row.model) if row is not None else []

    @property
    def owned(self) -> bool:
        """True while this node owns the group."""
        return self.assignment.owner == self._node.node_id

    @property
    def why_not(self) -> str:
        """Reason why the group has no owner."""
        if self.row is None:
            if self.group:
                return f"{self.deployment} was unloaded"
            return self._node.introduction.problem or NOTHING_WANTED
        if not self.assignment.number:
            return "it has yet to be assigned to a Mac"
        return self.assignment.why or f"{self.deployment} has enough other groups"


# --- choice of ranks ------------------------------------------------------------------------------------


class Placer:
    """Planner of a group's next epoch.

    `held_bytes` returns the bytes that its ranks hold on a Mac, `all_reports` the reports of all groups.
    """

    def __init__(
        self,
        node: ClusterNode,
        scope: GroupScope,
        machines: Machines,
        held_bytes: Callable[[str], int],
        all_reports: Callable[[], list[Serving]],
    ) -> None:
        self._node = node
        self._scope = scope
        self._machines = machines
        self._held_bytes = held_bytes
        self._all_reports = all_reports
        #: The last plan, or the reason for none, after what it was made from.
        self._known: tuple[object, Placement | None, str] | None = None

    def placement(self) -> tuple[Placement | None, str]:
        """Return the best plan for the assigned Macs, or the reason for none; kept until a change."""
        node, scope = self._node, self._scope
        row, model = scope.row, scope.model
        if row is None or not scope.owned:
            return None, scope.why_not
        if model.source is None:
            return None, model.problem or model.coming or f"{row.model} is still being looked for"
        allowed = set(scope.assignment.nodes) - node.leadership.draining
        busy = {
            node_id
            for each in self._all_reports()
            if len(each.participants) > 1 and each.group != scope.group
            for node_id in each.participants
        }
        members = [
            without_rdma(member) if member.node_id in busy else member
            for member in self._machines.members(self._lack, self._held_bytes)
            if member.node_id in allowed
        ]
        if not members:
            return None, "every Mac that is assigned to this group is about to stop"
        try:
            options = self._machines.options(row, model.source.id)
            if node.settings.ranks > 1:
                local_split(node.settings, row, model.shape)
        except MlxtpError as error:  # of a wrong split, or of a row from a member that lies
            return None, error.detail
        asked = (members, row.model, model.source.id, options)
        if self._known is None or self._known[0] != asked:
            try:
                self._known = (asked, *self._plan(members, model.shape, options))
            except MlxtpError as error:
                self._known = (asked, None, error.detail)
        return self._known[1], self._known[2]

    def key(self, chosen: Candidate) -> tuple[float, ...]:
        """Return the order of plans: as many Macs as wanted, then chat requests per second."""
        row, source = self._scope.row, self._scope.model.source
        several = 0.0
        if row is not None and source is not None:
            options = placement_options(self._node.settings, row, source.id)
            if options.nodes == "all":
                several = float(chosen.nodes)
            elif options.parallel != "auto":
                several = float(chosen.nodes > 1)
        return (several, self.rate(chosen))

    def rate(self, chosen: Candidate) -> float:
        """Return the chat requests per second, 0 without an estimate."""
        return chosen.speed.requests_per_second(CHAT) if chosen.speed is not None else 0.0

    def _lack(self, node_id: str) -> str:
        node, ours = self._node, self._scope.model.status
        theirs = ours if node_id == node.node_id else node.peer_info.reported(ours.model).get(node_id)
        return model_lack(ours, theirs, node.name, node.name_of(node_id))

    def _plan(
        self, members: list[MemberMachine], shape: ModelShape, options: PlacementOptions
    ) -> tuple[Placement, str]:
        """Return a plan that can form, and the reason for a plan without a group, with the way out."""
        here = self._node.node_id
        placement = plan(members, shape, here, options)
        if trouble := self._jaccl_trouble(placement.chosen, members, options):
            if options.backend == "jaccl":
                raise GroupError(f"JACCL cannot form: {trouble}", Code.FORM_FAILED)
            log.warning("JACCL cannot form, so the ring is used. %s", trouble)
            placement = plan(members, shape, here, replace(options, backend="ring"))
        if placement.chosen is not None:
            return placement, placement.reason
        return placement, "; ".join([placement.reason, *placement.notes])

    def _jaccl_trouble(
        self, chosen: Candidate | None, members: list[MemberMachine], options: PlacementOptions
    ) -> str:
        """Return the reason why JACCL would not form on all Macs of a group; empty for any other group."""
        if chosen is None or chosen.backend != "jaccl":
            return ""
        machines = {member.node_id: member.machine for member in members}
        by_rank = {rank: machines[node_id] for rank, node_id in enumerate(chosen.ranks)}
        for rank, node_id in enumerate(chosen.ranks):
            named = list(options.rdma.get(node_id, {}).values())
            if trouble := preflight(
                rank, by_rank[rank], matrix(chosen), ring=chosen.jaccl_ring, others=by_rank, named=named
            ):
                return f"{self._node.name_of(node_id)}: {trouble}"
        return ""

    # --- groups that failed --------------------------------------------------------------------------

    def formed(self, chosen: Candidate) -> None:
        """Note that a group works: its earlier failures no longer count."""
        self._machines.failed.formed(chosen.kind, links_of(chosen.ranks, chosen.rdma))

    def is_scarce(self, chosen: Candidate) -> bool:
        """Return whether a group over RDMA may take the last formation of a device of it."""
        return runs_short(links_of(chosen.ranks, chosen.rdma), self._node.peer_info.machines)

    def leave_out(
        self,
        chosen: Candidate,
        error: MlxtpError,
        *,
        formed: bool = True,
        strikes: int = 1,
        served_s: float | None = None,
    ) -> bool:
        """Note that a group failed; log and return whether another one takes its place."""
        then = "then" if served_s is None else "while it served"
        what = f"formed, and failed {then}" if formed else "did not form"
        links, now = links_of(chosen.ranks, chosen.rdma), time.monotonic()
        group = FailedGroup(chosen.kind, links, f"it {what}: {error.detail}")
        members = {member.node_id: member for member in self._machines.members(self._lack)}
        note = self._machines.failed.failed
        if not note(group, error.code, members, now, strikes=strikes, served_s=served_s):
            return False
        placement, _ = self.placement()
        if placement is None or placement.chosen is None:
            self._machines.failed.forget(chosen.kind, links)
            return False
        again_s = next(left_s for each, left_s in self._machines.left_out() if each == group)
        log.warning(
            "%s on %s %s: %s; %s serves instead. The next try is in %.0f s, or when cables, ports or "
            "versions change",
            chosen.title,
            " + ".join(map(self._node.name_of, chosen.ranks)),
            what,
            error.detail,
            placement.chosen.title,
            again_s,
        )
        return True

    def absolve(self, chosen: Candidate) -> None:
        """Note that a request which ended other groups ended this one, too: they are no longer left out."""
        for each in self._machines.failed.absolve(chosen.ranks):
            names = " + ".join(map(self._node.name_of, each.nodes))
            words = "%s on %s is no longer left out: the same request ended %s, too"
            log.warning(words, each.kind, names, chosen.title)


def matrix(chosen: Candidate) -> Matrix:
    """Return the RDMA devices between the ranks of a group, in the form that messages have."""
    return tuple(tuple(device or "" for device in row) for row in chosen.rdma)
