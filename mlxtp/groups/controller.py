"""The epochs that this node coordinates: when the next one is formed, of which group, and why one ended."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from ..cluster import reconcile
from ..cluster.node import ClusterNode
from ..cluster.peer_reports import MachineReports
from ..cluster.reconcile import FormEpoch, RunningEpoch, Situation, TryGroup
from ..errors import Code, MlxtpError
from ..models.local_model import LocalModel
from ..wire.cluster_messages import DesiredState
from .fabric import FabricResults
from .health import ServingState, of_the_model
from .lifecycle import EpochPlan, Supervisor
from .owned_epoch import GroupBuilder, OwnedEpoch, ServingReports
from .placer import Placer
from .trials import Trials

log = logging.getLogger(__name__)

TELL_S = 3.0  #: Seconds that a member that has just come may take to report whether it has the model.
STRIKES = 2  #: Failures in a row after which another plan replaces one that may yet come up.
#: Codes of an end that reveals nothing about a group.
_OTHERWISE = frozenset((Code.REPLANNED, Code.SHUTTING_DOWN, Code.NOT_READY))
_PASSING_JACCL = frozenset((Code.RANK_LOST, Code.LINK_LOST))
_PASSING_TCP = _PASSING_JACCL | {Code.FORM_FAILED, Code.LINK_TIMEOUT}


class GroupController:
    """Implements `lifecycle.EpochOwner`."""

    def __init__(
        self,
        node: ClusterNode,
        supervisor: Supervisor,
        model: LocalModel,
        *,
        reports: ServingReports,
        placer: Placer,
        results: FabricResults,
        machines: MachineReports,
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._model = model
        self._machines = machines
        self._reports = reports
        self._placer = placer
        self._builder = GroupBuilder(node, model, placer)
        self._trials = Trials(node, supervisor, model, builder=self._builder, reports=reports, placer=placer)
        self._changed = asyncio.Event()
        self._seen: object = None
        results.on_change(self._remeasured)

    # --- for the supervisor --------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make room for the next epoch: the last one is over, and no group is tried beside it."""
        last = self._reports.owned
        if last is not None and last.placement.backend == "jaccl":
            # JACCL forms even with a cable out, between any ranks.
            await self._machines.read_machine_now(last.form.plan.ranks)
        self._let_go()
        await self._trials.stop()
        self._node.changed()

    async def changed(self) -> None:
        """Wait until the members or the desired state are different from now."""
        self._let_go()
        self._changed.clear()
        self._node.changed()
        await self._changed.wait()

    def failed(self, error: MlxtpError, formed: bool) -> bool:
        """Leave out the group that failed on its way up, if there is another one to form.

        One failure is enough, except for a lost process or a TCP port that was taken: those may pass.
        """
        mine = self._reports.owned
        chosen = mine.placement.chosen if mine is not None else None
        if chosen is None or chosen.nodes == 1 or error.code in _OTHERWISE or of_the_model(error):
            return False
        passing = _PASSING_JACCL if chosen.backend == "jaccl" else _PASSING_TCP
        strikes = STRIKES if error.code in passing else 1
        self._trials.failed(chosen)
        return self._placer.leave_out(chosen, error, formed=formed, strikes=strikes)

    async def close(self) -> None:
        """End the group beside the serving one, if there is one."""
        await self._trials.close()

    def _let_go(self) -> None:
        """Broadcast that the last epoch is over: otherwise the others would keep its last report."""
        last, mine, self._reports.owned = self._reports.serving(), self._reports.owned, None
        if mine is not None:
            self._builder.release(mine.form.number)
        if last is not None:
            self._node.links.broadcast(last)

    # --- decisions -----------------------------------------------------------------------------------

    def situation(self, hosted: RunningEpoch | None) -> Situation:
        """Return the part of the situation that `Leadership.decide` cannot know by itself.

        `hosted` is the epoch of the rank that this machine runs for another coordinator.
        """
        self._notice_changes()
        placement, why = self._placer.placement()
        best = None
        chosen = placement.chosen if placement is not None else None
        self._trials.end_stale(chosen)
        if placement is not None and chosen is not None:
            key, proven = self._placer.key(chosen), self._trials.is_over(chosen)
            best = reconcile.GroupPlan(placement.ranks, key, placement.backend, proven)
        elif self._model.problem and (others := self._others_with_model()):
            # It is to coordinate, and will plan for itself.
            best = reconcile.GroupPlan((min(others),), (0.0, 0.0))
        hold_until, hold = self._hold()
        running, mine = self._reports.running(), self._reports.owned
        served = mine.placement.chosen if mine is not None and running is not None else None
        if served is not None and self._supervisor.status.state is ServingState.READY:
            self._trials.served(served)
            self._placer.formed(served)
        return Situation(
            hold_until=hold_until,
            hold=hold,
            running=running or hosted,
            others=self._reports.others(),
            plan=best,
            refusal=why,
        )

    def _others_with_model(self) -> list[str]:
        """Return the members that are present and have the model, which this node lacks."""
        node = self._node
        return [
            node_id
            for node_id, told in node.peer_info.models.items()
            if node_id not in node.leadership.draining
            and told.fingerprint
            and told.desired == self._model.version
            and node.membership.status_of(node_id).present
        ]

    def _hold(self) -> tuple[float, str]:
        """Return until when to wait for members' reports on whether they have the model, and the reason."""
        node = self._node
        waits = [
            (node.peer_info.met_at[node_id] + TELL_S, node_id)
            for node_id in node.links.nodes()
            if node_id in node.peer_info.met_at and not self._model.reported_by(node_id)
        ]
        if not waits:
            return 0.0, ""
        until, node_id = max(waits)
        return until, f"{node.name_of(node_id)} has not yet reported whether it has the model"

    def form(self, form: FormEpoch) -> None:
        """Have the supervisor form this epoch, unless it is still busy with the last one."""
        placement, _ = self._placer.placement()
        source = self._model.source
        if not self._supervisor.waits_for_plan or placement is None or source is None:
            return
        if self._trials.busy:
            return  # the memory and ports of a trial must be free again
        node, chosen = self._node, placement.chosen
        assert chosen is not None
        ahead = self._trials.take_over(chosen)
        if ahead is not None:
            form = replace(form, number=ahead.epoch)
        desired = node.replica.desired.model
        self._reports.owned = OwnedEpoch(form, placement, desired, self._model.version)
        node.replica.saw_epoch(form.number)
        names = " + ".join(map(node.name_of, placement.ranks))
        log.info("epoch %d: %s on %s", form.number, chosen.kind, names, extra={"epoch": form.number})
        for note in placement.notes:
            log.info("%s", note)
        if ahead is not None:
            self._reports.broadcast()  # its hosted ranks are no longer beside another group
        plan = ahead or EpochPlan(form.number, source, self._builder.group(form.number, chosen))
        self._supervisor.start_epoch(plan)

    def try_out(self, action: TryGroup) -> None:
        """Form the group beside the serving one, in the background."""
        placement, _ = self._placer.placement()
        if placement is not None and placement.chosen is not None:
            self._trials.begin(action.number, placement.chosen)

    def still_wanted(self, before: DesiredState, desired: DesiredState) -> None:
        """Keep the epoch for a desired state that differs only in its version, its writer or its pin."""
        mine = self._reports.owned
        if mine is not None and (mine.model, mine.desired) == (before.model, before.version):
            self._reports.owned = replace(mine, desired=desired.version)

    def _remeasured(self) -> None:
        """Compare this node's group by its measured speed from now on: a measurement came."""
        mine = self._reports.owned
        placement, _ = self._placer.placement()
        if mine is None or mine.placement.chosen is None or placement is None:
            return
        asked = (mine.form.plan.ranks, mine.placement.chosen.kind)
        for each in placement.alternatives:
            if (each.ranks, each.kind) == asked and each.speed is not None and each.speed.measured:
                key = (*mine.form.plan.key[:-1], each.speed.tokens_per_second)
                form = replace(mine.form, plan=replace(mine.form.plan, key=key))
                self._reports.owned = replace(mine, form=form)

    def _notice_changes(self) -> None:
        """End a failed state once a member comes or goes, or another model is desired."""
        node = self._node
        statuses = node.membership.statuses()
        present = tuple(sorted((node, s.boot_id) for node, s in statuses.items() if s.present))
        now = (present, node.replica.desired, node.leadership.leading)
        if now != self._seen:
            self._seen = now
            self._changed.set()
