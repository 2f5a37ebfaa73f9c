"""Plans for the epochs of a group that this node owns: when to form the next, and on what ranks."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial

from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..cluster.peer_reports import MachineReports
from ..cluster.reconcile import FormEpoch, GroupForm, Situation
from ..errors import Code, MlxtpError
from ..gateway.request import SUSPECT, may_blame
from ..placement.candidates import Candidate, Fabrics
from ..placement.cost_model import ALONE
from ..placement.formation import FailedGroup, blames_fabric, links_of, may_pass
from ..placement.topology import Topology
from ..values import stage_words
from ..wire.cluster_messages import (
    EpochEnded,
    Machine,
    ModelStatus,
    Prepare,
    Prepared,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
)
from ..wire.rdma import flat
from .health import SERVES, ServingState, of_the_model
from .lifecycle import EpochPlan
from .machines import Machines, local_split, model_lack
from .process_group import EpochGroup
from .ranks import RankWord, RemoteRank, Watcher
from .scope import GroupScope

log = logging.getLogger(__name__)

LACK_S = 5.0  #: Seconds that an epoch waits for a Mac that this node cannot reach.
STRIKES = 2  #: Failures in a row that leave out a group if their cause may pass.
#: Codes that reveal nothing about a group.
_OTHERWISE = frozenset((Code.REPLANNED, Code.SHUTTING_DOWN, Code.NOT_READY))
_PASSING_TCP = (Code.FORM_FAILED, Code.LINK_TIMEOUT)


class RemoteRanks:
    """Ranks on other Macs of this node's epochs, by node id and epoch. Passes them their agents' reports."""

    def __init__(self, node: ClusterNode) -> None:
        self.by_epoch: dict[tuple[str, int], RemoteRank] = {}
        node.links.on(self._reported, Prepared, RankStarted, RankPong, RankTrouble, EpochEnded, RankSide)

    def release(self, number: int) -> None:
        self.by_epoch = {key: rank for key, rank in self.by_epoch.items() if key[1] != number}

    def _reported(self, link: ControlLink, message: RankWord) -> None:
        if rank := self.by_epoch.get((link.node_id, message.epoch)):
            rank.received(message)


class GroupController:
    """Implements `lifecycle.EpochOwner`. Reports failed groups to `machines`, for the coordinator's plan."""

    def __init__(
        self, scope: GroupScope, machines: Machines, remote: RemoteRanks, readings: MachineReports
    ) -> None:
        self._node = scope.node
        self._scope = scope
        self._supervisor = scope.supervisor
        self._readings = readings
        self._machines = machines
        self._remote = remote
        self._next: asyncio.Future[EpochPlan] | None = None  #: The plan that the supervisor waits for.
        self._changed = asyncio.Event()
        self._seen: object = None
        self._lacked = ("", 0.0)  #: The Mac that the next epoch waits for, and since when.
        self._loaded = ""  #: The last model that served: a group that fails to load it is at fault itself.
        #: True until the first end of a group that replaced a group over JACCL that failed as it served.
        self._in_its_place = False

    # --- for the supervisor --------------------------------------------------------------------------

    async def next_plan(self) -> EpochPlan:
        """Release the last epoch, and wait for the plan of the next."""
        last = self._scope.plan
        if last is not None and last.wired.backend == "jaccl":
            # JACCL forms even with a cable out.
            await self._readings.read_machine_now(last.order.form.ranks)
        self._let_go()
        self._next = asyncio.get_running_loop().create_future()
        self._node.changed()
        return await self._next

    async def changed(self) -> None:
        """Wait until members, the assignment or the deployment change."""
        self._let_go()
        self._changed.clear()
        self._node.changed()
        await self._changed.wait()

    def failed(self, error: MlxtpError, formed: bool) -> bool:
        """Leave out a group that failed before it served. Return True if another may take its place.

        One failure suffices, except for causes that may pass: a lost process, a forward that was slow on all
        ranks, or a taken TCP port.
        """
        plan = self._scope.plan
        if plan is None or len(plan.order.form.ranks) == 1 or error.code in _OTHERWISE:
            return False
        if of_the_model(error) and plan.order.form.model != self._loaded:
            return False
        passing = may_pass(error.code, error.detail)
        passing |= plan.wired.backend != "jaccl" and error.code in _PASSING_TCP
        how = "formed, and failed then" if formed else "did not form"
        return self._leave_out(plan, error, how, strikes=STRIKES if passing else 1)

    def died(self, error: MlxtpError, served_s: float, strikes: int, *, last: bool) -> bool:
        """Leave out a group over JACCL that keeps failing, or fails twice during one request.

        If that request also ends the next group, blame the request, and allow JACCL again. `strikes` counts
        failures in a row during the suspected request; 0 without one. `last`: no other epoch may follow.
        Return True if another plan takes its place; the request may then try that.
        """
        plan = self._scope.plan
        if plan is None or not may_blame(error.code):
            return False
        twice, in_its_place, self._in_its_place = strikes >= SUSPECT, self._in_its_place, False
        if plan.wired.backend != "jaccl":
            if twice and in_its_place:
                self._absolve(plan.wired)
            return False
        if not (blames_fabric(error.code, error.detail) or (twice and error.code is Code.RANK_STALLED)):
            return False
        how, strikes = "formed, and failed while it served", 1 if twice or last else STRIKES
        self._in_its_place = self._leave_out(plan, error, how, strikes=strikes, served_s=served_s)
        return self._in_its_place

    def _let_go(self) -> None:
        """Broadcast that the last epoch is over, so that other nodes drop its last report."""
        plan, self._scope.plan = self._scope.plan, None
        if plan is not None:
            self._remote.release(plan.order.number)
            self._scope.broadcast()

    # --- decisions -----------------------------------------------------------------------------------

    def situation(self, waiting_since: float | None) -> Situation:
        """Return the group's part of the view that `Leadership.view` completes."""
        self._notice_changes()
        form, why = self.form()
        scope, running, state = self._scope, self._scope.running(), self._supervisor.status.state
        row, plan = scope.row, scope.plan
        another = running is not None and form is not None and form != running.form
        if form is not None and another and not (wired := self._wired(form)).ranks:
            form, why = None, wired.reason  # do not end a running epoch for an impossible one
        if plan is not None and running is not None and state is ServingState.READY:
            self._machines.failed.formed(plan.wired.kind, links_of(running.form.ranks, plan.wired.rdma))
            self._loaded = running.form.model
        return Situation(
            assignee=scope.assignment.owner,
            model=row.model if row is not None else "",
            form=form,
            refusal=why,
            running=running,
            ready=state in SERVES,
            open_requests=self._supervisor.gateway.deployments.open_at(scope.group),
            others=scope.others(),
            waiting_since=waiting_since,
        )

    def form(self) -> tuple[GroupForm | None, str]:
        """Return the next epoch's model and ranks, or the reason why there can be none."""
        scope, settings = self._scope, self._node.settings
        row, model, assigned = scope.row, scope.model, scope.assignment
        if row is None or not scope.owned:
            return None, scope.why_not
        if model.source is None:
            return None, model.problem or model.coming or f"{row.model} is still being looked for"
        told = self._node.links.reports.of(ModelStatus, row.model)
        for other in assigned.ranks[1:]:
            names = self._node.name, self._node.name_of(other)
            here = self._node.membership.status_of(other).present
            if here and (why := model_lack(model.status, told.get(other), *names)):
                return None, f"{names[1]} cannot take part: {why}"
        split, ranks = assigned.split, len(assigned.ranks)
        if settings.ranks > 1:
            try:
                split = local_split(settings, row, model.shape)
            except MlxtpError as error:
                return None, error.detail
        elif split and (why := model.shape.uncuttable(ranks, split) or (len(split) != ranks) * "other ranks"):
            return None, f"the split {split} is assigned to {ranks} Macs: {why}"
        return GroupForm(row.model, assigned.ranks, assigned.kind if ranks > 1 else ALONE, split), ""

    def _wired(self, form: GroupForm) -> Candidate:
        """Return the ranks' present links, or a candidate whose reason says what is missing."""
        options = self._machines.links_options()
        members = {each.node_id: each for each in self._machines.members() if each.node_id in form.ranks}
        if gone := [node for node in form.ranks if node not in members]:
            reason = f"{self._node.name_of(gone[0])} has not reported its machine"
            return Candidate(form.kind, len(form.ranks), reason=reason)
        topology = Topology(list(members.values()), options.rdma, options.fabric_networks)
        return replace(Fabrics(members, topology).wired(form.kind, form.ranks, options), split=form.split)

    @property
    def reported_by(self) -> float:
        """Deadline for its ranks to report whether they have the model."""
        waits, ranks = self._scope.unreported.items(), self._scope.assignment.ranks
        return max((until for node_id, until in waits if node_id in ranks), default=0.0)

    def begin(self, order: FormEpoch) -> str:
        """Give the supervisor this epoch, unless it is busy. Return why it cannot be formed."""
        source = self._scope.model.source
        if self._next is None or self._next.done() or source is None:
            return ""
        form, wired = order.form, self._wired(order.form)
        if not wired.ranks:
            return wired.reason
        links, failed = links_of(wired.ranks, wired.rdma), self._machines.all_failed(over=False)
        left_out = any(each.is_in(wired.kind, links) for each in failed)
        group = self._group(order, wired)
        self._scope.plan = EpochPlan(order, source, group, wired, left_out)
        self._node.replica.saw_epoch(order.number)
        names = " + ".join(map(self._node.name_of, form.ranks))
        log.info("epoch %d: %s on %s", order.number, _joined(group), names, extra={"epoch": order.number})
        self._supervisor.status.in_epoch = True
        self._next.set_result(self._scope.plan)
        return ""

    def _group(self, order: FormEpoch, wired: Candidate) -> EpochGroup:
        node, form, number = self._node, order.form, order.number
        here, world, ranks = node.settings.ranks, len(form.ranks), form.ranks
        if here > 1:
            return EpochGroup(here, here, node.settings.local_backend, nodes=ranks, split=form.split)
        known = node.links.reports.of(Machine)
        machines = tuple(f"{known[each].chip} {known[each].build}" for each in ranks)
        if world == 1:
            return EpochGroup(1, 1, "none", kind=form.kind, machines=machines, nodes=ranks)
        fabric = wired.ring_addresses or ("",) * world
        members = node.replica.roster.members()

        def endpoints(watcher: Watcher) -> tuple[RemoteRank, ...]:
            made = {}
            for rank, node_id in enumerate(ranks[1:], 1):
                prepare = Prepare(number, rank, fabric[rank], form.model, self._scope.group)
                send = partial(node.links.send, node_id)
                made[node_id, number] = RemoteRank(send, node.name_of(node_id), prepare, watcher)
            self._remote.by_epoch |= made
            return tuple(made.values())

        return EpochGroup(
            1,
            world,
            wired.backend,
            fabric=fabric[0],
            endpoints=endpoints,
            decode_hosts=("127.0.0.1", *map(self._addresses_for, ranks[1:])),
            pins=tuple(members[node_id].fingerprint for node_id in ranks),
            kind=form.kind,
            rdma=flat(wired.rdma),
            jaccl_ring=wired.jaccl_ring,
            machines=machines,
            nodes=ranks,
            split=form.split,
        )

    def _addresses_for(self, node_id: str) -> str:
        """Return this node's addresses for a member: on the fastest network, then on the control link."""
        me, link = self._node.node_id, self._node.links.to(node_id)
        faster = [each.addresses[me] for each in self._machines.topology().fastest(me, node_id)[:1]]
        return ",".join(dict.fromkeys([*faster, *([link.local] if link is not None else [])]))

    def _notice_changes(self) -> None:
        """Wake `changed` when a member appears or leaves, or the deployment or place changes."""
        statuses, assigned = self._node.membership.statuses(), self._scope.assignment
        present = tuple(sorted((node, s.boot_id) for node, s in statuses.items() if s.present))
        now = (present, self._scope.row, assigned.ranks, assigned.kind, assigned.split)
        if now != self._seen:
            self._seen = now
            self._changed.set()

    # --- groups that failed --------------------------------------------------------------------------

    def _leave_out(
        self, plan: EpochPlan, error: MlxtpError, how: str, *, strikes: int, served_s: float | None = None
    ) -> bool:
        """Note a failed group. Return True if it is left out now and was not before: a group that forms
        although it is left out has no other place.
        """
        wired, failed = plan.wired, self._machines.failed
        group = FailedGroup(wired.kind, links_of(wired.ranks, wired.rdma), f"it {how}: {error.detail}")
        members, now = {member.node_id: member for member in self._machines.members()}, time.monotonic()
        if not failed.failed(group, error.code, members, now, strikes=strikes, served_s=served_s):
            return False
        again_s = next((left_s for each, left_s in self._machines.left_out() if each == group), 0.0)
        words = "%s on %s %s: %s; it is left out for %.0f s, or until cables, ports or versions change"
        log.warning(words, wired.title, " + ".join(wired.names), how, error.detail, again_s)
        self._machines.tell()
        return not plan.left_out

    def lacks(self, node_id: str, now: float) -> None:
        """Note the Mac that the next epoch waits for, if any. After LACK_S, report that this node cannot
        reach it: the coordinator may still have a link to it, and plan with it.
        """
        if self._lacked[0] != node_id:
            self._lacked = node_id, now
        if not node_id or now < self._lacked[1] + LACK_S:
            return
        members = {member.node_id: member for member in self._machines.members()}
        one, other = sorted((self._node.node_id, node_id))
        why = f"{self._node.name} does not reach {self._node.name_of(node_id)}"
        group = FailedGroup("", frozenset({(one, other, "", "")}), why)
        self._machines.failed.failed(group, Code.FORM_FAILED, members, time.monotonic())
        self._machines.tell()

    def _absolve(self, wired: Candidate) -> None:
        """Allow groups again that ended during a request that also ended this one."""
        for each in self._machines.failed.absolve(wired.ranks):
            names = " + ".join(map(self._node.name_of, each.nodes))
            words = "%s on %s is no longer left out: the same request ended %s, too"
            log.warning(words, each.kind, names, wired.title)
        self._machines.tell()


def _joined(group: EpochGroup) -> str:
    kind = group.kind if group.world_size == len(group.nodes) else f"{group.world_size} ranks"
    return ", ".join(filter(None, (kind, stage_words(group.split))))
