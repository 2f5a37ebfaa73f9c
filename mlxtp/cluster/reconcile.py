"""Decision on the coordinator's next action, and on the orders that other nodes may refuse. Pure.

`decide` maps one `ClusterView` to one action; the same view always gives the same action. Only the
coordinator forms epochs. Rank 0 of an epoch is its owner. A node that loses the coordination keeps the epoch
that it owns running until the new coordinator has decided. So a partition that heals interrupts no request
without need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .cluster_state import LeaderClaim
from .deployments import DesiredState
from .membership import MemberState, MemberStatus

MUCH = 1.05  #: Factor by which a plan must be better to count as better: measurements waver by a few percent.


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Node ids in rank order, and the key for comparing plans: the first number that differs much decides.

    `backend` is "none", "ring" or "jaccl". `proven`: this group has formed and proved itself before.
    """

    ranks: tuple[str, ...]
    key: tuple[float, ...]
    backend: str = ""
    proven: bool = True


@dataclass(frozen=True, slots=True)
class RunningEpoch:
    """Existing epoch. `boots` are the boot ids its participants had, in rank order.

    `model` and `desired` (a version) are what it was formed for. `boots` may be empty for an epoch that
    another node owns. `draining`: it takes no new requests, and ends with its last one. `backend` as in
    `GroupPlan`.
    """

    number: int
    ranks: tuple[str, ...]
    boots: tuple[str, ...]
    key: tuple[float, ...]
    model: str
    desired: int
    ready: bool
    open_requests: int = 0
    draining: bool = False
    backend: str = ""

    @property
    def owner(self) -> str:
        """Node id of rank 0."""
        return self.ranks[0]

    def serves(self, desired: DesiredState) -> bool:
        """Return True when this epoch serves the desired state."""
        return (self.model, self.desired) == (desired.model, desired.version)


@dataclass(frozen=True, slots=True)
class NoAction:
    """Do nothing: all is as it should be, or another node decides."""


@dataclass(frozen=True, slots=True)
class FormEpoch:
    """Form epoch `number` of these nodes; `boots` are their boot ids, in rank order."""

    number: int
    plan: GroupPlan
    boots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TryGroup:
    """Form this group as epoch `number` beside the serving one, see it prove itself, and end it again."""

    number: int
    plan: GroupPlan


@dataclass(frozen=True, slots=True)
class StopEpoch:
    """End the epoch that this node owns or takes part in. `lost`: the node that it needs and that is gone."""

    reason: str
    lost: str = ""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let this node coordinate."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait: decide again at `until`, or when something changes. `for_requests`: some are still open."""

    reason: str
    until: float = math.inf
    for_requests: bool = False


Action = NoAction | FormEpoch | TryGroup | StopEpoch | HandOver | Wait


@dataclass(frozen=True, slots=True)
class Situation:
    """Inputs of a decision that groups and requests have.

    running        the epoch this node owns or takes part in
    others         the epochs of others, each as its owner reports it
    plan           the best one for the members that are present and stay; None for the reason in `refusal`
    hold_until     when an epoch may be formed again after some that failed, and `hold` why
    """

    running: RunningEpoch | None = None
    others: Sequence[RunningEpoch] = ()
    plan: GroupPlan | None = None
    refusal: str = ""
    hold_until: float = 0.0
    hold: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView(Situation):
    """All inputs of a decision. Times are of the caller's clock, in seconds.

    epoch          the highest number of an epoch so far
    unsynced       members that are present and have not yet reported their state
    settled_at     from when on the membership counts as calm
    flapping       when each member that was lost a while ago may be relied on again
    waiting_since  since when a decision has waited for open requests to end
    patience_s     how long it may
    draining       the nodes that are about to stop, this node perhaps among them
    """

    now: float
    self_id: str
    leading: bool
    claim: LeaderClaim
    statuses: Mapping[str, MemberStatus]
    desired: DesiredState
    epoch: int = 0
    unsynced: Sequence[str] = ()
    settled_at: float = 0.0
    flapping: Mapping[str, float] = field(default_factory=dict)
    waiting_since: float | None = None
    patience_s: float = 10.0
    names: Mapping[str, str] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()

    def name(self, node_id: str) -> str:
        """Return the name of a node, for users."""
        return self.names.get(node_id) or node_id[:8]

    def boot_id(self, node_id: str) -> str:
        status = self.statuses.get(node_id)
        return status.boot_id if status else ""

    def present(self, node_id: str) -> bool:
        status = self.statuses.get(node_id)
        return status is not None and status.present


