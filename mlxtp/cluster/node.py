"""This node among the others: links, beats, its state, and the actions that follow from it.

Modules of `cluster/` decide; this one receives, sends and carries out. `GroupController` forms the epochs
that this node coordinates. `HostedRank` runs a rank for another coordinator. `ForwardingBackend` sends
requests to the node of rank 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from ..config import Settings
from ..errors import Code, GroupError, MlxtpError, ProtocolError, UserError
from ..gateway.forwarding import ForwardingBackend
from ..groups.controller import GroupController
from ..groups.fabric_bench import FabricBench
from ..groups.health import ServingState as Serves
from ..groups.hosted_rank import HostedRank
from ..groups.lifecycle import ABOUT_TO_STOP, Supervisor
from ..groups.local_rank import WORKER, Worker
from ..identity.store import Identity
from ..models.local_model import LocalModel
from ..models.model_queue import ModelSwitcher
from ..models.selection import ModelSelection
from ..models.transfers import TransferCoordinator
from ..placement.cost_model import Measured
from ..wire.certificates import NodeIdentity
from ..wire.cluster_messages import (
    MAX_MEMBERS,
    MAX_MODEL,
    AgentHello,
    Beat,
    DesiredState,
    Echo,
    EndEpoch,
    EpochEnded,
    FabricAnswer,
    FabricReport,
    FabricWanted,
    MachineReport,
    MachineWanted,
    Members,
    ModelHeld,
    ModelLender,
    ModelPull,
    ModelQueue,
    ModelsHere,
    ModelStatus,
    ModelTurn,
    Prepare,
    Prepared,
    RankGathered,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    RosterSaved,
    Serving,
    StartRank,
    TokenIssued,
    TokenWanted,
)
from ..wire.codecs import Message, printable
from ..wire.messages import PROTOCOL_VERSION, Error
from ..wire.reports import Machine
from .cluster_state import ClusterState
from .compatibility import Build, compare
from .failure_detector import Change, Duplicate, MemberState
from .leadership import Leadership, Situation
from .links import ControlLink, PeerLinks
from .machine_reports import MachineReports
from .membership import Membership
from .own_build import flags_of, versions_here
from .persistence import Saving
from .reconcile import (
    Action,
    ClusterView,
    FormEpoch,
    HandOver,
    StopEpoch,
    TryGroup,
    Wait,
    drained_by,
    may_leave,
    refusal,
)
from .roster_proofs import RosterProofs, remover_of
from .rtt import ASK_S, RoundTripTimes
from .saved_state import SavedState, load
from .surroundings import PeerInfo
from .token_issuing import TokenIssuing

log = logging.getLogger(__name__)

NOTHING_WANTED = "no model is configured; run `mlxtp serve MODEL`"
BEAT_S = 0.5
REPORT_S = 10.0  #: Seconds between readings of this machine's memory, addresses and power.


class NodeLoop:
    """Implements `links.LinkEvents`. Everything runs in one event loop; `live` is its main task."""

    may_leave = False  #: True once the others can do without this node, which is about to stop.
    http = ""  #: URL of this node's endpoint.
    problem = ""  #: Problem that a user has to fix, such as a copied home folder.
    waiting = ""  #: Reason why there is no group yet.
    _unplanned = ""  #: Reason why there can be no group for the desired model, even after waiting.
    #: Last (model, reason) logged, digits stripped so that memory changes do not repeat the line.
    _logged_reason: tuple[str, str] = ("", "")

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        supervisor: Supervisor,
        machine: Machine,
        *,
        worker: Worker = WORKER,
    ) -> None:
        now = time.monotonic()
        kept, trouble = load(settings.home)
        if trouble:
            log.error("%s", trouble)
        self.settings = settings
        self.identity = identity
        self.node_id = identity.node_id
        self.name = printable(settings.name)  # we cannot refuse the system's name of a Mac
        self.boot_id = secrets.token_hex(8)
        self._versions, self._flags = versions_here(), flags_of(settings)
        self.peer_info = PeerInfo(machines={self.node_id: machine})
        self.listens_at: Callable[[Machine], tuple[str, ...]] = lambda _machine: ()
        #: By node id: the boot ids of two machines that had it at once, and the message about it.
        self._doubles: dict[str, tuple[tuple[str, ...], str]] = {}
        self.supervisor = supervisor
        self._proofs = RosterProofs(identity)
        self.leadership = self._remembered(kept.beliefs, now)
        others = [node for node in self.leadership.roster.members() if node != self.node_id]
        self.membership = Membership(self.node_id, self.boot_id, others, now)
        self.links = PeerLinks(self.node_id, self.hello, self._judge, self)
        self._saving = Saving(settings.home, self.links.broadcast)
        self.transfers = TransferCoordinator(self)
        self.model = LocalModel(
            settings.draft_model, self._model_changed, self.transfers.get, settings.model_folders
        )
        self.hosted_rank = HostedRank(settings, self.model.folder, self.links.send, worker)
        self.hosted_rank.last_epoch = kept.beliefs.epoch
        self.trial_rank = HostedRank(settings, self.model.folder, self.links.send, worker)
        self.machine = MachineReports(self)
        self.controller = GroupController(self)
        self.fabric_bench = FabricBench(self, self.controller)
        self.round_trips = RoundTripTimes(self.node_id, self.links)
        self.token_issuing = TokenIssuing(self)
        self.forwarding = ForwardingBackend(self)
        self.model_switcher = ModelSwitcher(self, lambda: self._unplanned, self.controller.no_place)
        self.selection = ModelSelection(self, self.controller.no_place)
        #: Called when a node became a member or ceased to be one.
        self.on_roster: Callable[[], None] = lambda: None
        #: Called with the node id when the last control link to a node has ended.
        self.on_gone: Callable[[str], None] = lambda _node_id: None
        #: Returns the addresses at which other nodes were last reached.
        self.peers: Callable[[], Mapping[str, tuple[str, ...]]] = lambda: kept.peers
        self._wake = asyncio.Event()
        self._announced, self._until = (0, False), 0.0
        #: Done when this agent must end: this node is no longer a member, or there was a bug, as an error.
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over.add_done_callback(_retrieved)
        self.model.resolve(self.leadership.desired)

    def _remembered(self, kept: ClusterState, now: float) -> Leadership:
        """Restore the kept state, signed where this node can sign, and with this node as a member."""
        identity, beliefs = self.identity, replace(kept, roster=self._proofs.completed(kept.roster))
        found = Leadership(self.node_id, beliefs, now, founder=identity.authority is not None)
        if self.node_id not in found.roster.members():
            found.admit(self.node_id, self.name, identity.fingerprint, self._proofs.own)
        return found

    # --- queries ------------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which others reach this agent now. They change, because interfaces come and go."""
        return self.listens_at(self.peer_info.machines[self.node_id])

    def hello(self) -> AgentHello:
        """Return the hello by which this node introduces itself."""
        return AgentHello(
            PROTOCOL_VERSION,
            self.node_id,
            self.identity.cluster_id,
            self.boot_id,
            self.name,
            self._versions,
            self._flags,
            self.addresses,
            self.http,
            self.identity.authority is not None,
        )

    def name_of(self, node_id: str) -> str:
        """Return the name of a node, for users."""
        if node_id == self.node_id:
            return self.name
        entry = self.leadership.roster.members().get(node_id)
        return self.peer_info.names.get(node_id) or (entry.name if entry else "") or node_id[:8]

    def measured(self) -> Measured:
        """Return the measurements that placement prefers to its assumptions."""
        return self.fabric_bench.measured()

    def coming(self, model: str) -> str:
        """Return the progress of a model's download to this node, for users; empty when there is none."""
        return self.transfers.progress_text(model)

    # --- requests of users ---------------------------------------------------------------------------

    def set_desired(self, model: str, nodes: str = "", *, by_person: bool = True) -> DesiredState:
        """Set the model the cluster should run. `by_person`: pin it against models that requests name.

        An empty model is not pinned. A state that is set already stays as it is, unless its group has failed
        or a member lacks the model: then a repeated request tries it again. Raises UserError for a name that
        no message can carry.
        """
        if len(model) > MAX_MODEL or not model.isprintable():
            raise UserError(
                f"a model is called by at most {MAX_MODEL} printable characters, not {model[:200]!r}"
            )
        present = self.leadership.desired
        nodes = nodes or present.nodes
        wanted = (model, nodes, by_person and bool(model))
        there = (present.model, present.nodes, present.pinned)
        lacking = self.model.problem or any(
            told.desired == present.version and told.problem for told in self.peer_info.models.values()
        )
        if wanted == there and self.supervisor.state is not Serves.FAILED and not lacking:
            return present
        desired = self.leadership.set_desired(model, nodes, by_person=by_person)
        self._desire(present, desired)
        return desired

    def remove(self, *node_ids: str) -> None:
        """Remove members. Raises UserError for a node that is no member, or a founder on another Mac."""
        if (founder := self.leadership.roster.founder()) in node_ids and founder != self.node_id:
            raise UserError(
                f"{self.name_of(founder)} founded this cluster, and no other Mac can remove it; run "
                "`mlxtp cluster leave --force` there"
            )
        for node_id in node_ids:
            log.info("%s removes %s from the cluster", self.name, self.name_of(node_id))
            self.leadership.remove(node_id, self._proofs.removal)
        self._roster_changed()

    async def saved_elsewhere(self) -> list[str]:
        """Return the members whose disks have this node's roster: see `Saving.elsewhere`."""
        await self._save()
        return await self._saving.elsewhere(lambda: self.leadership.roster)

    def drain(self) -> None:
        """Broadcast that this node is about to stop, so that the others plan without it."""
        self.leadership.drain()
        self.may_leave = False
        self._send_beat()
        self.changed()

    def admit(self, node_id: str, name: str, fingerprint: str, by: str = "", address: str = "") -> None:
        """Admit a new member, by a token that `by` requested. Raises UserError when it cannot be one."""
        seal = partial(self._proofs.admission, admitted_by=by, address=address, at=int(time.time()))
        self.leadership.admit(node_id, name, fingerprint, seal)
        self._roster_changed()
        how = f", by a token that {self.name_of(by)} requested" if by else ""
        log.info("%s is a member now%s", name or node_id[:8], how)

    # --- neighbours ----------------------------------------------------------------------------------

    def _judge(self, identity: NodeIdentity, hello: AgentHello) -> MlxtpError | None:
        return self._not_a_member(identity, hello) or self._given_up(hello) or self._unlike(hello)

    def _not_a_member(self, identity: NodeIdentity, hello: AgentHello) -> MlxtpError | None:
        if (identity.node_id, identity.cluster_id) != (hello.node_id, hello.cluster_id):
            return ProtocolError("its certificate and its hello name different nodes", Code.NOT_AUTHENTIC)
        if hello.node_id == self.node_id:
            return self._our_own(hello)
        roster = self.leadership.roster
        if roster.removed(identity.fingerprint):
            return ProtocolError(
                f"{hello.name or hello.node_id[:8]} was removed from this cluster; on it, "
                "`mlxtp cluster leave` and `mlxtp node --join TOKEN` bring it back",
                Code.REMOVED_NODE,
            )
        known = roster.members().get(hello.node_id)
        if known is not None and known.fingerprint != identity.fingerprint:
            return ProtocolError(f"{hello.node_id[:8]} is known by another key", Code.NOT_AUTHENTIC)
        return None

    def _given_up(self, hello: AgentHello) -> MlxtpError | None:
        boots, what = self._doubles.get(hello.node_id, ((), ""))
        if hello.boot_id not in boots:
            return None
        return ProtocolError(f"{what}. Then restart mlxtp", Code.DUPLICATE_NODE)

    def _our_own(self, hello: AgentHello) -> MlxtpError:
        """Return the error for a peer with our identity: this agent itself, or a copy of it."""
        if hello.boot_id == self.boot_id:
            return ProtocolError("this is the same node", Code.SAME_NODE)
        self._twins(f"another running agent has the identity of {self.name}")
        return ProtocolError(self.problem, Code.DUPLICATE_NODE)

    def _unlike(self, theirs: AgentHello) -> MlxtpError | None:
        """Return the reason why ranks of a node with this hello could not compute with ours."""
        ours = self.hello()
        difference = compare(
            Build(ours.version, ours.versions, ours.flags),
            Build(theirs.version, theirs.versions, theirs.flags),
            theirs.name or theirs.node_id[:8],
            self.name,
        )
        return ProtocolError(difference, Code.MISMATCH) if difference else None

    def opened(self, link: ControlLink) -> bool:
        """Take in a welcomed peer, and send it this node's state."""
        hello, now = link.hello, time.monotonic()
        if self.leadership.roster.members().get(link.node_id) is None:
            try:  # its certificate proves its admission, which no member has reported yet
                self.admit(hello.node_id, hello.name, link.fingerprint, address=link.remote)
            except UserError as error:
                log.warning("%s", error.detail)
                return False
        self.membership.admitted(link.node_id)
        if not self.membership.link_up(link.number, link.node_id, hello.boot_id, link.remote, now):
            if self.membership.status_of(link.node_id).boot_id != hello.boot_id:
                what = f"another agent has the identity of {hello.name}, or this one was declared dead"
                link.refuse(ProtocolError(f"{what}; if it persists, restart it", Code.DUPLICATE_NODE))
            return False
        _, what = self._doubles.pop(link.node_id, ((), ""))  # this start of it counts
        if what and self.problem == what:
            self.problem = ""
        knowledge = self.peer_info
        knowledge.names[link.node_id] = hello.name
        knowledge.met_at.setdefault(link.node_id, now)
        knowledge.https[link.node_id] = hello.http
        knowledge.addresses[link.node_id] = hello.addresses
        if hello.authority and self.leadership.roster.founder() in ("", link.node_id):
            knowledge.authority = link.node_id
        with contextlib.suppress(MlxtpError):
            link.send(self.leadership.beat(healthy=self.membership.healthy))
            link.send(self.leadership.desired)
            for members in self.leadership.roster.messages():
                link.send(members)
            link.send(self.machine.report())
            link.send(self.model.status)
            if (serving := self.controller.serving()) is not None:
                link.send(serving)
            if (turn := self.model_switcher.met()) is not None:
                link.send(turn)
            for word in (*self.fabric_bench.report(), *self.transfers.met()):
                link.send(word)
        self.changed()
        return True

    def closed(self, link: ControlLink, why: str, goodbye: bool) -> None:
        """Take in the end of a link."""
        now = time.monotonic()
        if goodbye:
            self.membership.goodbye(link.number, now)
        else:
            self.membership.link_down(link.number, now)
        if link.node_id not in self.links.nodes():
            self.peer_info.drop(link.node_id)
            self.machine.reported(link.node_id)
            self.controller.lost(link.node_id, why)
            self.hosted_rank.lost(link.node_id)
            self.trial_rank.lost(link.node_id)
            self.on_gone(link.node_id)
            self.fabric_bench.lost(link.node_id)
            self.transfers.lost(link.node_id)
            log.info("the link to %s ended: %s", self.name_of(link.node_id), why)
        self.changed()

    def received(self, link: ControlLink, message: Message) -> None:
        """Dispatch a peer's message."""
        node_id = link.node_id
        if not self.membership.counts(link.number):
            return
        match message:
            case Beat():
                self._beat(link, message)
            case Echo():
                self.round_trips.received(link, message, time.monotonic())
            case DesiredState():
                before = self.leadership.desired
                if self.leadership.desires(message):
                    self._desire(before, message)
            case Members():
                self._enrol(node_id, message)
            case MachineReport() | ModelStatus() | Serving():
                self._learn(node_id, message)
            case Prepare():
                self._prepare(node_id, message)
            case StartRank() | EndEpoch() | RankGathered():
                if isinstance(message, EndEpoch) and not message.in_order:
                    self.machine.read_again()
                of_trial = message.epoch == self.trial_rank.epoch
                (self.trial_rank if of_trial else self.hosted_rank).received(node_id, message)
            case Prepared() | RankStarted() | RankPong() | RankTrouble() | EpochEnded() | RankSide():
                self.controller.received(node_id, message)
            case _:
                self._about_commands(node_id, message)

    def _about_commands(self, node_id: str, message: Message) -> None:
        """Dispatch complaints, and commands that a user typed on one Mac and another has to run."""
        match message:
            case MachineWanted():
                self.machine.report_to(node_id)
            case TokenWanted() | TokenIssued():
                self.token_issuing.received(node_id, message)
            case ModelTurn() | ModelQueue():
                self.model_switcher.received(node_id, message, time.monotonic())
            case FabricWanted() | FabricReport() | FabricAnswer():
                self.fabric_bench.received(node_id, message)
            case ModelHeld() | ModelLender() | ModelPull() | ModelsHere():
                self.transfers.received(node_id, message)
            case RosterSaved():
                self._saving.received(node_id, message)
            case Error() if message.code == Code.DUPLICATE_NODE and message.detail != self.problem:
                self.problem = message.detail
                log.error("%s: %s", self.name_of(node_id), message.detail)

    def _desire(self, before: DesiredState, desired: DesiredState) -> None:
        if (desired.model, desired.nodes) == (before.model, before.nodes):
            self.controller.still_wanted(before, desired)
        if desired.model != before.model:
            why = f"{desired.model} is wanted now" if desired.model else f"{before.model} was unloaded"
            self.supervisor.gateway.fail_all(GroupError(why, Code.SHUTTING_DOWN))
        self.model.resolve(desired)
        self.links.broadcast(desired)
        self.changed()

    def _enrol(self, node_id: str, members: Members) -> None:
        full = self.leadership.overfull
        before = self.leadership.roster
        if self.leadership.enrols(self._proofs.proven(members.entries, before)):
            for entry in self.leadership.roster.entries:
                if entry.removed and not before.removed(entry.fingerprint):
                    by = self.leadership.roster.by_key(remover_of(entry))
                    log.info("%s removed %s", self.name_of(by.node_id) if by else "a member", entry.name)
            self._roster_changed()
        if self.leadership.overfull and not full:
            log.warning(
                "%s reports more than %d members; those beyond are left out",
                self.name_of(node_id),
                MAX_MEMBERS,
            )

    def _learn(self, node_id: str, message: MachineReport | ModelStatus | Serving) -> None:
        match message:
            case MachineReport():
                self.peer_info.machines[node_id] = message
                self.machine.reported(node_id)
            case ModelStatus():
                self.peer_info.models[node_id] = message
            case Serving():
                self.peer_info.servings[node_id] = message
                self.leadership.saw_epoch(message.epoch)
                if (node_id, message.epoch) == (self.trial_rank.host, self.trial_rank.epoch):
                    self.hosted_rank, self.trial_rank = (
                        self.trial_rank,
                        self.hosted_rank,
                    )  # its group serves now
                    why = f"{self.name_of(node_id)} serves as epoch {message.epoch}"
                    self.trial_rank.clear(why)
                    self.supervisor.end_epoch(GroupError(why, Code.REPLANNED))
                if node_id == self.hosted_rank.host and message.epoch > self.hosted_rank.epoch:
                    self.hosted_rank.clear(f"its host is at epoch {message.epoch}")
        self.changed()

    def _beat(self, link: ControlLink, beat: Beat) -> None:
        now = time.monotonic()
        self.membership.beat(link.number, now)
        if beat.short:
            self.peer_info.short.add(link.node_id)
        else:
            self.peer_info.short.discard(link.node_id)
        draining = self.leadership.draining
        changed = self.leadership.received_beat(link.node_id, link.hello.boot_id, beat, now)
        if changed or draining != self.leadership.draining:
            self.changed()
        desired, roster = self.leadership.lacks(beat)
        with contextlib.suppress(MlxtpError):
            if desired:
                link.send(self.leadership.desired)
            if roster:
                for members in self.leadership.roster.messages():
                    link.send(members)

    def _prepare(self, node_id: str, order: Prepare) -> None:
        last = max(self.hosted_rank.last_epoch, self.trial_rank.last_epoch)
        no = refusal(node_id, order.epoch, self.leadership.claim, last)
        if no is None and self.node_id in self.leadership.draining:
            no = f"{self.name} is about to stop"
        if no is None and self.supervisor.in_epoch and not order.trial:
            no = f"{self.name} still ends an epoch of its own"
            # The coordinator waited for that epoch's requests. Its order holds, or neither would give in.
            self.supervisor.end_epoch(
                GroupError(f"{self.name_of(node_id)} coordinates and forms a group", Code.REPLANNED)
            )
        if no is not None:
            with contextlib.suppress(MlxtpError):
                trouble = RankTrouble(order.epoch, order.rank, Code.NOT_READY, no, outside=False)
                self.links.send(node_id, trouble)
            return
        self.leadership.saw_epoch(order.epoch)
        self.trial_rank.clear(f"epoch {order.epoch} comes")
        (self.trial_rank if order.trial else self.hosted_rank).received(node_id, order)

    # --- consequences -------------------------------------------------------------------------------

    def changed(self) -> None:
        """Have `live` decide again soon: something is different."""
        self._wake.set()

    def _model_changed(self) -> None:
        self.links.broadcast(self.model.status)
        self.changed()

    def _roster_changed(self) -> None:
        for message in self.leadership.roster.messages():
            self.links.broadcast(message)
        members = self.leadership.roster.members()
        for node_id in list(self.membership.statuses()):
            if node_id not in members and node_id != self.node_id:
                self.membership.removed(node_id)
        for node_id in members:
            if node_id != self.node_id:
                self.membership.admitted(node_id)
        if self.leadership.roster.removed(self.identity.fingerprint):
            self.problem = (
                "this Mac was removed from its cluster; `mlxtp cluster leave`, then "
                "`mlxtp node --join TOKEN` bring it back"
            )
            self.end()
        self.on_roster()
        self.changed()

    def end(self, error: MlxtpError | None = None) -> None:
        """Mark this agent as done, in order or because of `error`."""
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    def _twins(self, what: str) -> None:
        self.problem = (
            f"{what}: a home folder was copied. On the copy, stop mlxtp, remove the folder identity in it "
            "and join again with a new token"
        )
        log.error("%s", self.problem)

    async def live(self) -> None:
        """Beat, judge and decide, until cancelled."""
        beat_at = echo_at = 0.0
        report_at = time.monotonic() + REPORT_S
        self.transfers.report_stored()
        while True:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = max(beat_at + BEAT_S, now)
                self._send_beat()
                if (serving := self.controller.serving()) is not None:
                    self.links.broadcast(serving)
                self.model_switcher.remind()
            if now >= echo_at:
                echo_at = now + ASK_S
                self.round_trips.ask(now)
            if now >= report_at or self.machine.rewired:
                report_at = now + REPORT_S
                self.machine.read_again()
                self.model.retry()
                self.transfers.report_stored()
            self._tick(now)
            self._wake.clear()
            await self._save()  # a change meanwhile sets `_wake`
            wait_s = min(beat_at, max(self._until, now + 0.02)) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, 0.0)):
                    await self._wake.wait()
            await asyncio.sleep(0)

    def _tick(self, now: float) -> None:
        events = self.membership.tick(now)
        for event in events:
            self._notify(event)
        for link in self.links.links():
            if not self.membership.counts(link.number):
                link.close()
        if self.leadership.tick(self.membership, events, now):
            log.info("%s coordinates (term %d)", self.name, self.leadership.claim.term)
            self._send_beat()
        self._decide(now)
        self.forwarding.follow()
        self.transfers.advance()
        self.model_switcher.advance(now)
        self._announce()

    def _send_beat(self) -> None:
        short = self.supervisor.gateway.short
        self.links.broadcast(self.leadership.beat(healthy=self.membership.healthy, short=short))

    def short(self) -> str:
        """Return a Mac that runs a rank of a ready group and is short of memory; empty for none."""
        servings = [self.controller.serving(), *self.peer_info.servings.values()]
        groups = [each.participants for each in servings if each is not None and each.state == Serves.READY]
        short = [node for nodes in groups for node in nodes if node in self.peer_info.short]
        return self.name_of(short[0]) if short else ""

    def _notify(self, event: Change | Duplicate) -> None:
        if isinstance(event, Change):
            level = logging.INFO if event.after is not MemberState.DEAD else logging.WARNING
            log.log(level, "%s is %s: %s", self.name_of(event.node_id), event.after, event.why)
            return
        self._twins(
            f"two agents, at {' and '.join(event.addresses)}, have the identity of "
            f"{self.name_of(event.node_id)}"
        )
        if event.node_id != self.node_id:
            self._doubles[event.node_id] = (event.boot_ids, self.problem)
        for link in self.links.links():
            if link.node_id == event.node_id:
                link.refuse(ProtocolError(self.problem, Code.DUPLICATE_NODE))

    def _announce(self) -> None:
        """Log one line for each group that becomes ready here."""
        supervisor = self.supervisor
        ready = (supervisor.epoch, supervisor.state is Serves.READY)
        if ready != self._announced and ready[1]:
            model = next(iter(supervisor.gateway.models()), None)
            size = supervisor.group.world_size if supervisor.group is not None else 0
            log.info("ready: %s, world size %d, at %s/v1", model.id if model else "-", size, self.http)
        self._announced = ready

    def _decide(self, now: float) -> None:
        situation = self.controller.situation()
        view = self.leadership.view(self.membership, situation, now)
        self.may_leave = may_leave(view)
        action = self.leadership.decide(self.membership, situation, now)
        self._until = now + BEAT_S
        self.waiting = "" if self.leadership.desired.model else NOTHING_WANTED
        self._unplanned = self._why_unplanned(situation, action, now)
        prevented = self.model.problem or self._unplanned
        self.supervisor.wanted = "" if prevented else self.leadership.desired.model
        self._log_reason()
        match action:
            case FormEpoch():
                self.controller.form(action)
            case TryGroup():
                self.controller.try_out(action)
            case StopEpoch(reason, lost):
                if self.hosted_rank.epoch and not self.supervisor.in_epoch:
                    self.hosted_rank.clear(reason)
                else:
                    code = Code.RANK_LOST if lost else Code.REPLANNED
                    self.supervisor.end_epoch(GroupError(reason, code))
            case HandOver(node_id):
                log.info("handing the coordination to %s", self.name_of(node_id))
                self.leadership.hand_over(node_id, now)
                self._send_beat()
            case Wait(reason, until):
                self.waiting = reason
                self._until = min(until, self._until)
        self.supervisor.drain(self._why_draining(view))

    def _why_unplanned(self, situation: Situation, action: Action, now: float) -> str:
        """Return the reason why there is no group for the desired model after every member's report."""
        looked = (self.model.problem or self.model.source is not None) and now >= situation.hold_until
        waits = isinstance(action, Wait) and situation.plan is None and action.reason == situation.refusal
        return situation.refusal if waits and looked and self.leadership.desired.model else ""

    def _log_reason(self) -> None:
        """Log each reason for not serving once. A model that is not here has had its own line."""
        said = (self.leadership.desired.model, re.sub(r"\d+", "", self._unplanned))
        if self.supervisor.in_epoch:
            self._logged_reason = ("", "")
        elif self._unplanned and not self.model.problem and said != self._logged_reason:
            self._logged_reason = said
            log.warning("%s is not served: %s", said[0], self._unplanned)

    def _why_draining(self, view: ClusterView) -> str:
        """Return why this node takes no new requests: it, or a node of its group, is about to stop."""
        if self.node_id in view.draining:
            return ABOUT_TO_STOP
        if who := drained_by(view):
            return f"{' and '.join(map(self.name_of, who))} is about to stop, and the group needs it"
        return ""

    async def _save(self) -> None:
        await self._saving.save(SavedState(self.leadership.persistent_state(), self.peers()))

    def woke(self, slept_s: float) -> None:
        """Recover from sleep: the others have given this machine up, and links report that only later."""
        self.supervisor.woke(slept_s)
        for hosted in (self.hosted_rank, self.trial_rank):
            hosted.clear(f"{self.name} slept for {slept_s:.0f} s")
        for link in self.links.links():
            link.close()
        self.machine.rewired = True
        self.changed()

    def rewired(self) -> None:
        """Read everything again: this machine's addresses changed, so its cables may have, too."""
        self.machine.rewired = True
        self.changed()

    async def read_machine_now(self, nodes: Iterable[str]) -> None:
        """Read this machine again and have the others of `nodes` report theirs, including RDMA ports."""
        await self.machine.read_machine_now(nodes)

    async def close(self) -> None:
        """Send a goodbye on each link, and end what runs here for others."""
        await self.machine.close()
        await self.fabric_bench.close()
        await self.forwarding.close()
        await self.model_switcher.close()
        await self.selection.close()
        await self.controller.close()
        await self.hosted_rank.close()
        await self.trial_rank.close()
        await self.links.close()
        await self.model.close()
        await self.transfers.close()
        await self._save()
        await self._saving.close()


def _retrieved(over: asyncio.Future[None]) -> None:
    """Mark the error as retrieved: it was logged where it came up, and a stopping agent never reads it."""
    if not over.cancelled():
        over.exception()
