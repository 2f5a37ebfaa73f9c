"""Assignment of groups to Macs: the coordinator decides (`cluster/place.py`), and all nodes follow.

An assignment holds until a later one, even if the coordinator is lost. A new coordinator begins with the
groups that their owners report.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from ..api.backend import COMING
from ..cluster.cluster_state import LeaderClaim, left_s
from ..cluster.node import ClusterNode
from ..cluster.place import GivenUp, GroupReport, PlaceView, WantedDeployment, place
from ..cluster.reconcile import Wait
from ..errors import MlxtpError
from ..models.local_model import LocalModels
from ..placement.model_shape import DescribedModel, unpacked
from ..wire.cluster_messages import Deployment, GroupAssignment, ModelStatus, Serving
from .groups import Groups, unused_s
from .health import SERVES, ServingState
from .machines import Machines, model_lack
from .scope import MIB, held_by

log = logging.getLogger(__name__)

STEADY_S = 3  #: Seconds of advantage for the present owner: reported ages are rounded and late.


class Coordinator:
    """This node's part in the assignment of groups: decide while it leads, otherwise follow."""

    def __init__(self, node: ClusterNode, models: LocalModels, machines: Machines, groups: Groups) -> None:
        self.waiting = ""  #: Why the leading node assigns no group yet.
        self._node = node
        self._models = models
        self._machines = machines
        self._groups = groups
        self._number = 0
        #: Owners and ids of groups that ran, while the owner reports them.
        self._ran: set[tuple[str, str]] = set()
        self._asked: object = None  #: View of the last decision; None after a new link.
        self._unserved: dict[str, float] = {}  #: When each unpinned deployment was last served or loading.
        node.links.on_up(lambda _link: self._retract())

    def step(self, now: float) -> float:
        """Assign groups if this node leads. Return the time of the next decision, if nothing changes."""
        node, leadership = self._node, self._node.leadership
        self.waiting = ""
        reports = self._reports()
        self._ran = {(owner, each.group) for owner, each in reports}
        if not leadership.leading:
            self._retract()
            self._follow()
            return math.inf
        if wait := leadership.unrest(node.membership.statuses(), now) or self._unreported(now):
            self.waiting = wait.reason
            return wait.until
        until = self._expire(now)
        self._decide(now)
        return until

    def foresee(self, row: Deployment, described: DescribedModel) -> tuple[GroupAssignment, tuple[str, ...]]:
        """Return where a deployment's first group would run if all Macs had its files, and the deployments
        that would give way. Only the coordinator knows of flapping nodes. Raises MlxtpError for impossible
        values.
        """
        view, options = self._view(time.monotonic()), self._machines.options(row, row.name)
        shape = described.shape(row.name, self._node.settings.kv_bits)
        wanted = WantedDeployment(row, options, shape, tried=self._machines.all_failed(over=True))
        known = {each.row.name: each for each in view.wanted} | {row.name: wanted}
        order = sorted(known.values(), key=lambda each: not each.row.pinned)
        decision = place(replace(view, wanted=tuple(order)))
        [first, *_] = [each for each in decision.assignments if each.deployment == row.name]
        return first, decision.gives_way

    def _unreported(self, now: float) -> Wait | None:
        """Return the wait for nodes' reports on the model of a deployment that runs nowhere, or None."""
        for row in self._node.desired.table.live():
            if any(each.deployment == row.name and each.participants for each in self._groups.reports()):
                continue
            for node_id, until in self._models.unreported(row.model).items():
                if now < until:
                    name = self._node.name_of(node_id)
                    return Wait(f"{name} has not yet reported whether it has the model", until)
        return None

    def _expire(self, now: float) -> float:
        """Remove deployments that were unused for their `keep_s`. Return the time of the next removal."""
        reports, until = self._groups.reports(), math.inf
        rows = [row for row in self._node.desired.table.live() if left_s(row, 0.0) < math.inf]
        self._unserved = {row.name: self._unserved.get(row.name, now) for row in rows}
        for row in rows:
            unused = unused_s(reports, row.name)
            if unused is not None or any(
                each.deployment == row.name and each.state in COMING for each in reports
            ):
                self._unserved[row.name] = now
            # Requests may wait for a deployment that is not ready.
            waits_s = max(left_s(row, 0.0), self._node.settings.limits.queue_s)
            left = waits_s - (now - self._unserved[row.name]) if unused is None else left_s(row, unused)
            if left > 0:
                until = min(until, now + left)
                continue
            log.info("%s ends: it had no request for %d s", row.name, row.keep_s)
            self._node.desired.unload(row.name)
        return until

    def _decide(self, now: float) -> None:
        view = self._view(now)
        if view == self._asked:
            return
        self._asked = view
        decision = place(view)
        for name in decision.gives_way:
            log.info("%s gives way to another model", name)
            self._node.desired.unload(name)
        leaving = tuple(sorted(view.draining))
        enough = {name: GroupAssignment(name, name.rpartition("#")[0]) for name in self._groups.by_id}
        for each in (enough | {each.group: each for each in decision.assignments}).values():
            standing = self._standing(each) if each.group in view.given_up else each
            self._assign(replace(standing, leaving=leaving), decision.notes.get(each.group, ()))
        told = (group.scope.assignment for group in self._groups.by_id.values())
        self._node.links.reports.publish(GroupAssignment, *(each for each in told if each.number))

    def _standing(self, decided: GroupAssignment) -> GroupAssignment:
        """Leave a failed group that has no place with its owner: it uses no memory, and may try again."""
        before = self._groups.known(decided.group).scope.assignment
        if decided.owner:
            return decided
        return replace(decided, ranks=before.ranks, kind=before.kind, split=before.split, again=before.again)

    def _assign(self, decided: GroupAssignment, notes: Iterable[str]) -> None:
        scope = self._groups.known(decided.group).scope
        before, scope.assigned_in = scope.assignment, self._node.leadership.claim
        after = replace(decided, term=scope.assigned_in.term, number=before.number)
        if after != before:
            self._number += 1
            after = replace(after, number=self._number)
            if (before.ranks, before.kind, before.split) != (after.ranks, after.kind, after.split):
                where = " + ".join(map(self._node.name_of, after.ranks))
                nowhere = f"no Mac: {after.why or 'others are enough'}"
                where = f"{after.kind} on {where}" if len(after.ranks) > 1 else where or nowhere
                log.info("group %s is assigned to %s", decided.group, where)
                for note in notes:
                    log.info("%s", note)
            if after.faster and after.faster != before.faster:
                log.info("%s would be faster on %s", decided.deployment, after.faster)
            self._groups.assign(after)

    # --- the view ------------------------------------------------------------------------------------

    def _view(self, now: float) -> PlaceView:
        node, leadership = self._node, self._node.leadership
        reports, rows = self._reports(), self._node.desired.table.live()
        told = {name: group.scope.assignment for name, group in self._groups.by_id.items()}
        names, turns = {row.name for row in rows}, _turns(rows, self._groups.reports())
        held, taken = Counter[str](), Counter[str]()
        for _, serving in reports:
            held.update(held_by(serving))
            if serving.deployment not in names:  # its ranks hold memory until they end
                taken.update(held_by(serving))
        members = self._machines.members(held_bytes=held.__getitem__)
        boots = frozenset(status.boot_id for status in node.membership.statuses().values())
        return PlaceView(
            members=tuple(replace(member, taken_bytes=taken[member.node_id]) for member in members),
            wanted=tuple(self._wanted(row, turns.get(row.name, 0)) for row in rows),
            running=tuple(_running(each) for _, each in self._longest_first(reports)),
            draining=leadership.draining,
            flapping=frozenset(node_id for node_id, until in leadership.flapping.items() if now < until),
            given_up={
                each.group: GivenUp(each.reason, each.desired, boots)
                for each in self._groups.reports()
                if each.state == ServingState.FAILED  # until something changes for it
            },
            places={name: each for name, each in told.items() if each.ranks},
            macs=len(node.replica.names),
        )

    def _longest_first(self, reports: list[tuple[str, Serving]]) -> list[tuple[str, Serving]]:
        """Order reports by group, and owners of one group by how long they have served it."""

        def key(report: tuple[str, Serving]) -> tuple[str, int, str]:
            owner, serving = report
            group = self._groups.by_id.get(serving.group)
            present = group is not None and owner == group.scope.assignment.owner
            return serving.group, -(serving.ready_s + STEADY_S * present), owner

        return sorted(reports, key=key)

    def _reports(self) -> list[tuple[str, Serving]]:
        """Return the reports, with owners, of groups that have an epoch or are between two."""
        node, groups = self._node, self._groups.by_id
        told = [(node.node_id, each.scope.serving()) for each in groups.values()]
        told += node.links.reports.others(Serving)
        return [
            (owner, each)
            for owner, each in told
            if each is not None
            and node.membership.status_of(owner).present
            and (each.participants[:1] == (owner,) or self._between(owner, each))
        ]

    def _between(self, owner: str, serving: Serving) -> bool:
        group = self._groups.by_id.get(serving.group)
        if serving.participants or group is None or (owner, serving.group) not in self._ran:
            return False
        return group.scope.row is not None and group.scope.assignment.owner == owner

    def _wanted(self, row: Deployment, turn: int) -> WantedDeployment:
        """Return a deployment with its shape, and why some nodes cannot run it (`lacks`)."""
        node, here, model = self._node, self._node.node_id, self._models.of(row.model)
        name, shape = model.source.id if model.source else row.model, None
        told = node.links.reports.of(ModelStatus, row.model) | {here: model.status}
        have = sorted(node_id for node_id, status in told.items() if status.fingerprint)
        first = here if here in have or not have else have[0]
        named = {
            node_id: (node.name_of(first), node.name_of(node_id)) for node_id in node.membership.statuses()
        }
        found = {each: model_lack(told[first], told.get(each), *names) for each, names in named.items()}
        lacks = {node_id: why for node_id, why in found.items() if why}
        try:
            options = self._machines.options(row, name)
        except MlxtpError as error:  # a row from a member that lies
            options = self._machines.options(Deployment(row.name), name)
            lacks = dict.fromkeys(node.membership.statuses(), error.detail)
        if model.fingerprint:
            shape = model.shape
        elif told[first].shape:
            shape = unpacked(told[first].shape).shape(name, node.settings.kv_bits)
        weight = MIB * max((told[node_id].weight_mib for node_id in have), default=0)
        tried = self._machines.all_failed(over=True)
        return WantedDeployment(row, options, shape, weight, lacks, turn, tried)

    # --- assignments by others -----------------------------------------------------------------------

    def _retract(self) -> None:
        """Withdraw all assignments until the next decision: they lack a new Mac's reports."""
        self._asked = None
        self._node.links.reports.publish(GroupAssignment)

    def _follow(self) -> None:
        claim, rounds = self._node.leadership.claim, self._node.rounds
        for row in self._node.links.reports.by(claim.node_id, GroupAssignment):
            if row.term == claim.term:
                rounds.attempt(partial(self._take_in, row, claim), claim.node_id)

    def _take_in(self, row: GroupAssignment, claim: LeaderClaim) -> None:
        """Follow an assignment, unless a later one of the same coordinator is known."""
        known, (name, _, index) = self._groups.by_id, row.group.rpartition("#")
        if row.group not in known:
            wanted = row.owner and self._node.desired.table.get(name) is not None
            most = self._node.replica.most_groups.get(name, 0)
            if not wanted or (len(known) >= Serving.MOST and int(index) >= most):
                return  # its deployment may still be on its way
        scope = self._groups.known(row.group).scope
        if scope.assigned_in != claim or scope.assignment.number < row.number:
            scope.assigned_in = claim
            self._groups.assign(row)


def _running(serving: Serving) -> GroupReport:
    """Return only the values that matter for places, so that the view stays equal otherwise."""
    ranks, requests = serving.participants, min(serving.open_requests, 1)
    work = serving.state in SERVES, requests, held_by(serving), serving.used, not ranks
    return GroupReport(serving.group, ranks, serving.kind, serving.split, *work)


def _turns(rows: Sequence[Deployment], reports: Sequence[Serving]) -> dict[str, int]:
    """Rank unused deployments by disuse: the highest gives way first. Seconds would change every view."""
    unused = {row.name: unused_s(reports, row.name) or 0 for row in rows if not row.pinned}
    return {name: turn for turn, name in enumerate(sorted(unused, key=unused.__getitem__), 1) if unused[name]}