def better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True when the first of two keys is clearly better. Their numbers are not negative.

    Another version may compare by more numbers: those that both have count.
    """
    for mine, theirs in zip(one, other, strict=False):
        if mine > theirs * MUCH:
            return True
        if theirs > mine * MUCH:
            return False
    return False


def decide(view: ClusterView) -> Action:
    """Return this node's next action."""
    mine = view.running
    if mine is not None and (stop := _lost(view, mine)):
        return stop
    if mine is not None and mine.owner == view.self_id and (reason := _unwanted(view, mine)):
        return StopEpoch(reason)
    if not view.leading:
        return _follow(view)
    if mine is not None and mine.owner == view.self_id:
        return _improve(view, mine)
    return _form(view)


def drained_by(view: ClusterView) -> tuple[str, ...]:
    """Return the nodes about to stop in this node's own epoch, which then takes no new requests."""
    mine = view.running
    if mine is None or mine.owner != view.self_id:
        return ()
    return tuple(node_id for node_id in mine.ranks if node_id in view.draining)


def may_leave(view: ClusterView) -> bool:
    """Return True when a stopping node may leave; requests of its own clients are not considered.

    If a group is possible without it, it waits until it coordinates none and has no rank in any. Otherwise
    the group that needs its rank goes on until its last request is done.
    """
    mine = view.running
    if view.leading and view.plan is not None:
        return False
    if mine is None or mine.owner == view.self_id:
        return True
    theirs = [other for other in view.others if other.number == mine.number]
    return all(other.draining and not other.open_requests for other in theirs) and bool(theirs)


def refusal(sender: str, number: int, claim: LeaderClaim, joined: int) -> str | None:
    """Return the reason for not taking part in epoch `number`, ordered by `sender`; None to take part.

    `claim` is the one this node follows. `joined` is its last epoch of that sender.
    """
    if sender != claim.node_id:
        who = f"{claim.node_id[:8]} coordinates" if claim.node_id else "no node coordinates yet"
        return f"epoch {number} comes from {sender[:8]}, but {who} (term {claim.term})"
    if number <= joined:
        return f"epoch {number} is not newer than epoch {joined}, which this node was part of"
    return None


def _lost(view: ClusterView, mine: RunningEpoch) -> StopEpoch | None:
    """Return the end of an epoch that a participant has left.

    The owner checks every rank; the others check only the owner.
    """
    watched = range(len(mine.ranks)) if mine.owner == view.self_id else range(1)
    for rank in watched:
        node_id = mine.ranks[rank]
        if not view.present(node_id):
            status = view.statuses.get(node_id)
            state = status.state if status else MemberState.AWAY
            how = "its link broke" if state is MemberState.SUSPECT else f"it is {state}"
        elif view.boot_id(node_id) != mine.boots[rank]:
            how = "its agent was restarted"
        else:
            continue
        return StopEpoch(f"epoch {mine.number} lost {view.name(node_id)} (rank {rank}): {how}", lost=node_id)
    return None


def _unwanted(view: ClusterView, mine: RunningEpoch) -> str:
    if mine.serves(view.desired):
        return ""
    return f"{view.desired.model} is wanted now" if view.desired.model else f"{mine.model} was unloaded"


def _follow(view: ClusterView) -> Action:
    mine = view.running
    if mine is None or mine.owner != view.self_id:
        return NoAction()
    for other in _elsewhere(view):
        if other.ready and other.owner == view.claim.node_id and not better(mine.key, other.key):
            reason = f"{view.name(other.owner)} coordinates and serves the model"
            return _when_idle(view, [mine], StopEpoch(reason))
    return NoAction()


