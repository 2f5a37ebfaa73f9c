"""All groups that an agent knows, orders of other owners (`OtherOwners`), and the agent's orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_

from ..api.admin import Json
from ..api.backend import COMING
from ..background import Background
from ..cluster.cluster_state import DeploymentTable
from ..cluster.links import ControlLink
from ..cluster.node import BEAT_S, ClusterNode
from ..cluster.reconcile import lost, refusal
from ..errors import Code, GroupError, MlxtpError, UserError
from ..gateway.gateway import Gateway
from ..wire.cluster_messages import GroupAssignment, MemoryShortage, Prepare, RankTrouble, Serving
from .group import Group
from .health import SERVES, ServingState
from .history import MOST, EpochStory, RecoveryMetrics
from .hosted_rank import HostedRanks

log = logging.getLogger(__name__)

ABOUT_TO_STOP = "this Mac is about to stop"


class Groups:
    """Groups by id, made by `make`. The group with the empty id is shown while there is no other."""

    def __init__(
        self, node: ClusterNode, gateway: Gateway, hosted: HostedRanks, make: Callable[[str], Group]
    ) -> None:
        self.by_id: dict[str, Group] = {}
        #: Epochs of forgotten groups, with the group's id, the newest last.
        self.past: deque[tuple[str, EpochStory]] = deque(maxlen=MOST)
        self.recoveries = RecoveryMetrics()  #: For all groups that this agent owned.
        self._node = node
        self._gateway = gateway
        self._hosted = hosted
        self._make = make
        self._none = self._made("")
        self._live = self._closing = False
        self._background = Background()
        gateway.admission.elsewhere = lambda: short_of_memory(node, self.reports())
        gateway.deployments.coming = lambda name: any(
            each.scope.assignment.owner and each.supervisor.status.state in COMING
            for each in self.replicas_of(name)
        )
        gateway.deployments.order = lambda: [row.name for row in node.desired.table.live()]
        self._others = OtherOwners(node, hosted, self)
        node.links.on_up(lambda _link: self._broadcast())
        node.desired.on_change(self._desired)
        node.desired.retry_if(self._has_failed)
        node.rounds.every(BEAT_S, lambda _now: self._broadcast(), needed=node.links.nodes)

    # --- queries -------------------------------------------------------------------------------------

    def replicas_of(self, deployment: str) -> list[Group]:
        found = [each for each in self.by_id.values() if each.scope.deployment == deployment]
        return sorted(found, key=lambda group: group.scope.index)

    @property
    def shown(self) -> Group:
        """The group that stands for this agent: the first deployment's `best`."""
        for row in self._node.desired.table.live():
            if groups := self.replicas_of(row.name):
                return best(groups)
        ending = [each for each in self.by_id.values() if each.supervisor.status.in_epoch]
        return ending[0] if ending else self._none

    def reports(self) -> list[Serving]:
        mine = [each.scope.serving() for each in self.by_id.values()]
        return [
            *(each for each in mine if each is not None),
            *(each for _, each in self._node.links.reports.others(Serving)),
        ]

    def held_bytes(self, node_id: str) -> int:
        return sum(group.scope.held_bytes(node_id) for group in self.by_id.values())

    @property
    def in_epoch(self) -> bool:
        return any(each.supervisor.status.in_epoch for each in self.by_id.values())

    @property
    def may_leave(self) -> bool:
        """True once all groups that can move away have moved. Ignores requests of this node's own clients."""
        here = self._node.node_id
        owned = [each for each in self.by_id.values() if each.supervisor.status.in_epoch]
        kept = all(each.scope.owned and here in each.scope.assignment.leaving for each in owned)
        return kept and self._others.may_leave()

    # --- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._live = True
        for group in self.by_id.values():
            group.start()
        self.sync()

    def sync(self) -> None:
        """Add the groups of all deployments, and forget groups that are over."""
        for row in self._node.desired.table.live():
            for index in range(self._node.replica.shown_groups(row)):
                self.known(f"{row.name}#{index}")
        for owner, serving in self._node.links.reports.others(Serving):
            if serving.group:
                self._node.rounds.attempt(partial(self.known, serving.group), owner)
        for name in [name for name, each in self.by_id.items() if each.over]:
            over = self.by_id.pop(name)
            history = over.supervisor.status.history
            history.ended(time.monotonic())  # reports of a group elsewhere just cease
            self.past.extend((name, each) for each in reversed(history.stories))
            self._background.start(over.close(), f"the end of group {name}")
        self._gateway.deployments.keep(self.by_id, {each.scope.deployment for each in self.by_id.values()})

    def known(self, name: str) -> Group:
        """Return the group of an id; make it if necessary."""
        if (group := self.by_id.get(name)) is None:
            group = self.by_id[name] = self._made(name)
            if self._live:
                group.start()
        return group

    def _made(self, name: str) -> Group:
        group = self._make(name)
        group.supervisor.status.recoveries.metrics = self.recoveries
        return group

    def decide(self, now: float) -> float:
        """Decide and act for each group. Return the time of the next decision, if nothing changes."""
        self._others.end_lost()
        if self._closing:
            return math.inf
        self.sync()
        self._gateway.closing = ABOUT_TO_STOP if self._node.node_id in self._node.leadership.draining else ""
        if self.shown is self._none:
            self._none.decide(now)
        until = math.inf
        for group in list(self.by_id.values()):
            owners = [owner for owner, _ in group.scope.reports()]
            found = self._node.rounds.attempt(partial(group.decide, now), *owners)
            until = until if found is None else min(until, found)
        return until

    def woke(self, slept_s: float) -> None:
        """End what other nodes gave up while this Mac slept, before links report it."""
        for group in self.by_id.values():
            group.supervisor.woke(slept_s)
        self._hosted.clear(f"{self._node.name} slept for {slept_s:.0f} s")
        for link in self._node.links.links():
            link.close()
        self._node.changed()

    async def close(self) -> None:
        """End all groups in order, and refuse waiting requests. No group starts after this."""
        self._live, self._closing = False, True
        self._gateway.closing = ABOUT_TO_STOP
        self._node.changed()
        for name, group in self.by_id.items():
            self._background.start(group.close(), f"the end of group {name}")
        while self._background.tasks:
            await asyncio.wait(self._background.tasks)

    # --- messages ------------------------------------------------------------------------------------

    def assign(self, assignment: GroupAssignment) -> None:
        self.known(assignment.group).scope.assignment = assignment
        self._node.changed()

    def _broadcast(self) -> None:
        for group in self.by_id.values():
            group.scope.broadcast()

    def _desired(self, before: DeploymentTable, after: DeploymentTable) -> None:
        for row in before.live():
            if after.get(row.name) is None:
                self._gateway.fail(row.name, GroupError(f"{row.model} was unloaded", Code.SHUTTING_DOWN))
                for group in self.replicas_of(row.name):
                    group.supervisor.status.recoveries.rested()
        self.sync()

    def _has_failed(self, model: str) -> bool:
        return any(
            group.supervisor.status.state is ServingState.FAILED and group.scope.model.name == model
            for group in self.by_id.values()
        )


