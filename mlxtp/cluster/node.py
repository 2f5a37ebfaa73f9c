"""This node among the others: links, beats, what it believes, and what follows from it.

Everything is decided in `cluster/`; here it is heard, said and carried out. `GroupController` forms the
epochs that this node coordinates, `HostedRank` runs a rank of somebody else's, `ForwardingBackend` sends
requests to where rank 0 is.
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
from ..diagnostics.failure_files import FailureFiles
from ..diagnostics.reachability import Reachability
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
from ..wire.base import Message
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
    ReachTold,
    ReachWanted,
    Record,
    RecordsTold,
    RecordsWanted,
    RosterSaved,
    Serving,
    StartRank,
    TokenIssued,
    TokenWanted,
)
from ..wire.codecs import printable
from ..wire.machine import Machine
from ..wire.messages import PROTOCOL_VERSION, Error
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

NOTHING_WANTED = "nothing shall be served; `mlxtp serve MODEL` changes that"
BEAT_S = 0.5
REPORT_S = 10.0
"""How often this machine's memory, addresses and power are read again."""


class NodeLoop:
    """Implements `links.LinkEvents`. Everything runs in one event loop; `live` is its heart."""

    may_leave = False
    """Whether the others can do without this node, once it is about to stop."""
    http = ""
    """Where this node's endpoint is."""
    problem = ""
    """What a person has to mend, such as a copied home folder."""
    waiting = ""
    """Why there is no group yet."""
    _unplanned = ""
    """Why there can be none for what is wanted, however long one waits."""
    _told_why: tuple[str, str] = ("", "")
    """For which model the log says why, and why, without figures: memory comes and goes."""

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
        self.name = printable(settings.name)  # the system's name of a Mac is not ours to refuse
        self.boot_id = secrets.token_hex(8)
        self._versions, self._flags = versions_here(), flags_of(settings)
        self.knowledge = PeerInfo(machines={self.node_id: machine})
        self.listens_at: Callable[[Machine], tuple[str, ...]] = lambda _machine: ()
        self._doubles: dict[str, tuple[tuple[str, ...], str]] = {}
        """By node id: the boot ids of two machines that had it at once, and what was said about it."""
        self.supervisor = supervisor
        self._proofs = RosterProofs(identity)
        self.coordination = self._remembered(kept.beliefs, now)
        others = [node for node in self.coordination.roster.members() if node != self.node_id]
        self.membership = Membership(self.node_id, self.boot_id, others, now)
        self.neighbours = PeerLinks(self.node_id, self.hello, self._judge, self)
        self._saving = Saving(settings.home, self.neighbours.tell_all)
        self.getting = TransferCoordinator(self)
        self.model = LocalModel(
            settings.draft_model, self._model_changed, self.getting.get, settings.model_folders
        )
        self.guest = HostedRank(settings, self.model.folder, self.neighbours.send, worker)
        self.guest.last_epoch = kept.beliefs.epoch
        self.trial_guest = HostedRank(settings, self.model.folder, self.neighbours.send, worker)
        self.machine = MachineReports(self)
        self.conductor = GroupController(self)
        self.fabric = FabricBench(self, self.conductor)
        self.records = FailureFiles(self)
        self.echoes, self.reach = RoundTripTimes(self.node_id, self.neighbours), Reachability(self)
        self.issuing = TokenIssuing(self)
        self.follower = ForwardingBackend(self)
        self.switching = ModelSwitcher(self, lambda: self._unplanned, self.conductor.no_place)
        self.wishes = ModelSelection(self, self.conductor.no_place)
        self.on_roster: Callable[[], None] = lambda: None
        """Called when somebody became a member or is none any more."""
        self.on_gone: Callable[[str], None] = lambda _node_id: None
        """Called with the node id when the last control link to somebody has ended."""
        self.peers: Callable[[], Mapping[str, tuple[str, ...]]] = lambda: kept.peers
        """Where other nodes were reached last."""
        self._wake = asyncio.Event()
        self._announced, self._until = (0, False), 0.0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when this agent has no more to do: this node is no member any more, or a bug, as an error."""
        self.over.add_done_callback(_retrieved)
        self.model.want(self.coordination.desired)

    def _remembered(self, kept: ClusterState, now: float) -> Leadership:
        """Begin with what was kept, signed where this node can, and with this node as a member."""
        identity, beliefs = self.identity, replace(kept, roster=self._proofs.completed(kept.roster))
        found = Leadership(self.node_id, beliefs, now, founder=identity.authority is not None)
        if self.node_id not in found.roster.members():
            found.admit(self.node_id, self.name, identity.fingerprint, self._proofs.own)
        return found

    # --- what is asked ------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others find this agent now: interfaces come and go."""
        return self.listens_at(self.knowledge.machines[self.node_id])

    def hello(self) -> AgentHello:
        """How this node introduces itself."""
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
        """What people call a node."""
        if node_id == self.node_id:
            return self.name
        entry = self.coordination.roster.members().get(node_id)
        return self.knowledge.names.get(node_id) or (entry.name if entry else "") or node_id[:8]

    def measured(self) -> Measured:
        """What placement takes over its assumptions."""
        return self.fabric.measured()

    def coming(self, model: str) -> str:
        """How far a model is on its way to this node, for people; empty when it is not."""
        return self.getting.said(model)

    # --- what people want ----------------------------------------------------------------------------

    def want(self, model: str, nodes: str = "", *, by_person: bool = True) -> DesiredState:
        """What the cluster should run from now on; `by_person`: whatever requests name, unless it is nothing.

        What is wanted already stays as it is, unless its group has failed or a member has not got it: asking
        again tries it again.
        Raises UserError for what no member could say.
        """
        if len(model) > MAX_MODEL or not model.isprintable():
            raise UserError(
                f"a model is called by at most {MAX_MODEL} printable characters, not {model[:200]!r}"
            )
        present = self.coordination.desired
        nodes = nodes or present.nodes
        wanted = (model, nodes, by_person and bool(model))
        there = (present.model, present.nodes, present.pinned)
        lacking = self.model.problem or any(
            told.desired == present.version and told.problem for told in self.knowledge.models.values()
        )
        if wanted == there and self.supervisor.state is not Serves.FAILED and not lacking:
            return present
        desired = self.coordination.want(model, nodes, by_person=by_person)
        self._desire(present, desired)
        return desired

    def remove(self, *node_ids: str) -> None:
        """Take members out. Raises UserError when one is none, or founded the cluster and is another Mac."""
        if (founder := self.coordination.roster.founder()) in node_ids and founder != self.node_id:
            raise UserError(
                f"{self.name_of(founder)} founded this cluster, and no other Mac can remove it; run "
                "`mlxtp cluster leave --force` there"
            )
        for node_id in node_ids:
            log.info("%s removes %s from the cluster", self.name, self.name_of(node_id))
            self.coordination.remove(node_id, self._proofs.removal)
        self._roster_changed()

    async def saved_elsewhere(self) -> list[str]:
        """Return the members whose disks have this node's roster: see `Saving.elsewhere`."""
        await self._save()
        return await self._saving.elsewhere(lambda: self.coordination.roster)

    def drain(self) -> None:
        """This node is about to stop: the others hear it, and plan without it."""
        self.coordination.drain()
        self.may_leave = False
        self._tell_beat()
        self.changed()

    def admit(self, node_id: str, name: str, fingerprint: str, by: str = "", address: str = "") -> None:
        """A new member, by a token that `by` asked for. Raises UserError when it cannot be one."""
        seal = partial(self._proofs.admission, admitted_by=by, address=address, at=int(time.time()))
        self.coordination.admit(node_id, name, fingerprint, seal)
        self._roster_changed()
        how = f", by a token that {self.name_of(by)} asked for" if by else ""
        log.info("%s is a member now%s", name or node_id[:8], how)

    # --- neighbours ----------------------------------------------------------------------------------

    def _judge(self, identity: NodeIdentity, hello: AgentHello) -> MlxtpError | None:
        return self._not_a_member(identity, hello) or self._given_up(hello) or self._unlike(hello)

    def _not_a_member(self, identity: NodeIdentity, hello: AgentHello) -> MlxtpError | None:
        if (identity.node_id, identity.cluster_id) != (hello.node_id, hello.cluster_id):
            return ProtocolError("its certificate names another node than it does", Code.NOT_AUTHENTIC)
        if hello.node_id == self.node_id:
            return self._our_own(hello)
        roster = self.coordination.roster
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
        return ProtocolError(f"{what}. Then start mlxtp anew", Code.DUPLICATE_NODE)

    def _our_own(self, hello: AgentHello) -> MlxtpError:
        """Who has our identity is this agent itself, or a copy of it."""
        if hello.boot_id == self.boot_id:
            return ProtocolError("this is the same node", Code.SAME_NODE)
        self._twins(f"another agent at this moment has the identity of {self.name}")
        return ProtocolError(self.problem, Code.DUPLICATE_NODE)

    def _unlike(self, theirs: AgentHello) -> MlxtpError | None:
        """Why ranks of a node that says this could not compute with ours."""
        ours = self.hello()
        difference = compare(
            Build(ours.version, ours.versions, ours.flags),
            Build(theirs.version, theirs.versions, theirs.flags),
            theirs.name or theirs.node_id[:8],
            self.name,
        )
        return ProtocolError(difference, Code.MISMATCH) if difference else None

    def opened(self, link: ControlLink) -> bool:
        """A peer was welcomed."""
        hello, now = link.hello, time.monotonic()
        if self.coordination.roster.members().get(link.node_id) is None:
            try:  # its certificate says that it was let in; who did has not told us yet
                self.admit(hello.node_id, hello.name, link.fingerprint, address=link.remote)
            except UserError as error:
                log.warning("%s", error.detail)
                return False
        self.membership.admitted(link.node_id)
        if not self.membership.link_up(link.number, link.node_id, hello.boot_id, link.remote, now):
            if self.membership.standing(link.node_id).boot_id != hello.boot_id:
                what = f"another agent has the identity of {hello.name}, or this one was given up"
                link.refuse(ProtocolError(f"{what}; if it persists, restart it", Code.DUPLICATE_NODE))
            return False
        _, what = self._doubles.pop(link.node_id, ((), ""))  # this start of it counts
        if what and self.problem == what:
            self.problem = ""
        knowledge = self.knowledge
        knowledge.names[link.node_id] = hello.name
        knowledge.met_at.setdefault(link.node_id, now)
        knowledge.https[link.node_id] = hello.http
        knowledge.addresses[link.node_id] = hello.addresses
        if hello.authority and self.coordination.roster.founder() in ("", link.node_id):
            knowledge.authority = link.node_id
        with contextlib.suppress(MlxtpError):
            link.send(self.coordination.beat(healthy=self.membership.healthy))
            link.send(self.coordination.desired)
            for members in self.coordination.roster.messages():
                link.send(members)
            link.send(self.machine.report())
            link.send(self.model.status)
            if (serving := self.conductor.serving()) is not None:
                link.send(serving)
            if (turn := self.switching.met()) is not None:
                link.send(turn)
            for word in (*self.fabric.told(), *self.getting.met()):
                link.send(word)
        self.changed()
        return True

    def closed(self, link: ControlLink, why: str, goodbye: bool) -> None:
        """A link has ended."""
        now = time.monotonic()
        if goodbye:
            self.membership.goodbye(link.number, now)
        else:
            self.membership.link_down(link.number, now)
        if link.node_id not in self.neighbours.nodes():
            self.knowledge.forget(link.node_id)
            self.machine.reported(link.node_id)
            self.conductor.lost(link.node_id, why)
            self.guest.lost(link.node_id)
            self.trial_guest.lost(link.node_id)
            self.on_gone(link.node_id)
            self.fabric.lost(link.node_id)
            self.records.lost(link.node_id)
            self.reach.lost(link.node_id)
            self.getting.lost(link.node_id)
            log.info("the link to %s ended: %s", self.name_of(link.node_id), why)
        self.changed()

    def received(self, link: ControlLink, message: Message) -> None:
        """A peer said something."""
        node_id = link.node_id
        if not self.membership.counts(link.number):
            return
        match message:
            case Beat():
                self._beat(link, message)
            case Echo():
                self.echoes.received(link, message, time.monotonic())
            case DesiredState():
                before = self.coordination.desired
                if self.coordination.desires(message):
                    self._desire(before, message)
            case Members():
                self._enrol(node_id, message)
            case MachineReport() | ModelStatus() | Serving():
                self._learn(node_id, message)
            case Prepare():
                self._prepare(node_id, message)
            case StartRank() | EndEpoch() | RankGathered():
                if isinstance(message, EndEpoch) and not message.in_order:
                    self.machine.look_again()
                of_trial = message.epoch == self.trial_guest.epoch
                (self.trial_guest if of_trial else self.guest).received(node_id, message)
            case Prepared() | RankStarted() | RankPong() | RankTrouble() | EpochEnded() | RankSide():
                self.conductor.received(node_id, message)
            case _:
                self._about_commands(node_id, message)

    def _about_commands(self, node_id: str, message: Message) -> None:
        """What somebody typed on one Mac and another one has to do, and complaints."""
        match message:
            case MachineWanted():
                self.machine.wanted(node_id)
            case TokenWanted() | TokenIssued():
                self.issuing.received(node_id, message)
            case ModelTurn() | ModelQueue():
                self.switching.received(node_id, message, time.monotonic())
            case FabricWanted() | FabricReport() | FabricAnswer():
                self.fabric.received(node_id, message)
            case ModelHeld() | ModelLender() | ModelPull() | ModelsHere():
                self.getting.received(node_id, message)
            case RosterSaved():
                self._saving.received(node_id, message)
            case RecordsWanted() | Record() | RecordsTold():
                self.records.received(node_id, message)
            case ReachWanted() | ReachTold():
                self.reach.received(node_id, message)
            case Error() if message.code == Code.DUPLICATE_NODE and message.detail != self.problem:
                self.problem = message.detail
                log.error("%s: %s", self.name_of(node_id), message.detail)

    def _desire(self, before: DesiredState, desired: DesiredState) -> None:
        if (desired.model, desired.nodes) == (before.model, before.nodes):
            self.conductor.still_wanted(before, desired)
        if desired.model != before.model:
            why = f"{desired.model} is wanted now" if desired.model else f"{before.model} was unloaded"
            self.supervisor.gateway.suspend(GroupError(why, Code.SHUTTING_DOWN))
        self.model.want(desired)
        self.neighbours.tell_all(desired)
        self.changed()

    def _enrol(self, node_id: str, members: Members) -> None:
        full = self.coordination.overfull
        before = self.coordination.roster
        if self.coordination.enrols(self._proofs.proven(members.entries, before)):
            for entry in self.coordination.roster.entries:
                if entry.removed and not before.removed(entry.fingerprint):
                    by = self.coordination.roster.by_key(remover_of(entry))
                    log.info("%s removed %s", self.name_of(by.node_id) if by else "a member", entry.name)
            self._roster_changed()
        if self.coordination.overfull and not full:
            log.warning(
                "%s tells of more than %d members; those beyond are left out",
                self.name_of(node_id),
                MAX_MEMBERS,
            )

    def _learn(self, node_id: str, message: MachineReport | ModelStatus | Serving) -> None:
        match message:
            case MachineReport():
                self.knowledge.machines[node_id] = message
                self.machine.reported(node_id)
            case ModelStatus():
                self.knowledge.models[node_id] = message
            case Serving():
                self.knowledge.servings[node_id] = message
                self.coordination.saw_epoch(message.epoch)
                if (node_id, message.epoch) == (self.trial_guest.host, self.trial_guest.epoch):
                    self.guest, self.trial_guest = self.trial_guest, self.guest  # its group serves now
                    why = f"{self.name_of(node_id)} serves as epoch {message.epoch}"
                    self.trial_guest.clear(why)
                    self.supervisor.end_epoch(GroupError(why, Code.REPLANNED))
                if node_id == self.guest.host and message.epoch > self.guest.epoch:
                    self.guest.clear(f"its host is at epoch {message.epoch}")
        self.changed()

    def _beat(self, link: ControlLink, beat: Beat) -> None:
        now = time.monotonic()
        self.membership.beat(link.number, now)
        if beat.short:
            self.knowledge.short.add(link.node_id)
        else:
            self.knowledge.short.discard(link.node_id)
        draining = self.coordination.draining
        anew = self.coordination.heard(link.node_id, link.hello.boot_id, beat, now)
        if anew or draining != self.coordination.draining:
            self.changed()
        desired, roster = self.coordination.lacks(beat)
        with contextlib.suppress(MlxtpError):
            if desired:
                link.send(self.coordination.desired)
            if roster:
                for members in self.coordination.roster.messages():
                    link.send(members)

    def _prepare(self, node_id: str, order: Prepare) -> None:
        last = max(self.guest.last_epoch, self.trial_guest.last_epoch)
        no = refusal(node_id, order.epoch, self.coordination.claim, last)
        if no is None and self.node_id in self.coordination.draining:
            no = f"{self.name} is about to stop"
        if no is None and self.supervisor.in_epoch and not order.trial:
            no = f"{self.name} still ends an epoch of its own"
            # The coordinator waited for the requests of that one. Its word holds, or neither would give in.
            self.supervisor.end_epoch(
                GroupError(f"{self.name_of(node_id)} coordinates and forms a group", Code.REPLANNED)
            )
        if no is not None:
            with contextlib.suppress(MlxtpError):
                trouble = RankTrouble(order.epoch, order.rank, Code.NOT_READY, no, outside=False)
                self.neighbours.send(node_id, trouble)
            return
        self.coordination.saw_epoch(order.epoch)
        self.trial_guest.clear(f"epoch {order.epoch} comes")
        (self.trial_guest if order.trial else self.guest).received(node_id, order)

    # --- what follows --------------------------------------------------------------------------------

    def changed(self) -> None:
        """Something is different: look at everything again, soon."""
        self._wake.set()

    def _model_changed(self) -> None:
        self.neighbours.tell_all(self.model.status)
        self.changed()

    def _roster_changed(self) -> None:
        for message in self.coordination.roster.messages():
            self.neighbours.tell_all(message)
        members = self.coordination.roster.members()
        for node_id in list(self.membership.standings()):
            if node_id not in members and node_id != self.node_id:
                self.membership.removed(node_id)
        for node_id in members:
            if node_id != self.node_id:
                self.membership.admitted(node_id)
        if self.coordination.roster.removed(self.identity.fingerprint):
            self.problem = (
                "this Mac was removed from its cluster; `mlxtp cluster leave`, then "
                "`mlxtp node --join TOKEN` bring it back"
            )
            self.end()
        self.on_roster()
        self.changed()

    def end(self, error: MlxtpError | None = None) -> None:
        """This agent has no more to do, in order or because of `error`."""
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
        """Beat, judge, decide, until cancelled."""
        beat_at = echo_at = 0.0
        report_at = time.monotonic() + REPORT_S
        self.getting.look_at_disk()
        while True:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = max(beat_at + BEAT_S, now)
                self._tell_beat()
                if (serving := self.conductor.serving()) is not None:
                    self.neighbours.tell_all(serving)
                self.switching.remind()
            if now >= echo_at:
                echo_at = now + ASK_S
                self.echoes.ask(now)
            if now >= report_at or self.machine.rewired:
                report_at = now + REPORT_S
                self.machine.look_again()
                self.model.look_again()
                self.getting.look_at_disk()
            self._tick(now)
            self._wake.clear()
            await self._save()  # what changes meanwhile wakes
            wait_s = min(beat_at, max(self._until, now + 0.02)) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, 0.0)):
                    await self._wake.wait()
            await asyncio.sleep(0)

    def _tick(self, now: float) -> None:
        events = self.membership.tick(now)
        for event in events:
            self._tell(event)
        for link in self.neighbours.links():
            if not self.membership.counts(link.number):
                link.close()
        if self.coordination.tick(self.membership, events, now):
            log.info("%s coordinates (term %d)", self.name, self.coordination.claim.term)
            self._tell_beat()
        self._decide(now)
        self.follower.look()
        self.getting.look()
        self.switching.look(now)
        self._announce()

    def _tell_beat(self) -> None:
        short = self.supervisor.gateway.short
        self.neighbours.tell_all(self.coordination.beat(healthy=self.membership.healthy, short=short))

    def short(self) -> str:
        """A Mac whose rank works on what is asked here and that is short of memory; empty for none."""
        servings = [self.conductor.serving(), *self.knowledge.servings.values()]
        groups = [each.participants for each in servings if each is not None and each.state == Serves.READY]
        short = [node for nodes in groups for node in nodes if node in self.knowledge.short]
        return self.name_of(short[0]) if short else ""

    def _tell(self, event: Change | Duplicate) -> None:
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
        for link in self.neighbours.links():
            if link.node_id == event.node_id:
                link.refuse(ProtocolError(self.problem, Code.DUPLICATE_NODE))

    def _announce(self) -> None:
        """One line for each group that answers here."""
        supervisor = self.supervisor
        ready = (supervisor.epoch, supervisor.state is Serves.READY)
        if ready != self._announced and ready[1]:
            model = next(iter(supervisor.gateway.models()), None)
            size = supervisor.group.world_size if supervisor.group is not None else 0
            log.info("ready: %s, world size %d, at %s/v1", model.id if model else "-", size, self.http)
        self._announced = ready

    def _decide(self, now: float) -> None:
        situation = self.conductor.situation()
        view = self.coordination.view(self.membership, situation, now)
        self.may_leave = may_leave(view)
        action = self.coordination.decide(self.membership, situation, now)
        self._until = now + BEAT_S
        self.waiting = "" if self.coordination.desired.model else NOTHING_WANTED
        self._unplanned = self._why_unplanned(situation, action, now)
        prevented = self.model.problem or self._unplanned
        self.supervisor.wanted = "" if prevented else self.coordination.desired.model
        self._tell_why()
        match action:
            case FormEpoch():
                self.conductor.form(action)
            case TryGroup():
                self.conductor.try_out(action)
            case StopEpoch(reason, lost):
                if self.guest.epoch and not self.supervisor.in_epoch:
                    self.guest.clear(reason)
                else:
                    code = Code.RANK_LOST if lost else Code.REPLANNED
                    self.supervisor.end_epoch(GroupError(reason, code))
            case HandOver(node_id):
                log.info("%s shall coordinate", self.name_of(node_id))
                self.coordination.hand_over(node_id, now)
                self._tell_beat()
            case Wait(reason, until):
                self.waiting = reason
                self._until = min(until, self._until)
        self.supervisor.drain(self._why_draining(view))

    def _why_unplanned(self, situation: Situation, action: Action, now: float) -> str:
        """Why there is no group for what is wanted although everybody has looked for it."""
        looked = (self.model.problem or self.model.source is not None) and now >= situation.hold_until
        waits = isinstance(action, Wait) and situation.plan is None and action.reason == situation.refusal
        return situation.refusal if waits and looked and self.coordination.desired.model else ""

    def _tell_why(self) -> None:
        """One line for each reason why nothing comes; a model that is not here has had its own."""
        said = (self.coordination.desired.model, re.sub(r"\d+", "", self._unplanned))
        if self.supervisor.in_epoch:
            self._told_why = ("", "")
        elif self._unplanned and not self.model.problem and said != self._told_why:
            self._told_why = said
            log.warning("%s is not served: %s", said[0], self._unplanned)

    def _why_draining(self, view: ClusterView) -> str:
        """Why this node takes no new requests: it, or a rank of its group, is about to stop."""
        if self.node_id in view.draining:
            return ABOUT_TO_STOP
        if who := drained_by(view):
            return f"{' and '.join(map(self.name_of, who))} is about to stop, and the group needs it"
        return ""

    async def _save(self) -> None:
        await self._saving.save(SavedState(self.coordination.kept(), self.peers()))

    def woke(self, slept_s: float) -> None:
        """This machine slept: the others have given it up meanwhile, and their links say so only later."""
        self.supervisor.woke(slept_s)
        for guest in (self.guest, self.trial_guest):
            guest.clear(f"{self.name} slept for {slept_s:.0f} s")
        for link in self.neighbours.links():
            link.close()
        self.machine.rewired = True
        self.changed()

    def rewired(self) -> None:
        """This machine's addresses changed: its cables may have, too."""
        self.machine.rewired = True
        self.changed()

    async def look_now(self, nodes: Iterable[str]) -> None:
        """Read this machine again and have the others of `nodes` report theirs, ports of RDMA among it."""
        await self.machine.look_now(nodes)

    async def close(self) -> None:
        """Say goodbye and end what runs here for others."""
        await self.machine.close()
        await self.fabric.close()
        await self.records.close()
        await self.reach.close()
        await self.follower.close()
        await self.switching.close()
        await self.wishes.close()
        await self.conductor.close()
        await self.guest.close()
        await self.trial_guest.close()
        await self.neighbours.close()
        await self.model.close()
        await self.getting.close()
        await self._save()
        await self._saving.close()


def _retrieved(over: asyncio.Future[None]) -> None:
    """The error was logged where it came up; who stops the agent meanwhile never asks for it."""
    if not over.cancelled():
        over.exception()
