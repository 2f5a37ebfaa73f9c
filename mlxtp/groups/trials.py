"""Groups that are formed beside the serving one, which goes on until they are known to work."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from ..cluster.node import ClusterNode
from ..errors import Code, GroupError, MlxtpError
from ..models.inspect import ModelSource
from ..models.local_model import LocalModel
from ..placement.candidates import Candidate, Device, devices_of, parts
from ..placement.cost_model import JACCL_RING, fits_beside
from .lifecycle import EpochPlan, Supervisor
from .owned_epoch import GroupBuilder, ServingReports
from .placer import Placer

log = logging.getLogger(__name__)


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
        supervisor: Supervisor,
        model: LocalModel,
        *,
        builder: GroupBuilder,
        reports: ServingReports,
        placer: Placer,
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._model = model
        self._builder = builder
        self._reports = reports
        self._placer = placer
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
        if chosen.nodes == 1:
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
            model = self._model.source if tried is chosen and self._may_load(chosen) else None
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
        wanted = self._node.leadership.leading and self._model.source is ahead.plan.model
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
        others = self._node.peer_info.servings.values()
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
        over_jaccl = [each for each in self._reports.all() if each.backend == "jaccl"]
        if not over_jaccl:
            return set()
        topology = self._placer.topology()
        return {
            device
            for each in over_jaccl
            for device in devices_of(each.participants, topology, circle=each.kind == JACCL_RING)
        }

    def _identity(self, chosen: Candidate) -> object:
        """Return the properties that a group shares with one that was proven before."""
        boots = tuple(self._node.membership.status_of(node).boot_id for node in chosen.ranks)
        return chosen.kind, chosen.ranks, boots, chosen.rdma, chosen.ring_addresses