def best(groups: Sequence[Group]) -> Group:
    """Return the group that stands for a deployment: a serving group, if there is one."""

    def place(group: Group) -> tuple[bool, bool, int]:
        status = group.supervisor.status
        return status.state not in SERVES, not status.in_epoch, group.scope.index

    return min(groups, key=place)


def group_of(groups: Groups, deployment: str) -> Group:
    """Return the `best` group of a deployment, by default of the first. Raises UserError if not deployed."""
    if not deployment:
        return groups.shown
    if not (found := groups.replicas_of(deployment)):
        raise UserError(f"{deployment} is not deployed; `mlxtp status` shows the models that are")
    return best(found)


def unused_s(reports: Sequence[Serving], deployment: str) -> int | None:
    """Return the seconds since a deployment's last request; 0 while one is open, None if no group serves."""
    found = (each for each in reports if each.deployment == deployment)
    return min((each.idle_s for each in found if each.state in SERVES), default=None)


def short_of_memory(node: ClusterNode, reports: Sequence[Serving]) -> str:
    """Return the name of a Mac that runs a rank of a ready group and is short of memory, or empty."""
    groups = [each.participants for each in reports if each.state == ServingState.READY]
    told = dict(node.links.reports.others(MemoryShortage))
    short = [node_id for nodes in groups for node_id in nodes if node_id in told]
    return node.name_of(short[0]) if short else ""


# --- orders and reports of agents that own groups -------------------------------------------------------


