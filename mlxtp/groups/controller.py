"""The epochs that this node coordinates: the choice of the best group, its formation, its ranks."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial

from ..cluster import reconcile
from ..cluster.failure_detector import MemberState as Standing
from ..cluster.leadership import Situation
from ..cluster.links import ControlLink
from ..cluster.node import BEAT_S, ClusterNode
from ..cluster.peer_reports import MachineReports
from ..cluster.reconcile import FormEpoch, RunningEpoch, TryGroup
from ..config import EMBEDDED_MODEL, Settings
from ..errors import Code, GroupError, MlxtpError
from ..models.inspect import ModelSource, is_hub_id, read_config, shape_in
from ..models.local_model import LocalModel
from ..placement.candidates import Candidate
from ..placement.formation import FailedGroup, FailedGroups, links_of, preflight
from ..placement.model_shape import ModelShape
from ..placement.planner import Placement, PlacementOptions, plan
from ..placement.topology import MemberMachine, Topology
from ..wire.cluster_messages import (
    DesiredState,
    EpochEnded,
    Prepare,
    Prepared,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    Serving,
)
from ..wire.rdma import Matrix, flat
from .fabric_results import FabricResults
from .health import ServingState, of_the_model
from .hosted_rank import HostedRank
from .lifecycle import EpochPlan, Supervisor
from .process_group import EpochGroup, ProcessGroup, RankEndpoint
from .remote_rank import RankWord, RemoteRank
from .trials import Trials

log = logging.getLogger(__name__)

MEMORY_STEP_BYTES = 1 << 30
MIB = 1 << 20
KEY_NUMBERS = 2  #: Length of the key by which plans are compared, see `_key`.
TELL_S = 3.0  #: Seconds that a member that has just come may take to report whether it has the model.
STRIKES = 2  #: Failures in a row after which another plan replaces one that may yet come up.
#: Codes of an end that reveals nothing about a group.
_OTHERWISE = frozenset((Code.REPLANNED, Code.SHUTTING_DOWN, Code.NOT_READY))
_PASSING_JACCL = frozenset((Code.RANK_LOST, Code.LINK_LOST))
_PASSING_TCP = _PASSING_JACCL | {Code.FORM_FAILED, Code.LINK_TIMEOUT}


@dataclass(frozen=True, slots=True)
class _OwnedEpoch:
    """An epoch that this node forms or runs."""

    form: FormEpoch
    placement: Placement
    model: str
    desired: int


class GroupController:
    """Implements `lifecycle.EpochOwner`."""

    def __init__(
        self,
        node: ClusterNode,
        supervisor: Supervisor,
        model: LocalModel,
        results: FabricResults,
        machines: MachineReports,
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._model = model
        self._results = results
        self._machines = machines
        self._owned: _OwnedEpoch | None = None
        self._endpoints: dict[tuple[str, int], RemoteRank] = {}  #: By node id and epoch.
        self._failed = FailedGroups()
        self._trials = Trials(node, supervisor, model, self)
        self._changed = asyncio.Event()
        self._shape: tuple[ModelSource, ModelShape] | None = None
        self._known: tuple[object, Placement | None, str] | None = None
        self._lacking: set[str] = set()  #: Nodes whose MLX turned out to have no JACCL.
        self._seen: object = None
        #: The epoch of the hosted rank, and the boot id that its host had when it came.
        self._hosted_rank_for = (0, "")
        node.links.on(self._received, Prepared, RankStarted, RankPong, RankTrouble, EpochEnded, RankSide)
        results.on_change(self._remeasured)
        node.links.on_up(self._greet)
        node.links.on_lost(self._lost)
        node.rounds.every(BEAT_S, self._report)

    # --- for the supervisor --------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make room for the next epoch: the last one is over, and no group is tried beside it."""
        if self._owned is not None and self._owned.placement.backend == "jaccl":
            # JACCL forms even with a cable out, between any ranks.
            await self._machines.read_machine_now(self._owned.form.plan.ranks)
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
        mine, chosen = self._owned, self._owned.placement.chosen if self._owned is not None else None
        if mine is None or chosen is None or chosen.nodes == 1:
            return False
        if error.code in _OTHERWISE or of_the_model(error):
            return False
        passing = _PASSING_JACCL if chosen.backend == "jaccl" else _PASSING_TCP
        strikes = STRIKES if error.code in passing else 1
        self._trials.failed(chosen)
        return self.leave_out(chosen, error, formed=formed, strikes=strikes)

    def leave_out(self, chosen: Candidate, error: MlxtpError, *, formed: bool, strikes: int = 1) -> bool:
        """Note that a group failed; log and return whether another one takes its place."""
        links, now = links_of(chosen.ranks, chosen.rdma), time.monotonic()
        what = "formed, and failed then" if formed else "did not form"
        group = FailedGroup(chosen.kind, links, f"it {what}: {error.detail}")
        members = {member.node_id: member for member in self.members()}
        if not self._failed.failed(group, error.code, members, now, strikes=strikes):
            return False
        placement, _ = self.placement()
        if placement is None or placement.chosen is None:
            self._failed.forget(chosen.kind, links)
            return False
        again_s = next(left_s for each, left_s in self.left_out() if each == group)
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

    def left_out(self) -> tuple[tuple[FailedGroup, float], ...]:
        """Groups that failed to form, and the seconds until each is tried again."""
        members = {member.node_id: member for member in self.members()}
        return self._failed.left_out(members, time.monotonic())

    def _failed_groups(self) -> tuple[FailedGroup, ...]:
        return tuple(group for group, _ in self.left_out())

    def left_out_lines(self) -> list[str]:
        """Return one sentence for each group that is left out, for users."""
        lines = []
        for each, left_s in self.left_out():
            names = " + ".join(sorted(map(self._node.name_of, each.nodes)))
            lines.append(
                f"{each.kind} on {names} is left out: {each.reason}. The next try is in {left_s:.0f} s"
            )
        return lines

    async def close(self) -> None:
        """End the group beside the serving one, if there is one."""
        await self._trials.close()

    def release_endpoints(self, number: int) -> None:
        """Drop the endpoints of epoch `number`, which has ended."""
        self._endpoints = {key: endpoint for key, endpoint in self._endpoints.items() if key[1] != number}

    def _let_go(self) -> None:
        """Broadcast that the last epoch is over: otherwise the others would keep its last report."""
        last, mine, self._owned = self.serving(), self._owned, None
        if mine is not None:
            self.release_endpoints(mine.form.number)
        if last is not None:
            self._node.links.broadcast(last)

    # --- decisions -----------------------------------------------------------------------------------

    def situation(self, hosted: HostedRank) -> Situation:
        """Return the part of the situation that `Leadership.decide` cannot know by itself.

        `hosted` is the rank that this machine runs for another coordinator.
        """
        self._notice_changes()
        placement, why = self.placement()
        best = None
        chosen = placement.chosen if placement is not None else None
        self._trials.end_stale(chosen)
        if placement is not None and chosen is not None:
            proven = self._trials.is_over(chosen)
            best = reconcile.GroupPlan(placement.ranks, self._key(placement), placement.backend, proven)
        elif self._model.problem and (others := self._others_with_model()):
            best = reconcile.GroupPlan(
                (min(others),), (0.0, 0.0)
            )  # it is to coordinate, and will plan for itself
        hold_until, hold = self._hold()
        return Situation(
            hold_until=hold_until,
            hold=hold,
            running=self._running(hosted),
            others=tuple(filter(None, map(self._as_running, self._node.peer_info.servings.items()))),
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
            if node_id in node.peer_info.met_at and not self._has_reported(node_id)
        ]
        if not waits:
            return 0.0, ""
        until, node_id = max(waits)
        return until, f"{node.name_of(node_id)} has not yet reported whether it has the model"

    def _has_reported(self, node_id: str) -> bool:
        told = self._node.peer_info.models.get(node_id)
        desired = self._model.version
        return told is not None and told.desired == desired and bool(told.fingerprint or told.problem)

    def form(self, form: FormEpoch) -> None:
        """Have the supervisor form this epoch, unless it is still busy with the last one."""
        placement, _ = self.placement()
        source = self._model.source
        if not self._supervisor.waits_for_plan or placement is None or source is None:
            return
        if self._trials.busy:
            return  # the memory and ports of a trial must be free again
        node, chosen = self._node, placement.chosen
        assert chosen is not None
        ahead = self._trials.take(chosen)
        if ahead is not None:
            form = replace(form, number=ahead.epoch)
        self._owned = _OwnedEpoch(form, placement, node.leadership.desired.model, self._model.version)
        node.leadership.saw_epoch(form.number)
        names = " + ".join(map(node.name_of, placement.ranks))
        log.info("epoch %d: %s on %s", form.number, chosen.kind, names, extra={"epoch": form.number})
        for note in placement.notes:
            log.info("%s", note)
        if ahead is not None and (serving := self.serving()) is not None:
            node.links.broadcast(serving)  # its hosted ranks are no longer beside another group
        self._supervisor.start_epoch(ahead or EpochPlan(form.number, source, self.group(form.number, chosen)))

    def try_out(self, action: TryGroup) -> None:
        """Form the group beside the serving one, in the background."""
        placement, _ = self.placement()
        if placement is not None and placement.chosen is not None:
            self._trials.begin(action.number, placement.chosen)

    def still_wanted(self, before: DesiredState, desired: DesiredState) -> None:
        """Keep the epoch for a desired state that differs only in its version, its writer or its pin."""
        mine = self._owned
        if mine is not None and (mine.model, mine.desired) == (before.model, before.version):
            self._owned = replace(mine, desired=desired.version)

    def group(self, number: int, chosen: Candidate, *, trial: bool = False) -> EpochGroup:
        """Return the ranks of epoch `number`. `trial`: they run beside those that serve."""
        node = self._node
        world = len(chosen.ranks)
        if (here := node.settings.ranks) > 1:
            return EpochGroup(here, here, node.settings.local_backend)
        if world == 1:
            return EpochGroup(1, 1, "none", kind=chosen.kind, machines=(self._machine(node.node_id),))
        fabric = chosen.ring_addresses or ("",) * world
        members = node.leadership.roster.members()

        def endpoints(ranks: ProcessGroup) -> tuple[RankEndpoint, ...]:
            made = {}
            for rank, node_id in enumerate(chosen.ranks[1:], 1):
                order = Prepare(number, rank, fabric[rank], self._model.version, trial)
                made[node_id, number] = RemoteRank(
                    partial(node.links.send, node_id),
                    node.name_of(node_id),
                    order,
                    ranks,
                )
            self._endpoints |= made
            return tuple(made.values())

        return EpochGroup(
            1,
            world,
            chosen.backend,
            fabric=fabric[0],
            endpoints=endpoints,
            decode_hosts=("127.0.0.1", *map(self._addresses_for, chosen.ranks[1:])),
            pins=tuple(members[node_id].fingerprint for node_id in chosen.ranks),
            kind=chosen.kind,
            rdma=flat(_matrix(chosen)) if chosen.backend == "jaccl" else (),
            jaccl_ring=chosen.jaccl_ring,
            machines=tuple(map(self._machine, chosen.ranks)),
            without_jaccl=lambda ranks: self._without_jaccl([chosen.ranks[rank] for rank in ranks]),
        )

    def _addresses_for(self, node_id: str) -> str:
        """Return this node's addresses for a member: on the fastest network, then on the control link."""
        me, link = self._node.node_id, self._node.links.to(node_id)
        faster = [each.addresses[me] for each in self.topology().fastest(me, node_id)[:1]]
        return ",".join(dict.fromkeys([*faster, *([link.local] if link is not None else [])]))

    def _machine(self, node_id: str) -> str:
        machine = self._node.peer_info.machines[node_id]
        return f"{machine.chip} {machine.build}"

    def _running(self, hosted: HostedRank) -> RunningEpoch | None:
        """Return the epoch that this node owns, or the one that it hosts a rank of."""
        node = self._node
        if self._owned is not None and self._supervisor.in_epoch:
            form = self._owned.form
            chosen = self._owned.placement.chosen
            if self._supervisor.state is ServingState.READY and chosen is not None:
                self._trials.served(chosen)
                self._failed.formed(chosen.kind, links_of(chosen.ranks, chosen.rdma))
            return RunningEpoch(
                form.number,
                form.plan.ranks,
                form.boots,
                form.plan.key,
                self._owned.model,
                self._owned.desired,
                self._supervisor.state in (ServingState.READY, ServingState.DRAINING),
                self._supervisor.gateway.open_requests,
                self._supervisor.state is ServingState.DRAINING,
                form.plan.backend,
            )
        if not hosted.epoch:
            self._hosted_rank_for = (0, "")
            return None
        if self._hosted_rank_for[0] != hosted.epoch:
            self._hosted_rank_for = (hosted.epoch, node.membership.status_of(hosted.host).boot_id)
        return RunningEpoch(
            hosted.epoch,
            (hosted.host, node.node_id),
            (self._hosted_rank_for[1], node.boot_id),
            (),
            "",
            0,
            False,
        )

    def _as_running(self, told: tuple[str, Serving]) -> RunningEpoch | None:
        teller, serving = told
        if serving.participants[:1] != (teller,) or len(serving.key) != KEY_NUMBERS:
            return None  # only the node of rank 0 reports a group
        if serving.state not in (ServingState.READY, ServingState.LOADING, ServingState.DRAINING):
            return None
        return RunningEpoch(
            serving.epoch,
            serving.participants,
            (),
            serving.key,
            serving.model,
            serving.desired,
            serving.state == ServingState.READY,
            serving.open_requests,
            serving.state == ServingState.DRAINING,
            serving.backend,
        )

    # --- which group ---------------------------------------------------------------------------------

    def members(self) -> list[MemberMachine]:
        """Return the members that are present and may take part, in the form that placement needs."""
        node = self._node
        found = []
        for node_id, status in node.membership.statuses().items():
            machine = node.peer_info.machines.get(node_id)
            if not status.present or machine is None:
                continue
            link = node.links.to(node_id)
            found.append(
                MemberMachine(
                    node_id,
                    node.name_of(node_id),
                    replace(machine, free_bytes=_steps(machine.free_bytes), wired_bytes=0, notes=()),
                    link.remote if link is not None else "",
                    *self._has_model(node_id),
                    jaccl=False if node_id in self._lacking else None,
                    held_bytes=self.held_bytes(node_id),
                    boot_id=status.boot_id,
                )
            )
        return sorted(found, key=lambda member: member.node_id)

    def topology(self) -> Topology:
        """Return the connections between the members that are present."""
        return Topology(self.members(), self._overrides(self._node.settings))

    def held_bytes(self, node_id: str) -> int:
        """Return the bytes that ranks hold of that Mac's memory, and free for a group of this node."""
        told = self._node.peer_info.servings.values()
        theirs = [dict(zip(each.participants, each.held_mib, strict=False)) for each in told]
        return _steps(self._held_here(node_id) + sum(held.get(node_id, 0) * MIB for held in theirs))

    def _held_here(self, node_id: str) -> int:
        """Return the bytes that ranks of this node's groups hold of that Mac's memory."""
        supervisor, mine = self._supervisor, self._owned
        groups = [(supervisor.beside, self._trials.ranks)]
        if mine is not None:
            groups.append((supervisor.ranks, mine.form.plan.ranks))
        pongs = [
            ranks.pongs.get(nodes.index(node_id))
            for ranks, nodes in groups
            if ranks is not None and node_id in nodes
        ]
        return sum(pong.memory_bytes for pong in pongs if pong is not None)

    def _has_model(self, node_id: str) -> tuple[bool, str]:
        node = self._node
        ours = self._model.status
        theirs = ours if node_id == node.node_id else node.peer_info.models.get(node_id)
        if theirs is None or theirs.desired != ours.desired:
            return False, "it has not yet reported whether it has the model"
        if theirs.problem:
            return False, theirs.problem
        if not theirs.fingerprint:
            return False, "it is still getting the model"
        if ours.revision and theirs.revision and theirs.revision != ours.revision:
            return False, (
                f"it has the model at commit {theirs.revision[:12]}, {node.name} at {ours.revision[:12]}; "
                "`mlxtp pull MODEL --everywhere` brings the newest to all"
            )
        if ours.fingerprint and theirs.fingerprint != ours.fingerprint:
            return False, (
                f"its files of the model differ: {theirs.fingerprint[:12]} there, {ours.fingerprint[:12]} on "
                f"{node.name}; {self._mending(node.name_of(node_id))}"
            )
        return True, ""

    def _mending(self, other: str) -> str:
        """Return the advice for files that differ between this Mac and another one."""
        model, here = self._node.leadership.desired.model, self._node.name
        if is_hub_id(model):
            return f"`mlxtp verify {model} --repair` on {other}, then on {here}, gets the damaged files again"
        return f"bring the same files to {other} and {here}"

    def placement(self) -> tuple[Placement | None, str]:
        """Return the best plan for the present members, or the reason for none; kept until a change."""
        node = self._node
        source, desired = self._model.source, node.leadership.desired
        if not desired.model:
            return None, "no model is configured"
        if source is None:
            return (
                None,
                self._model.problem or self._model.coming or f"{desired.model} is still being looked for",
            )
        leaving = node.leadership.draining
        members = [member for member in self.members() if member.node_id not in leaving]
        if not members:
            return None, "every Mac here is about to stop"
        try:
            options = replace(self._options(desired.nodes, source.id), failed=self._failed_groups())
        except MlxtpError as error:  # from the desired state of a member with another version
            return None, error.detail
        asked = (members, desired, source.id, options)
        if self._known is None or self._known[0] != asked:
            try:
                placement = plan(members, self._shape_of(source), node.node_id, options)
                placement = self._checked(placement, members, options)
                way_out = "" if placement.chosen is not None else self._way_out(placement, members, options)
                self._known = (asked, placement, placement.reason + way_out)
            except MlxtpError as error:
                self._known = (asked, None, error.detail)
        return self._known[1], self._known[2]

    def _way_out(self, refused: Placement, members: list[MemberMachine], options: PlacementOptions) -> str:
        """Return the notes on having no group: an earlier `--nodes` may be the only reason."""
        words = ["", *refused.notes]
        if isinstance(options.nodes, int):
            auto = replace(options, nodes="auto")
            if plan(members, self._shape_now(), self._node.node_id, auto).chosen is not None:
                words.append("`mlxtp serve MODEL --nodes auto` uses the Macs that are here")
        return "; ".join(words)

    def no_place(self, shape: ModelShape, nodes: str = "", only: Container[str] | None = None) -> str:
        """Return the reason why the present members have no place for a model of this shape.

        Each member counts as if it had the model, and as if nothing else ran on its machine. The reason is
        empty where there is a place, and as long as a suspect may come back.

        `nodes`: over how many Macs; empty for the present setting. `only` these may take part.
        """
        node = self._node
        if any(each.state is Standing.SUSPECT for each in node.membership.statuses().values()):
            return ""
        members = [
            replace(member, machine=replace(member.machine, free_bytes=0), model_ok=True, held_bytes=0)
            for member in self.members()
            if member.node_id not in node.leadership.draining and (only is None or member.node_id in only)
        ]
        try:
            options = self._options(nodes or node.leadership.desired.nodes, shape.name)
            options = replace(options, failed=self._failed_groups())
            placement = plan(members, shape, node.node_id, options)
        except MlxtpError as error:
            return error.detail
        return placement.reason if placement.chosen is None else ""

    def _checked(
        self, placement: Placement, members: list[MemberMachine], options: PlacementOptions
    ) -> Placement:
        """Return the plan if JACCL would form on all its Macs; else log why, and return one for the ring."""
        chosen = placement.chosen
        if chosen is None or chosen.backend != "jaccl":
            return placement
        machines = {member.node_id: member.machine for member in members}
        by_rank = {rank: machines[node_id] for rank, node_id in enumerate(chosen.ranks)}
        for rank, node_id in enumerate(chosen.ranks):
            named = options.rdma.get(node_id, {}).values()
            trouble = preflight(
                rank,
                by_rank[rank],
                _matrix(chosen),
                ring=chosen.jaccl_ring,
                others=by_rank,
                named=list(named),
            )
            if trouble is None:
                continue
            what = f"{self._node.name_of(node_id)}: {trouble}"
            if options.backend == "jaccl":
                raise GroupError(f"JACCL cannot form: {what}", Code.FORM_FAILED)
            log.warning("JACCL cannot form, so the ring is used. %s", what)
            return plan(members, self._shape_now(), self._node.node_id, replace(options, backend="ring"))
        return placement

    def _options(self, nodes: str, model: str) -> PlacementOptions:
        settings = self._node.settings
        wanted: str | int = int(nodes) if nodes.isdecimal() else nodes
        if wanted == "auto" and model == EMBEDDED_MODEL:
            wanted = "all"  # it is there to show that the cluster works, not to be fast
        return PlacementOptions(
            backend=settings.fabric,
            nodes=wanted,
            max_context=settings.max_context,
            fast_fences=settings.fast_fences,
            repeatable=settings.repeatable,
            measured=self._results.measured(),
            rdma=self._overrides(settings),
        )

    def _overrides(self, settings: Settings) -> dict[str, dict[str, str]]:
        """Return the RDMA devices set by hand, by node id. Users give names of nodes, or starts of ids."""
        known = {self._node.node_id, *self._node.peer_info.machines}

        def nodes(text: str) -> list[str]:
            named = [node for node in known if text == self._node.name_of(node)]
            return named or [node for node in known if node.startswith(text)]

        found: dict[str, dict[str, str]] = {}
        for item in settings.rdma:
            who, _, device = item.partition("=")
            one, _, other = who.partition("/")
            for node in nodes(one):
                for peer in nodes(other) if other else known - {node}:
                    found.setdefault(node, {})[peer] = device
        return found

    def _shape_now(self) -> ModelShape:
        assert self._shape is not None
        return self._shape[1]

    def _shape_of(self, source: ModelSource) -> ModelShape:
        if self._shape is None or self._shape[0] is not source:
            kv_bits = self._node.settings.kv_bits
            self._shape = (source, shape_in(source.path, read_config(source.path), source.id, kv_bits))
        return self._shape[1]

    def _remeasured(self) -> None:
        """Compare this node's group by its measured speed from now on: a measurement came."""
        mine = self._owned
        placement, _ = self.placement()
        if mine is None or mine.placement.chosen is None or placement is None:
            return
        asked = (mine.form.plan.ranks, mine.placement.chosen.kind)
        for each in placement.alternatives:
            if (each.ranks, each.kind) == asked and each.speed is not None and each.speed.measured:
                key = (*mine.form.plan.key[:-1], each.speed.tokens_per_second)
                form = replace(mine.form, plan=replace(mine.form.plan, key=key))
                self._owned = replace(mine, form=form)

    def _key(self, placement: Placement) -> tuple[float, ...]:
        """Return the order of plans: as many Macs as wanted, then tokens per second."""
        chosen = placement.chosen
        assert chosen is not None
        source = self._model.source
        nodes = self._node.leadership.desired.nodes
        on_all = source is not None and self._options(nodes, source.id).nodes == "all"
        speed = chosen.speed.tokens_per_second if chosen.speed is not None else 0.0
        return (float(len(chosen.ranks)) if on_all else 0.0, speed)

    def _notice_changes(self) -> None:
        """End a failed state once a member comes or goes, or another model is desired."""
        node = self._node
        statuses = node.membership.statuses()
        present = tuple(sorted((node, s.boot_id) for node, s in statuses.items() if s.present))
        now = (present, node.leadership.desired, node.leadership.leading)
        if now != self._seen:
            self._seen = now
            self._changed.set()

    # --- reports of others ---------------------------------------------------------------------------

    def _received(self, link: ControlLink, message: RankWord) -> None:
        """Pass an agent's report on to the endpoint of the rank that it runs for this node."""
        if endpoint := self._endpoints.get((link.node_id, message.epoch)):
            endpoint.received(message)

    def _without_jaccl(self, nodes: list[str]) -> GroupError:
        """Note nodes whose MLX turned out to have no JACCL: with `auto` the next epoch uses the ring."""
        who = " and ".join(map(self._node.name_of, nodes))
        why = f"MLX on {who} has no JACCL; it needs macOS 26.2 or newer and librdma"
        if self._node.settings.fabric != "auto":
            return GroupError(why, Code.FORM_FAILED)
        log.warning("%s, so the ring is used", why)
        self._lacking.update(nodes)
        return GroupError(why, Code.REPLANNED)

    def _lost(self, node_id: str, why: str) -> None:
        """Note that the last link to an agent has ended."""
        for (host, _), endpoint in self._endpoints.items():
            if host == node_id:
                endpoint.lost(why)

    # --- reports to others ---------------------------------------------------------------------------

    def _greet(self, link: ControlLink) -> None:
        if (serving := self.serving()) is not None:
            link.send(serving)

    def _report(self, _now: float) -> None:
        if (serving := self.serving()) is not None:
            self._node.links.broadcast(serving)

    def serving(self) -> Serving | None:
        """Return this node's group, for all others; None when it has none and another node coordinates."""
        mine, supervisor = self._owned, self._supervisor
        if mine is None:
            return self._nothing() if self._node.leadership.leading else None
        if supervisor.has_ranks:
            state, requests = supervisor.state, supervisor.gateway.open_requests
            info = next(iter(supervisor.gateway.models()), None)
        else:  # it is about to begin, or is over; the supervisor shows the node that this one follows
            state, requests, info = ServingState.RESTARTING, 0, None
        group = supervisor.group
        reason = supervisor.reason.detail if supervisor.reason is not None else ""
        if state is ServingState.LOADING:
            reason = supervisor.progress
        loaded = state in (ServingState.READY, ServingState.DRAINING)
        return Serving(
            mine.form.number,
            str(state),
            supervisor.gateway.closing or reason,
            group.backend if group is not None else "none",
            group.kind if group is not None else "",
            mine.form.plan.ranks,
            mine.form.plan.key,
            requests,
            mine.model,
            mine.desired,
            info.context if info is not None else 0,
            info.vocabulary if info is not None else 0,
            info.eos if info is not None else (),
            math.ceil(supervisor.gateway.load_s),
            tuple(-(-self._held_here(node) // MIB) for node in mine.form.plan.ranks) if loaded else (),
        )

    def _nothing(self) -> Serving:
        """Return the report of a coordinator without a group, with the reason."""
        supervisor, why = self._supervisor, self._node.leadership.waiting
        state = ServingState.IDLE
        if supervisor.resting and supervisor.state is ServingState.FAILED:
            state, why = (
                ServingState.FAILED,
                supervisor.reason.detail if supervisor.reason is not None else "",
            )
        version = self._model.version
        return Serving(supervisor.epoch, str(state), why, "none", "", (), (), 0, "", version, 0, 0, ())


def _steps(size: int) -> int:
    """Round memory down to steps, so that only a large change makes another plan."""
    return size // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES


def _matrix(chosen: Candidate) -> Matrix:
    return tuple(tuple(device or "" for device in row) for row in chosen.rdma)