def _improve(view: ClusterView, mine: RunningEpoch) -> Action:
    """Keep the coordinator's own epoch, unless something clearly better waits, or a rank's node stops."""
    if drained_by(view) and view.plan is not None:
        who = ", ".join(map(view.name, drained_by(view)))
        return StopEpoch(f"{who} is about to stop, and another group goes on")
    if not mine.ready:
        return NoAction()
    best = _best(other for other in _elsewhere(view) if other.ready)
    if best is not None and better(best.key, mine.key):
        return _unrest(view) or _when_idle(
            view, [mine], StopEpoch(f"{view.name(best.owner)} has a better group")
        )
    plan = view.plan
    if plan is None or plan.ranks[0] != view.self_id or not better(plan.key, mine.key):
        return NoAction()  # this node cannot try a group whose rank 0 is elsewhere
    return _replace(view, mine, plan)


def _replace(view: ClusterView, mine: RunningEpoch, plan: GroupPlan) -> Action:
    """Replace the running group by a better plan, once that is known to form."""
    if set(plan.ranks) == set(mine.ranks) and plan.backend == mine.backend:
        return NoAction()
    newcomers = [node_id for node_id in plan.ranks if node_id not in mine.ranks]
    relied_on = max((view.flapping.get(node_id, 0.0) for node_id in newcomers), default=0.0)
    if view.now < relied_on:
        return Wait("a member that was lost recently has yet to show that it stays", relied_on)
    if not plan.proven:
        return _unrest(view) or TryGroup(view.epoch + 1, plan)
    fewer = "fewer Macs" if len(plan.ranks) < len(mine.ranks) else plan.backend
    who = ", ".join(map(view.name, newcomers)) or fewer
    return _unrest(view) or _when_idle(view, [mine], StopEpoch(f"a better group is there with {who}"))


def _form(view: ClusterView) -> Action:
    """Form an epoch: the coordinator has none of its own."""
    if not view.desired.model:
        return NoAction()
    if waiting := _unrest(view):
        return waiting
    best, plan = _best(_elsewhere(view)), view.plan
    if best is not None and (plan is None or not better(plan.key, best.key)):
        return HandOver(best.owner)
    if plan is None:
        return Wait(view.refusal)
    return _form_plan(view, plan)


def _form_plan(view: ClusterView, plan: GroupPlan) -> Action:
    if plan.ranks[0] != view.self_id:
        return HandOver(plan.ranks[0])
    silent = [node_id for node_id in plan.ranks if view.statuses[node_id].state is not MemberState.ALIVE]
    if silent:
        return Wait(f"{view.name(silent[0])} is silent")
    if view.now < view.hold_until:
        return Wait(view.hold, view.hold_until)
    if not plan.proven and (view.running is not None or _elsewhere(view)):
        return TryGroup(view.epoch + 1, plan)
    action: Action = FormEpoch(view.epoch + 1, plan, tuple(map(view.boot_id, plan.ranks)))
    if view.running is not None:
        action = StopEpoch(f"a better group is there than that of epoch {view.running.number}")
    return _when_idle(view, _elsewhere(view), action)


def _elsewhere(view: ClusterView) -> list[RunningEpoch]:
    """Return the epochs of others that serve the desired state, and whose owners are present and stay."""
    return [
        other
        for other in view.others
        if other.serves(view.desired)
        and view.present(other.owner)
        and not other.draining
        and other.owner not in view.draining
    ]


def _best(epochs: Iterable[RunningEpoch]) -> RunningEpoch | None:
    best: RunningEpoch | None = None
    for other in sorted(epochs, key=lambda running: running.owner):
        if best is None or better(other.key, best.key):
            best = other
    return best


def _unrest(view: ClusterView) -> Wait | None:
    if view.unsynced:
        return Wait(f"{view.name(view.unsynced[0])} has not yet reported its state")
    if view.now < view.settled_at:
        return Wait("members come and go", view.settled_at)
    return None


def _when_idle(view: ClusterView, epochs: Iterable[RunningEpoch], action: Action) -> Action:
    """Wait for open requests, for a limited time: requests that never end must not hold up the cluster."""
    requests = sum(epoch.open_requests for epoch in epochs)
    since = view.now if view.waiting_since is None else view.waiting_since
    if not requests or view.now >= since + view.patience_s:
        return action
    return Wait(f"open requests: {requests}", since + view.patience_s, for_requests=True)
