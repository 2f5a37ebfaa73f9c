"""This node in the cluster: its links, beats and rounds, and its replica of the shared state.

It knows nothing of models, groups and requests. Other parts register with `links` for messages, with `rounds`
for steps, with `desired` for changed deployments, and with `enrolment` for a changed roster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..background import RepeatFilter
from ..config import Settings
from ..discovery.addresses import Dialing
from ..errors import Code, MlxtpError, ProtocolError, UserError
from ..identity.store import Identity
from ..wire.cluster_messages import MAX_MEMBERS, Beat, Machine, Members, Report, ReportsSent
from ..wire.messages import Error
from .cluster_state import Replica, roster_entries
from .introduction import Introduction, PeerInfo
from .leadership import Debounce, Leadership
from .links import SAID_S, ControlLink, PeerLinks
from .membership import Change, Duplicate, Membership, MemberState
from .state_changes import DesiredDeployments, Enrolment, RosterProofs, restored
from .state_file import SavedState, Saving, load

log = logging.getLogger(__name__)

T = TypeVar("T")


# --- rounds: steps at intervals, and again after each change --------------------------------------------

LEAST_S = 0.02  #: Least seconds between two rounds that only time causes.
LONGEST_S = 0.2  #: Most seconds of a pause for requests after a round, which is as long as the round.
AGAIN_S = 0.5  #: Seconds until the next round if a round's own steps change something.


@dataclass(slots=True)
class _Interval:
    seconds: float
    act: Callable[[float], object]
    at: float
    needed: Callable[[], object]


class Rounds:
    """Runs steps in the order of their addition. `clock` is a monotonic time in seconds.

    A step that raises is logged, and runs again in the next round: after a restart, the agent would find the
    same reports. `cut` ends the links of the member whose report was the cause.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cut: Callable[[str, MlxtpError], None] = lambda _node, _error: None,
    ) -> None:
        self._clock = clock
        self._cut = cut
        self._logged = RepeatFilter(SAID_S)  # the next round may fail for the same reason
        self._intervals: list[_Interval] = []
        self._steps: list[Callable[[float], float | None]] = []
        self._wake = asyncio.Event()

    def every(
        self,
        seconds: float,
        act: Callable[[float], object],
        *,
        first_s: float = 0.0,
        needed: Callable[[], object] = lambda: True,
    ) -> None:
        """Call `act` with the time at this interval, first in `first_s`, while it is `needed`."""
        self._intervals.append(_Interval(seconds, act, self._clock() + first_s, needed))

    def add(self, step: Callable[[float], float | None]) -> None:
        """Call `step` with the time in each round. It may return the time of the next round."""
        self._steps.append(step)

    def wake(self) -> None:
        self._wake.set()

    def attempt(self, act: Callable[[], T], *members: str) -> T | None:
        """Return the result of a step about reports of these `members`; None if it failed."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - the boundary of a step, which `_log` logs
            words = self._log(error)
            for node_id in members:
                self._cut(node_id, ProtocolError(f"its reports cannot be used: {words}", Code.FIELD_INVALID))
        return None

    def _log(self, error: Exception) -> str:
        words = f"{error!r:.300}"
        if self._logged.passes(words):
            log.error("a step of this agent failed, and is tried again: %s", words, exc_info=error)
        return words

    def step(self, now: float) -> float:
        found = [self.attempt(partial(step, now)) for step in self._steps]
        return min((each for each in found if each is not None), default=math.inf)

    def due(self, now: float) -> float:
        """Run due intervals, then all steps. Return the latest time of the next round."""
        self._wake.clear()
        for each in self._intervals:
            if now >= each.at and each.needed():
                following = each.at + each.seconds
                each.at = following if following > now else now + each.seconds
                self.attempt(partial(each.act, now))
        until = max(self.step(now), now + LEAST_S)
        if self._wake.is_set():
            until = min(until, now + AGAIN_S)
            self._wake.clear()
        return min([until, *(each.at for each in self._intervals if each.needed())])

    async def run(self, after: Callable[[], Awaitable[object]]) -> None:
        """Run until cancelled. `after` ends each round; a change during it begins another."""
        while True:
            until, took_s = self.due(began := self._clock()), self._clock() - began
            try:
                await after()
            except Exception as error:  # noqa: BLE001 - as in `attempt`
                self._log(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(until - self._clock(), 0.0)):
                    await self._wake.wait()
            await asyncio.sleep(min(took_s, LONGEST_S))  # let requests run: messages begin rounds


# --- the node -------------------------------------------------------------------------------------------

BEAT_S = 0.5
AT_ONCE = Debounce(settle_s=0.0, settle_most_s=0.0, start_s=0.0)  #: No other Mac can join.

REMOVED = (
    "this Mac was removed from its cluster; "
    "`mlxtp cluster leave`, then `mlxtp node --join TOKEN` bring it back"
)
CROWDED = (
    f"this Mac was let in while another became the last of {MAX_MEMBERS} members, so it has no room; once a "
    "member is removed, `mlxtp cluster leave`, then `mlxtp node --join TOKEN` bring it back"
)


class Gossip:
    """Exchange of replicas: a beat shows what a member lacks. Calls `changed` if the leadership changes."""

    def __init__(
        self,
        links: PeerLinks,
        leadership: Leadership,
        membership: Membership,
        replica: Replica,
        changed: Callable[[], None],
    ) -> None:
        self._links = links
        self._leadership = leadership
        self._membership = membership
        self._replica = replica
        self._changed = changed
        links.on(self._received, Beat)
        # After this beat, a member has all of this node's reports, and may decide.
        links.on_up.insert(0, lambda link: link.send(self._beat()))

    def beat(self) -> None:
        self._links.broadcast(self._beat())

    def _beat(self) -> Beat:
        return self._leadership.beat(healthy=self._membership.health.healthy)

    def _received(self, link: ControlLink, beat: Beat) -> None:
        now = time.monotonic()
        self._membership.beat(link.number, now)
        draining = self._leadership.draining
        changed = self._leadership.received_beat(link.node_id, link.hello.boot_id, beat, now)
        if changed or draining != self._leadership.draining:
            self._changed()
        desired, roster = self._replica.lacks(beat)
        self.send(link, desired=desired, roster=roster)

    def send(self, link: ControlLink, *, desired: bool = True, roster: bool = True) -> None:
        parts = self._replica.deployments.messages() if desired else ()
        with contextlib.suppress(MlxtpError):
            for message in (*parts, *(self._replica.roster.messages() if roster else ())):
                link.send(message)


class ClusterNode:
    """This node, in one event loop; `live` is its main task. Implements `links.LinkGate`.

    `http` is its endpoint's URL; `listens_at` returns its control port's addresses; `home` has its state.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        machine: Machine,
        *,
        home: Path | None = None,
        http: str = "",
        listens_at: Callable[[Machine], tuple[str, ...]] = lambda _machine: (),
    ) -> None:
        now = time.monotonic()
        home = home or settings.home
        kept, trouble = load(home)
        if trouble:
            log.error("%s", trouble)
        self.settings = settings
        self.identity = identity
        self.peer_info = PeerInfo()
        self.introduction = Introduction(
            settings,
            lambda: self.identity,
            http,
            lambda: listens_at(self.links.reports.of(Machine)[self.node_id]),
            lambda: self.replica.roster,
        )
        proofs = RosterProofs(identity)
        calm = None if settings.cluster else AT_ONCE
        self.replica = restored(proofs, identity, self.name, kept.beliefs)
        founder = identity.authority is not None
        self.leadership = Leadership(self.replica, kept.beliefs.claim.term, now, calm, founder=founder)
        others = [node for node in self.replica.roster.members() if node != self.node_id]
        self.membership = Membership(self.node_id, self.boot_id, others, now)
        introduction = self.introduction
        self.links = PeerLinks(self.node_id, introduction.hello, introduction.judge, self)
        self.dialing = Dialing(self.node_id, identity.cluster_id, settings.peers)
        for node_id, addresses in kept.peers.items():
            self.dialing.remember(node_id, addresses)
        self.rounds = Rounds(cut=self.links.cut)
        self.gossip = Gossip(self.links, self.leadership, self.membership, self.replica, self.changed)
        self.links.reports.publish(Machine, machine)
        self.enrolment = Enrolment(proofs, self.replica, self.name_of)
        self.desired = DesiredDeployments(self.replica, self.links, self.changed, self.name_of)
        self._saving = Saving(home, self.links.reports)
        #: Done when this agent must end: as the node is no longer a member, or with a bug's error.
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over.add_done_callback(_retrieved)
        self.enrolment.on_change(self._roster_changed)
        self.enrolment.on_gone(
            self.peer_info.forget_member, introduction.forget_member, self.links.reports.drop_rows
        )
        self.links.on(lambda _link, _report: self.changed(), Report, ReportsSent)
        self.links.on(self.enrolment.received, Members)
        self.links.parting = (
            introduction.roster_for,
            lambda text: self.rounds.attempt(
                lambda: self.enrolment.received(None, Members(roster_entries(text)))
            ),
        )
        self.links.on(introduction.received_error, Error)
        self.rounds.every(BEAT_S, lambda _now: self.gossip.beat(), needed=self.links.nodes)
        self.rounds.add(self._tick)

    # --- queries ------------------------------------------------------------------------------------

    @property
    def node_id(self) -> str:
        return self.identity.node_id

    @property
    def home(self) -> Path:
        return self._saving.home

    @property
    def name(self) -> str:
        return self.introduction.name

    @property
    def boot_id(self) -> str:
        return self.introduction.boot_id

    @property
    def alone(self) -> bool:
        """True for a cluster of one Mac that no other can join."""
        return not self.settings.cluster

    def name_of(self, node_id: str) -> str:
        """Return a node's name at its admission, for users; with its id if two nodes have that name."""
        if node_id == self.node_id:
            return self.name
        names = self.replica.names
        name = names.get(node_id) or self.peer_info.names.get(node_id) or node_id[:8]
        alike = name == self.name or any(each == name for other, each in names.items() if other != node_id)
        return f"{name} ({node_id[:8]})" if alike else name

    # --- changes -------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Broadcast that this node is about to stop, so that other nodes plan without it."""
        self.leadership.drain()
        self.gossip.beat()
        self.changed()

    def changed(self) -> None:
        self.rounds.wake()

    def end(self, error: MlxtpError | None = None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    async def live(self) -> None:
        await self.rounds.run(self.save)

    async def save(self) -> str:
        """Write this node's state, as `Saving.save`."""
        return await self._saving.save(
            SavedState(self.leadership.persistent_state(), self.dialing.remembered())
        )

    async def saved_elsewhere(self) -> list[str]:
        await self.save()
        return await self._saving.elsewhere(lambda: self.replica.roster)

    async def close(self) -> None:
        await self.links.close()
        await self.save()
        await self._saving.close()

    # --- links ---------------------------------------------------------------------------------------

    def opened(self, link: ControlLink) -> bool:
        hello, now = link.hello, time.monotonic()
        if self.replica.roster.members().get(link.node_id) is None:
            try:  # its certificate proves an admission that no member has reported yet
                self.enrolment.admit(hello.node_id, hello.name, link.fingerprint, address=link.remote)
            except UserError as error:
                log.warning("%s", error.detail)
                return False
        self.membership.admitted(link.node_id)
        if not self.membership.link_up(link.number, link.node_id, hello.boot_id, link.remote, now):
            if self.membership.status_of(link.node_id).boot_id != hello.boot_id:
                what = f"another agent has the identity of {hello.name}, or this one was declared dead"
                link.refuse(ProtocolError(f"{what}; if it persists, restart it", Code.DUPLICATE_NODE))
            return False
        self.introduction.met(hello)
        self.peer_info.met(hello, now)
        self.gossip.send(link)
        self.changed()
        return True

    def counts(self, number: int) -> bool:
        self.membership.heard(number, time.monotonic())
        return self.membership.counts(number)

    def closed(self, link: ControlLink, why: str, goodbye: bool) -> None:
        now = time.monotonic()
        if goodbye:
            self.membership.goodbye(link.number, now)
        else:
            self.membership.link_down(link.number, now)
        if link.node_id not in self.links.nodes():
            self.peer_info.drop(link.node_id)
            log.info("the link to %s ended: %s", self.name_of(link.node_id), why)
        self.changed()

    # --- messages ------------------------------------------------------------------------------------

    def _roster_changed(self) -> None:
        roster = self.replica.roster
        self.links.broadcast(*roster.messages())
        surplus = self.node_id in roster.surplus()
        if surplus or roster.removed(self.identity.fingerprint):
            self.introduction.problem = CROWDED if surplus else REMOVED
            self.end()
            return
        members = roster.members()
        for node_id in list(self.membership.statuses()):
            if node_id not in members and node_id != self.node_id:
                self.membership.removed(node_id)
        for node_id in members:
            if node_id != self.node_id:
                self.membership.admitted(node_id)
        self.changed()

    # --- rounds --------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        events = self.membership.tick(now)
        for event in events:
            self._notify(event)
        for link in self.links.links():
            if not self.membership.counts(link.number):
                link.close()
        if self.leadership.tick(self.membership, events, now):
            log.info("%s coordinates (term %d)", self.name, self.leadership.claim.term)
            self.gossip.beat()

    def _notify(self, event: Change | Duplicate) -> None:
        if isinstance(event, Change):
            level = logging.INFO if event.after is not MemberState.DEAD else logging.WARNING
            log.log(level, "%s is %s: %s", self.name_of(event.node_id), event.after, event.why)
            return
        who, at = self.name_of(event.node_id), " and ".join(event.addresses)
        error = self.introduction.doubled(
            event.node_id, event.boot_ids, f"two agents, at {at}, have the identity of {who}"
        )
        self.links.cut(event.node_id, error)


def _retrieved(over: asyncio.Future[None]) -> None:
    """Mark the error as retrieved: it was logged already, and a stopping agent never reads it."""
    if not over.cancelled():
        over.exception()