class OtherOwners:
    """Receiver of orders and reports from owners of groups on other Macs."""

    def __init__(self, node: ClusterNode, hosted: HostedRanks, groups: Groups) -> None:
        self._node = node
        self._hosted = hosted
        self._groups = groups
        node.links.on(self._prepare, Prepare)
        node.links.reports.on(self._serving, Serving)

    def end_lost(self) -> None:
        for rank in self._hosted.ranks:
            how = lost(self._node.membership.status_of(rank.host), rank.host_boot)
            if how is not None:
                why = f"epoch {rank.order.epoch} lost {self._node.name_of(rank.host)} (rank 0): {how}"
                self._hosted.clear(why, partial(is_, rank))

    def may_leave(self) -> bool:
        table = self._node.links.reports
        reports = [table.of(Serving, rank.order.group).get(rank.host) for rank in self._hosted.ranks]
        return all(
            each is not None and each.state == "draining" and not each.open_requests for each in reports
        )

    def _serving(self, node_id: str, serving: Serving) -> None:
        self._node.replica.saw_epoch(serving.epoch)
        self._hosted.serves(node_id, serving.group, serving.epoch)

    def _end_elsewhere(self, owner: str, name: str, why: str) -> None:
        """End the ranks here of a group's earlier owners, this node among them."""
        self._hosted.clear(why, lambda rank: rank.order.group == name and rank.host != owner)
        if (group := self._groups.by_id.get(name)) is not None:
            group.supervisor.end_epoch(GroupError(why, Code.REPLANNED))

    def _prepare(self, link: ControlLink, order: Prepare) -> None:
        node, node_id = self._node, link.node_id
        group = self._groups.by_id.get(order.group)
        forms = f"{node.name_of(node_id)} forms epoch {order.epoch}"
        assignee = group.scope.assignment.owner if group is not None else ""
        if not node.membership.status_of(assignee).present:  # the next assignment is still on its way
            assignee = ""
        no = refusal(node_id, order.epoch, assignee, self._hosted.last_epoch(node_id))
        if no is None and node.node_id in node.leadership.draining:
            no = f"{node.name} is about to stop"
        if no is None and group is not None and group.supervisor.status.in_epoch:
            no = f"{node.name} still ends an epoch of its own"
            # The coordinator assigned the group to another owner. One of the two has to give in.
            self._end_elsewhere(node_id, order.group, forms)
        if no is not None:
            with contextlib.suppress(MlxtpError):
                link.send(RankTrouble(order.epoch, order.rank, Code.NOT_READY, no, outside=False))
            return
        node.replica.saw_epoch(order.epoch)
        self._end_elsewhere(node_id, order.group, forms)
        self._hosted.received(node_id, order)


# --- orderly end ----------------------------------------------------------------------------------------


LOOK_S = 0.1  #: Seconds between a drain's checks for open requests.
NEWS_S = 1.0  #: Seconds after which a client that watches a drain gets a reply without news.


class Drain:
    """Orderly end of an agent: take no new requests, finish open ones, and set `over` once it may leave."""

    def __init__(
        self, node: ClusterNode, gateway: Gateway, groups: Groups, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.over = asyncio.Event()
        self._node = node
        self._gateway = gateway
        self._groups = groups
        self._clock = clock
        self._until: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def begun(self) -> bool:
        return self._looking is not None

    @property
    def left_s(self) -> float | None:
        """Seconds that open requests may still take; None for no limit."""
        return None if self._until is None else max(self._until - self._clock(), 0.0)

    def start(self, within_s: float | None = None) -> None:
        """Start to drain, for at most `within_s` seconds; of several calls, the earliest deadline holds."""
        if within_s is not None:
            until = self._clock() + within_s
            self._until = until if self._until is None else min(until, self._until)
        limit = "" if self._until is None else f", {self.left_s:.0f} s at most"
        log.info("draining: open requests: %d%s", self._gateway.open_requests, limit)
        if self._looking is not None:
            return
        self._gateway.closing = ABOUT_TO_STOP
        self._node.drain()
        self._looking = asyncio.ensure_future(self._check())

    async def _check(self) -> None:
        before = None
        while not self._finished():
            if before != (before := self._gateway.open_requests):
                self._announce()
            await asyncio.sleep(LOOK_S)
        self.over.set()
        self._announce()

    def _finished(self) -> bool:
        left = self._gateway.open_requests
        if self.left_s == 0.0:
            log.info("the time to drain is over; open requests: %d", left)
            return True
        if left or not self._groups.may_leave:
            return False
        log.info("drained")
        return True

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def drain_progress(self) -> Json:
        """Return `now` once open requests change, or after NEWS_S."""
        if not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await self._news.wait()
        return self.now()

    def now(self) -> Json:
        return {
            "draining": self.begun,
            "over": self.over.is_set(),
            "open_requests": self._gateway.open_requests,
            "left_s": self.left_s,
        }

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
