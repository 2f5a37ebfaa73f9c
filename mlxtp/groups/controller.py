"""The epochs of a group that this node owns: when the next one is formed, and of which ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..cluster import reconcile
from ..cluster.node import ClusterNode
from ..cluster.peer_reports import MachineReports
from ..cluster.reconcile import FormEpoch, Situation, TryGroup
from ..errors import Code, GroupError, MlxtpError
from ..gateway.request import SUSPECT, may_blame
from ..models.inspect import ModelSource
from ..placement.candidates import Candidate, Device, devices_of, parts
from ..placement.cost_model import JACCL_RING, fits_beside
from ..placement.formation import blames_fabric, may_pass
from ..values import stage_words
from ..wire.cluster_messages import Serving
from .health import ServingState, of_the_model
from .lifecycle import EpochPlan, Supervisor
from .machines import Machines
from .owned_epoch import GroupBuilder, OwnedEpoch, ServingReports
from .placer import GroupScope, Placer
from .process_group import EpochGroup

log = logging.getLogger(__name__)

TELL_S = 3.0  #: Seconds that a member that has just come may take to report whether it has the model.
STRIKES = 2  #: Failures in a row after which another plan replaces one that may yet come up.
#: Codes of an end that reveals nothing about a group.
_OTHERWISE = frozenset((Code.REPLANNED, Code.SHUTTING_DOWN, Code.NOT_READY))
_PASSING_TCP = (Code.FORM_FAILED, Code.LINK_TIMEOUT)


# --- a group beside the serving one, which goes on until that group is known to work ----------------------


@dataclass(frozen=True, slots=True)
class _TrialGroup:
    """Group with its model loaded, before its epoch begins."""

    identity: object
    chosen: Candidate
    plan: EpochPlan


class Trials:
    """At most one group beside the present epoch.

    It forms, proves itself, and loads the model if memory permits both. A loaded one stays until the next
    epoch takes it over.
    """

    def __init__(
        self,
        node: ClusterNode,
        scope: GroupScope,
        supervisor: Supervisor,
        *,
        builder: GroupBuilder,
        reports: ServingReports,
        placer: Placer,
        machines: Machines,
        all_reports: Callable[[], list[Serving]],
    ) -> None:
        self._node = node
        self._scope = scope
        self._supervisor = supervisor
        self._builder = builder
        self._reports = reports
        self._placer = placer
        self._machines = machines
        self._all_reports = all_reports
        self._task: asyncio.Task[None] | None = None
        self._ahead: _TrialGroup | None = None
        self._proven: set[object] = set()  #: Groups that formed and proved themselves, see `_identity`.
        #: Groups that loaded beside the present epoch, or tried to: once is enough.
        self._loaded: set[object] = set()
        self._held_back: object = None  #: The last group that could not be tried.

    @property
    def busy(self) -> bool:
        """True while a group is formed, loaded or ended beside the present epoch."""
        return self._task is not None

    def served(self, chosen: Candidate) -> None:
        """Note that a group became ready."""
        self._proven.add(self._identity(chosen))

    def failed(self, chosen: Candidate) -> None:
        """Note that a group failed: it, and its tried parts, have to prove themselves again."""
        self._proven.clear()  # others, too, which costs little
        self._loaded.discard(self._identity(chosen))

    def is_over(self, chosen: Candidate) -> bool:
        """Return True when the serving group may end for this one: nothing is left to try beside it."""
        if chosen.nodes == 1 and not self._renews:
            return True
        if self._ahead is not None:
            return self._ahead.identity == self._identity(chosen)
        return not self.busy and self._untried(chosen) == [] and not self._may_load(chosen)

    def begin(self, number: int, chosen: Candidate) -> None:
        """Try a group, or its next part, as epoch `number`, in the background, unless one is there."""
        if self._task is not None or self._ahead is not None:
            return
        untried = self._untried(chosen)
        if untried is not None:
            tried = next(iter(untried), chosen)
            model = self._scope.model.source if tried is chosen and self._may_load(chosen) else None
            self._task = asyncio.ensure_future(self._try(number, tried, model))
        elif self._held_back != (identity := self._identity(chosen)):
            self._held_back = identity
            words = "%s would be better, but no free cable of %s joins it: the present group goes on"
            log.info(words, chosen.title, self._node.name_of(chosen.ranks[0]))

    def take_over(self, chosen: Candidate) -> EpochPlan | None:
        """Return the epoch of the group that is formed next, if its model is loaded already."""
        ahead = self._ahead
        self._loaded.clear()
        if ahead is None or ahead.identity != self._identity(chosen):
            return None
        self._ahead = None
        return ahead.plan

    def end_stale(self, chosen: Candidate | None) -> None:
        """End the loaded group, in the background, if it failed or is no longer the one that is planned."""
        ahead = self._ahead
        if ahead is None or ahead.plan.ranks is None:
            return
        failed = ahead.plan.ranks.failed
        planned = chosen is not None and self._identity(chosen) == ahead.identity
        wanted = self._scope.owned and self._scope.model.source is ahead.plan.model
        if failed.done() or not (planned and wanted):
            self._ahead = None
            self._task = asyncio.ensure_future(self._end(ahead, failed.result() if failed.done() else None))

    async def stop(self) -> None:
        """End a trial that is under way. A loaded group stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """End everything."""
        await self.stop()
        self._ahead = None
        await self._supervisor.beside.end()

    async def _try(self, number: int, tried: Candidate, model: ModelSource | None) -> None:
        node, identity = self._node, self._identity(tried)
        error: MlxtpError | None = None
        stages: list[str] = []
        node.replica.saw_epoch(number)
        names = " + ".join(map(node.name_of, tried.ranks))
        also = ", with the model" if model is not None else ""
        log.info("epoch %d: trying %s on %s beside what serves%s", number, tried.title, names, also)
        try:
            group = self._builder.group(number, tried, trial=True)
            plan = await self._supervisor.beside.try_out(EpochPlan(number, model, group), stages.append)
            if plan.ranks is not None:
                self._ahead = _TrialGroup(identity, tried, plan)
                plan.ranks.failed.add_done_callback(lambda _: node.changed())
        except MlxtpError as failure:
            error = failure
        except Exception as bug:  # the boundary of the task: the serving group goes on
            log.exception("epoch %d", number)
            error = GroupError(f"{type(bug).__name__}: {bug}", Code.INTERNAL)
        finally:
            self._task = None
            if self._ahead is None:
                self._builder.release(number)
        left_out = False
        if error is None or (model is not None and error.code is Code.OUT_OF_MEMORY):
            self._proven.add(identity)
        else:
            left_out = self._leave_out(tried, error, formed="proven" in stages)
        if model is not None and not left_out:  # the plan names it again at once
            self._loaded.add(identity)
        node.changed()

    async def _end(self, ahead: _TrialGroup, error: MlxtpError | None) -> None:
        try:
            await self._supervisor.beside.end(error)
        finally:
            self._task = None
            self._builder.release(ahead.plan.epoch)
        if error is not None:
            self._leave_out(ahead.chosen, error, formed=True)
        self._node.changed()

    def _leave_out(self, chosen: Candidate, error: MlxtpError, *, formed: bool) -> bool:
        """Return True when the plan goes on without that group."""
        self.failed(chosen)
        if not all(self._node.membership.status_of(each).present for each in chosen.ranks):
            return True
        return self._placer.leave_out(chosen, error, formed=formed)

    def _may_load(self, chosen: Candidate) -> bool:
        """Return True when a group can load the model while the present one serves, and has not yet."""
        if self._identity(chosen) in self._loaded or parts(chosen, self._devices_in_use()) != [chosen]:
            return False
        others = [each for each in self._all_reports() if each.participants]
        if any(not each.held_mib and set(each.participants) & set(chosen.ranks) for each in others):
            return False  # their reports do not include the memory that their ranks hold
        return fits_beside(chosen.memory, {node: self._reports.held_bytes(node) for node in chosen.ranks})

    def _untried(self, chosen: Candidate) -> list[Candidate] | None:
        """Return the parts of a group that have yet to prove themselves; None where they cannot."""
        if self._identity(chosen) in self._proven:
            return []
        found = parts(chosen, self._devices_in_use())
        if found is None:
            return None
        return [part for part in found if self._identity(part) not in self._proven]

    def _devices_in_use(self) -> set[Device]:
        over_jaccl = [each for each in self._all_reports() if each.backend == "jaccl"]
        if not over_jaccl:
            return set()
        topology = self._machines.topology()
        return {
            device
            for each in over_jaccl
            for device in devices_of(each.participants, topology, circle=each.kind == JACCL_RING)
        }

    def _identity(self, chosen: Candidate) -> object:
        """Return the properties that a group shares with one that was proven before."""
        boots = tuple(self._node.membership.status_of(node).boot_id for node in chosen.ranks)
        model = self._scope.model.name
        return model, chosen.kind, chosen.ranks, boots, chosen.rdma, chosen.ring_addresses, chosen.split

    @property
    def _renews(self) -> bool:
        """True while another revision of the model is wanted than the present epoch serves."""
        mine, wanted = self._reports.owned, self._scope.wanted
        return mine is not None and wanted is not None and mine.wanted.model != wanted.model


