"""Assignment of groups to Macs: decided by the coordinator, received by all.

`cluster/place.py` decides. An assignment holds until a later one: losing the coordinator changes none. A new
coordinator begins with the groups that their owners report.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..cluster.cluster_state import LeaderClaim, left_s
from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..cluster.place import Assignment, GivenUp, GroupReport, PlaceView, WantedDeployment, place
from ..errors import MlxtpError
from ..models.local_model import LocalModels
from ..placement.model_shape import DescribedModel, unpacked
from ..wire.cluster_messages import Deployment, GroupAssignment, ModelStatus, Serving
from .controller import TELL_S
from .groups import Groups, unused_s
from .health import COMING, SERVES, ServingState
from .machines import Machines, model_lack
from .scope import MIB

log = logging.getLogger(__name__)

REPEAT_S = 2.0  #: Seconds between two broadcasts of all assignments, for members that dropped one.
STEADY_S = 3  #: Seconds that count for the present owner: ages are whole seconds, half a second old.


@dataclass(frozen=True, slots=True)
class _Files:
    """A model's files in the cluster: why each node that lacks them does, their size, its packed shape."""

    lacks: Mapping[str, str]
    weight_bytes: int
    shape: bytes


class Coordinator:
    """This node's part in the assignment of groups. It decides while this node leads."""

    def __init__(self, node: ClusterNode, models: LocalModels, machines: Machines, groups: Groups) -> None:
        self.waiting = ""  #: Reason why no group is assigned yet; empty where this node does not lead.
        self._node = node
        self._models = models
        self._machines = machines
        self._groups = groups
        self._number = 0
        #: Owners and ids of groups that have run, as long as that owner reports them.
        self._ran: set[tuple[str, str]] = set()
        #: What the last decision was made from; None after a new link, until that Mac's reports are there.
        self._asked: object = None
        self._unserved: dict[str, float] = {}  #: Last time at which an unpinned deployment was on its way.
        node.links.on(self._received, GroupAssignment)
        node.links.on_up(self._greet)
        node.rounds.every(REPEAT_S, lambda _now: self._repeat(), needed=node.links.nodes)

    def step(self, now: float) -> float:
        """Assign groups where this node leads. Return the time of the next decision, if nothing changes."""
        node, leadership = self._node, self._node.leadership
        self.waiting = ""
        reports = self._reports()
        self._ran = {(owner, each.group) for owner, each in reports}
        if not leadership.leading:
            self._asked = None
            return math.inf
        why, until = leadership.unrest(node.membership, now)
        if not why:
            why, until = self._unreported(now)
        self.waiting = why
        if why:
            return until
        expiry = self._expire(now)
        self._decide(now)
        return expiry

    def foresee(self, row: Deployment, described: DescribedModel) -> tuple[Assignment, tuple[str, ...]]:
        """Return where the first group of a deployment would run, and the deployments that would give way.

        All of its files count as there. Every node has the facts that the coordinator decides by, but for
        those that flap. Raises MlxtpError for impossible values.
        """
        view, options = self._view(time.monotonic()), self._machines.options(row, row.name)
        shape = described.shape(row.name, self._node.settings.kv_bits)
        wanted = WantedDeployment(row, options, shape, tried=self._machines.all_failed(over=True))
        known = {each.row.name: each for each in view.wanted} | {row.name: wanted}
        order = sorted(known.values(), key=lambda each: not each.pinned)
        decision = place(replace(view, wanted=tuple(order)))
        [first, *_] = [each for each in decision.assignments if each.deployment == row.name]
        return first, decision.gives_way

    def _unreported(self, now: float) -> tuple[str, float]:
        """Return why a deployment that runs nowhere cannot be assigned yet, and until when to wait."""
        node, met_at = self._node, self._node.peer_info.met_at
        for row in node.desired.table.live():
            if any(each.deployment == row.name and each.participants for each in self._groups.reports()):
                continue
            for node_id in self._models.unreported(row.model):
                if now < (until := met_at.get(node_id, -math.inf) + TELL_S):
                    return f"{node.name_of(node_id)} has not yet reported whether it has the model", until
        return "", math.inf

    def _expire(self, now: float) -> float:
        """Remove deployments that are unused for longer than they stay. Return the time of the next one."""
        reports, until = self._groups.reports(), math.inf
        rows = [row for row in self._node.desired.table.live() if left_s(row, 0.0) < math.inf]
        self._unserved = {row.name: self._unserved.get(row.name, now) for row in rows}
        for row in rows:
            unused = unused_s(reports, row.name)
            if unused is not None or any(
                each.deployment == row.name and each.state in COMING for each in reports
            ):
                self._unserved[row.name] = now
            # Requests may wait for one that is not ready.
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
        again, self._asked = self._asked is None, view
        decision = place(view)
        for name in decision.gives_way:
            log.info("%s gives way to another model", name)
            self._node.desired.unload(name)
        leaving = tuple(sorted(view.draining))
        enough = {name: Assignment(name, name.rpartition("#")[0]) for name in self._groups.by_id}
        for each in (enough | {each.group: each for each in decision.assignments}).values():
            standing = self._standing(each) if each.group in view.given_up else each
            self._assign(standing, leaving, again=again)

    def _standing(self, decided: Assignment) -> Assignment:
        """Leave a group that is given up with its owner, which takes no room and may try again."""
        before = self._groups.known(decided.group).scope.assignment
        if decided.owner:
            return decided
        return replace(decided, ranks=before.ranks, kind=before.kind, split=before.split, again=before.again)

    def _assign(self, decided: Assignment, leaving: tuple[str, ...], *, again: bool) -> None:
        """Broadcast an assignment, if it is another one than before, or `again`."""
        scope = self._groups.known(decided.group).scope
        before, scope.assigned_in = scope.assignment, self._node.leadership.claim
        term = self._node.leadership.claim.term
        after = GroupAssignment(
            decided.group,
            decided.deployment,
            term,
            before.number,
            decided.ranks,
            decided.kind,
            decided.split,
            decided.why,
            decided.faster,
            decided.kv_mib,
            decided.again,
            leaving,
        )
        if after != before:
            self._number += 1
            after = replace(after, number=self._number)
            nowhere = f"no Mac: {decided.why or 'others are enough'}"
            where = " + ".join(map(self._node.name_of, decided.ranks))
            where = f"{decided.kind} on {where}" if len(decided.ranks) > 1 else where or nowhere
            if (before.ranks, before.kind, before.split) != (after.ranks, after.kind, after.split):
                log.info("group %s is assigned to %s", decided.group, where)
                for note in decided.notes:
                    log.info("%s", note)
            if after.faster and after.faster != before.faster:
                log.info("%s would be faster on %s", decided.deployment, after.faster)
            self._groups.assign(after)
        if after.number and (after != before or again):
            self._node.links.broadcast(after)

    # --- the view ------------------------------------------------------------------------------------

    def _view(self, now: float) -> PlaceView:
        node, leadership = self._node, self._node.leadership
        reports = self._reports()
        held: dict[str, int] = {}
        for _, serving in reports:
            for node_id, mib in zip(serving.participants, serving.held_mib, strict=False):
                held[node_id] = held.get(node_id, 0) + mib * MIB
        told = {name: group.scope.assignment for name, group in self._groups.by_id.items()}
        assigned = {name: each for name, each in told.items() if each.ranks}
        rows = node.desired.table.live()
        names, turns = {row.name for row in rows}, _turns(rows, self._groups.reports())
        members = []
        for member in self._machines.members(held_bytes=lambda node_id: held.get(node_id, 0)):
            # Ranks of a deployment that is gone hold memory until they have ended.
            taken = sum(
                mib * MIB
                for _, serving in reports
                if serving.deployment not in names
                for node_id, mib in zip(serving.participants, serving.held_mib, strict=False)
                if node_id == member.node_id
            )
            members.append(replace(member, taken_bytes=taken))
        return PlaceView(
            members=tuple(members),
            wanted=tuple(self._wanted(row, turns.get(row.name, 0)) for row in rows),
            running=tuple(self._running(*each) for each in self._longest_first(reports)),
            draining=leadership.draining,
            flapping=frozenset(node_id for node_id, until in leadership.flapping.items() if now < until),
            given_up=self._given_up(),
            places={name: (each.ranks, each.kind, each.split) for name, each in assigned.items()},
            again={name: each.again for name, each in assigned.items()},
            macs=len(node.replica.names),
        )

    def _given_up(self) -> dict[str, GivenUp]:
        """Return the groups that their owners have given up, until something changes for them."""
        boots = frozenset(status.boot_id for status in self._node.membership.statuses().values())
        reports = [each for each in self._groups.reports() if each.state == ServingState.FAILED]
        return {each.group: GivenUp(each.reason, each.desired, boots) for each in reports}

    def _owners(self) -> dict[str, str]:
        return {name: group.scope.assignment.owner for name, group in self._groups.by_id.items()}

    def _longest_first(self, reports: list[tuple[str, Serving]]) -> list[tuple[str, Serving]]:
        """Order reports by group. Of two owners of one, the one that has served it longer comes first."""
        owners = self._owners()

        def key(report: tuple[str, Serving]) -> tuple[str, int, str]:
            owner, serving = report
            present = owner == owners.get(serving.group)
            return serving.group, -(serving.ready_s + STEADY_S * present), owner

        return sorted(reports, key=key)

    def _reports(self) -> list[tuple[str, Serving]]:
        """Return the reports of groups with an epoch, or with one a moment ago, and their owners."""
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
        """Return whether a group is between two epochs of its owner."""
        group = self._groups.by_id.get(serving.group)
        if serving.participants or group is None or (owner, serving.group) not in self._ran:
            return False
        return group.scope.row is not None and group.scope.assignment.owner == owner

    def _running(self, owner: str, serving: Serving) -> GroupReport:
        """Return a group as its owner reports it; between two epochs it is where it is assigned."""
        held = {node: mib * MIB for node, mib in zip(serving.participants, serving.held_mib, strict=False)}
        ready, ranks, kind, split = serving.state in SERVES, serving.participants, serving.kind, serving.split
        if not ranks:
            assigned = self._groups.known(serving.group).scope.assignment
            ranks, kind, split = assigned.ranks, assigned.kind, assigned.split
        requests = min(serving.open_requests, 1)  # each number would be another view
        between = not serving.participants
        return GroupReport(serving.group, ranks, kind, split, ready, requests, held, serving.used, between)

    def _wanted(self, row: Deployment, turn: int) -> WantedDeployment:
        """Return what is known of a deployment. `lacks` has the reason that keeps it from being planned."""
        node, model, files = self._node, self._models.of(row.model), self._files(row.model)
        name, shape, lacks = model.source.id if model.source else row.model, None, dict(files.lacks)
        try:
            options = self._machines.options(row, name)
        except MlxtpError as error:  # of a row from a member that lies
            options = self._machines.options(Deployment(row.name), name)
            lacks = dict.fromkeys(node.membership.statuses(), error.detail)
        if model.fingerprint:
            shape = model.shape
        elif files.shape:
            shape = unpacked(files.shape).shape(name, node.settings.kv_bits)
        tried = self._machines.all_failed(over=True)
        return WantedDeployment(row, options, shape, files.weight_bytes, lacks, turn, tried)

    def _files(self, model: str) -> _Files:
        node, here = self._node, self._node.node_id
        told = node.links.reports.of(ModelStatus, model) | {here: self._models.of(model).status}
        have = sorted(node_id for node_id, status in told.items() if status.fingerprint)
        first = here if here in have or not have else have[0]
        lacks = {}
        for node_id in node.membership.statuses():
            why = model_lack(told[first], told.get(node_id), node.name_of(first), node.name_of(node_id))
            if why:
                lacks[node_id] = why
        weight = max((status.weight_mib for status in told.values() if status.fingerprint), default=0)
        return _Files(lacks, weight * MIB, told[first].shape)

    # --- messages ------------------------------------------------------------------------------------

    def _repeat(self) -> None:
        """Broadcast all assignments, unless a Mac has come whose groups the last decision did not know."""
        if self._node.leadership.leading and self._asked is not None:
            for group in self._groups.by_id.values():
                if group.scope.assignment.number:
                    self._node.links.broadcast(group.scope.assignment)

    def _greet(self, _link: ControlLink) -> None:
        self._asked = None

    def _received(self, link: ControlLink, message: GroupAssignment) -> None:
        """Take in an assignment of the present coordinator. Of two of its own the later one holds."""
        claim = LeaderClaim(message.term, link.node_id)
        if claim != self._node.leadership.claim:
            return
        known, (name, _, index) = self._groups.by_id, message.group.rpartition("#")
        most = self._node.replica.most_groups.get(name, 0)
        if message.group not in known and len(known) >= Serving.MOST and int(index or 0) >= most:
            return  # the coordinator repeats it, after the deployment if that is still on its way
        scope = self._groups.known(message.group).scope
        if scope.assigned_in != claim or scope.assignment.number < message.number:
            scope.assigned_in = claim
            self._groups.assign(message)


def _turns(rows: Sequence[Deployment], reports: Sequence[Serving]) -> dict[str, int]:
    """Return the order in which deployments that are not in use give way, the last one first.

    It stands for `WantedDeployment.unused_s`, which would differ in each view.
    """
    unused = {row.name: unused_s(reports, row.name) or 0 for row in rows if not row.pinned}
    return {name: turn for turn, name in enumerate(sorted(unused, key=unused.__getitem__), 1) if unused[name]}