# --- the epochs, one after the other ----------------------------------------------------------------------


class GroupController:
    """Implements `lifecycle.EpochOwner`."""

    def __init__(
        self,
        node: ClusterNode,
        scope: GroupScope,
        supervisor: Supervisor,
        *,
        reports: ServingReports,
        placer: Placer,
        builder: GroupBuilder,
        trials: Trials,
        readings: MachineReports,
    ) -> None:
        self._node = node
        self._scope = scope
        self._supervisor = supervisor
        self._readings = readings
        self._reports = reports
        self._placer = placer
        self._builder = builder
        self._trials = trials
        self._changed = asyncio.Event()
        self._seen: object = None
        #: True until the first end of a group that took the place of one over JACCL which ended as it served.
        self._in_its_place = False

    # --- for the supervisor --------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make room for the next epoch: the last one is over, and no group is tried beside it."""
        last = self._reports.owned
        if last is not None and last.placement.backend == "jaccl":
            # JACCL forms even with a cable out, between any ranks.
            await self._readings.read_machine_now(last.form.plan.ranks)
        self._let_go()
        await self._trials.stop()
        self._node.changed()

    async def changed(self) -> None:
        """Wait until something is different from now: the members, or what the group is to serve."""
        self._let_go()
        self._changed.clear()
        self._node.changed()
        await self._changed.wait()

    def failed(self, error: MlxtpError, formed: bool) -> bool:
        """Leave out the group that failed on its way up, if there is another one to form.

        One failure is enough, except for a lost process, a forward that was slow on all ranks, or a TCP port
        that was taken: those may pass.
        """
        mine = self._reports.owned
        chosen = mine.placement.chosen if mine is not None else None
        if chosen is None or chosen.nodes == 1 or error.code in _OTHERWISE or of_the_model(error):
            return False
        passing = may_pass(error.code, error.detail)
        passing |= chosen.backend != "jaccl" and error.code in _PASSING_TCP
        strikes = STRIKES if passing else 1
        self._trials.failed(chosen)
        leave_out = partial(self._placer.leave_out, chosen, error, formed=formed, strikes=strikes)
        return bool(self._node.rounds.attempt(leave_out))  # ranks must not outlive a bug in planning

    def died(self, error: MlxtpError, served_s: float, strikes: int, *, last: bool) -> bool:
        """Leave out a group over JACCL that ends again and again, or twice under one request.

        If that request ends the next group, too, it was to blame, and JACCL is no longer left out.
        """
        mine = self._reports.owned
        chosen = mine.placement.chosen if mine is not None else None
        if chosen is None or not may_blame(error.code):
            return False
        twice, in_its_place, self._in_its_place = strikes >= SUSPECT, self._in_its_place, False
        if chosen.backend != "jaccl":
            if twice and in_its_place:
                self._placer.absolve(chosen)
            return False
        if not (blames_fabric(error.code, error.detail) or (twice and error.code is Code.RANK_STALLED)):
            return False
        self._trials.failed(chosen)
        strikes = 1 if twice or last else STRIKES
        leave_out = partial(self._placer.leave_out, chosen, error, strikes=strikes, served_s=served_s)
        self._in_its_place = bool(self._node.rounds.attempt(leave_out))
        return self._in_its_place

    async def close(self) -> None:
        """End the group beside the serving one, if there is one."""
        await self._trials.close()

    def _let_go(self) -> None:
        """Broadcast that the last epoch is over: otherwise the others would keep its last report."""
        mine, self._reports.owned = self._reports.owned, None
        if mine is not None:
            self._builder.release(mine.form.number)
            self._reports.broadcast()

    # --- decisions -----------------------------------------------------------------------------------

    def situation(self, waiting_since: float | None) -> Situation:
        """Return the part of the situation that `Leadership.view` cannot know by itself.

        `waiting_since`: since when a decision about this group has waited for open requests.
        """
        self._notice_changes()
        placement, why = self._placer.placement()
        best = None
        chosen = placement.chosen if placement is not None else None
        self._trials.end_stale(chosen)
        if placement is not None and chosen is not None:
            key, proven = self._placer.key(chosen), self._trials.is_over(chosen)
            scarce = self._placer.is_scarce(chosen)
            best = reconcile.GroupPlan(placement.ranks, key, placement.backend, proven, scarce)
        hold_until, hold = self._hold()
        running, mine = self._reports.running(), self._reports.owned
        served = mine.placement.chosen if mine is not None and running is not None else None
        if served is not None and self._supervisor.status.state is ServingState.READY:
            self._trials.served(served)
            self._placer.formed(served)
        return Situation(
            assignee=self._scope.assignment.owner,
            nodes=self._scope.assignment.nodes,
            wanted=self._scope.wanted,
            running=running,
            others=self._reports.others(),
            plan=best,
            refusal=why,
            hold_until=hold_until,
            hold=hold,
            waiting_since=waiting_since,
        )

    def _hold(self) -> tuple[float, str]:
        """Return until when to wait for members' reports on whether they have the model, and the reason."""
        node, met_at = self._node, self._node.peer_info.met_at
        waits = [
            (met_at[node_id] + TELL_S, node_id)
            for node_id in self._scope.unreported
            if node_id in met_at and node_id in self._scope.assignment.nodes
        ]
        if not waits:
            return 0.0, ""
        until, node_id = max(waits)
        return until, f"{node.name_of(node_id)} has not yet reported whether it has the model"

    def form(self, form: FormEpoch) -> None:
        """Have the supervisor form this epoch, unless it is still busy with the last one."""
        placement, _ = self._placer.placement()
        source = self._scope.model.source
        if not self._supervisor.waits_for_plan or placement is None or source is None:
            return
        if self._trials.busy:
            return  # the memory and ports of a trial must be free again
        node, chosen = self._node, placement.chosen
        assert chosen is not None
        ahead = self._trials.take_over(chosen)
        if ahead is not None:
            form = replace(form, number=ahead.epoch)
        wanted = self._scope.wanted
        assert wanted is not None
        self._reports.owned = OwnedEpoch(form, placement, wanted)
        node.replica.saw_epoch(form.number)
        plan = ahead or EpochPlan(form.number, source, self._builder.group(form.number, chosen))
        names = " + ".join(map(node.name_of, placement.ranks))
        kind = _joined(plan.group, chosen)
        log.info("epoch %d: %s on %s", form.number, kind, names, extra={"epoch": form.number})
        for note in placement.notes:
            log.info("%s", note)
        if ahead is not None:
            self._reports.broadcast()  # its hosted ranks are no longer beside another group
        self._supervisor.start_epoch(plan)

    def try_out(self, action: TryGroup) -> None:
        """Form the group beside the serving one, in the background."""
        placement, _ = self._placer.placement()
        if placement is not None and placement.chosen is not None:
            self._trials.begin(action.number, placement.chosen)

    def remeasured(self) -> None:
        """Compare this node's group by its measured speed from now on: a measurement came."""
        mine = self._reports.owned
        placement, _ = self._placer.placement()
        if mine is None or mine.placement.chosen is None or placement is None:
            return
        asked = (mine.form.plan.ranks, mine.placement.chosen.kind, mine.placement.chosen.split)
        for each in placement.alternatives:
            if (
                (each.ranks, each.kind, each.split) == asked
                and each.speed is not None
                and each.speed.measured
            ):
                key = (*mine.form.plan.key[:-1], self._placer.rate(each))
                form = replace(mine.form, plan=replace(mine.form.plan, key=key))
                self._reports.owned = replace(mine, form=form)

    def _notice_changes(self) -> None:
        """End a failed state once a member comes or goes, or another model is desired."""
        node = self._node
        statuses = node.membership.statuses()
        present = tuple(sorted((node, s.boot_id) for node, s in statuses.items() if s.present))
        now = (present, self._scope.row, self._scope.assignment.owner)
        if now != self._seen:
            self._seen = now
            self._changed.set()


def _joined(group: EpochGroup, chosen: Candidate) -> str:
    """Return in words how the ranks of an epoch work together. Several ranks may run on one Mac."""
    kind = chosen.kind if group.world_size == len(chosen.ranks) else f"{group.world_size} ranks"
    return ", ".join(filter(None, (kind, stage_words(group.split))))
