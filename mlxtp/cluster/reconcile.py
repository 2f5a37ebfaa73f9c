"""Decision of a group's owner on its next action, and on the orders that other nodes may refuse. Pure.

`decide` maps one `GroupView` to one action; the same view always gives the same action. The coordinator
assigns a group to an owner and to the Macs that it may use (`assign.py`). The owner forms the epochs of the
group and is rank 0 of each. Losing the coordinator ends no epoch: the owner keeps the assignment that it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .membership import MemberState, MemberStatus

MUCH = 1.05  #: Factor by which a plan must be better to count as better: measurements waver by a few percent.


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Node ids in rank order, and the key for comparing plans: the first number that differs much decides.

    `backend` is "none", "ring" or "jaccl". `proven`: this group has formed and proved itself before.
    `scarce`: it may take the last formation of an RDMA device until a Mac restarts.
    """

    ranks: tuple[str, ...]
    key: tuple[float, ...]
    backend: str = ""
    proven: bool = True
    scarce: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Model of a deployment, over how many Macs, and how these share it: what a group is formed for."""

    model: str
    nodes: str = "auto"
    parallel: str = ""
    split: str = "auto"


@dataclass(frozen=True, slots=True)
class RunningEpoch:
    """Existing epoch of one group. `boots` are the boot ids its participants had, in rank order.

    It was formed for `wanted`. `boots` and the `nodes` of that are empty for an epoch that another node owns.
    `draining`: it takes no new requests, and ends with its last one. `backend` as in `GroupPlan`.
    """

    number: int
    ranks: tuple[str, ...]
    boots: tuple[str, ...]
    key: tuple[float, ...]
    wanted: Wanted
    ready: bool
    open_requests: int = 0
    draining: bool = False
    backend: str = ""

    @property
    def owner(self) -> str:
        """Node id of rank 0."""
        return self.ranks[0]

    def serves(self, wanted: Wanted) -> bool:
        """Return True when this epoch serves what is wanted."""
        return self.wanted == wanted if self.wanted.nodes else self.wanted.model == wanted.model


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
    """End the epoch that this node owns. `lost`: the node that it needs and that is gone."""

    reason: str
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait: decide again at `until`, or when something changes. `for_requests`: some are still open."""

    reason: str
    until: float = math.inf
    for_requests: bool = False


Action = NoAction | FormEpoch | TryGroup | StopEpoch | Wait


@dataclass(frozen=True, slots=True)
class Situation:
    """Inputs of a decision that groups and requests have.

    assignee       the node that owns the group, as the coordinator assigned it; empty for none
    nodes          the Macs that the group may use
    wanted         what the group is to serve; None once its deployment has no place for it
    running        the epoch of the group that this node owns
    others         the epochs of the group that other nodes own, as their owners report them
    plan           the best one within the assigned Macs that are present and stay; None for the reason in
                   `refusal`
    hold_until     when an epoch may be formed again after some that failed, and `hold` why
    waiting_since  since when a decision has waited for open requests to end
    """

    assignee: str = ""
    nodes: Collection[str] = ()
    wanted: Wanted | None = None
    running: RunningEpoch | None = None
    others: Sequence[RunningEpoch] = ()
    plan: GroupPlan | None = None
    refusal: str = ""
    hold_until: float = 0.0
    hold: str = ""
    waiting_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView(Situation):
    """All inputs of a decision about one group. Times are of the caller's clock, in seconds.

    epoch          the highest number of an epoch so far
    unsynced       members that are present and have not yet reported their state
    settled_at     from when on the membership counts as calm
    flapping       when each member that was lost a while ago may be relied on again
    patience_s     how long a decision may wait for open requests
    draining       the nodes that are about to stop, this node perhaps among them
    """

    now: float
    self_id: str
    statuses: Mapping[str, MemberStatus]
    epoch: int = 0
    unsynced: Sequence[str] = ()
    settled_at: float = 0.0
    flapping: Mapping[str, float] = field(default_factory=dict)
    patience_s: float = 10.0
    names: Mapping[str, str] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()

    @property
    def assigned(self) -> bool:
        """True while this node owns the group."""
        return self.assignee == self.self_id

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
    """Return True when the first of two keys is clearly better. Their numbers are not negative."""
    for mine, theirs in zip(one, other, strict=True):
        if mine > theirs * MUCH:
            return True
        if theirs > mine * MUCH:
            return False
    return False


def decide(view: GroupView) -> Action:
    """Return this node's next action for the group."""
    mine = view.running
    if mine is None:
        return _form(view) if view.assigned and view.wanted is not None else NoAction()
    if stop := _lost(view, mine) or _left(view, mine):
        return stop
    if not view.assigned or view.wanted is None:
        return _give_up(view, mine)
    if not mine.serves(view.wanted):
        return _renew(view, mine, view.wanted)
    return _improve(view, mine)


def drained_by(view: GroupView) -> tuple[str, ...]:
    """Return the nodes about to stop in this node's own epoch, which then takes no new requests."""
    mine = view.running
    return tuple(node_id for node_id in mine.ranks if node_id in view.draining) if mine is not None else ()


def refusal(sender: str, number: int, assignee: str, joined: int) -> str | None:
    """Return the reason for not taking part in epoch `number`, ordered by `sender`; None to take part.

    `assignee` owns the group of that epoch, as far as this node knows; empty if it does not. This node took
    part in epoch `joined` of the sender, its last one.
    """
    if assignee and sender != assignee:
        return f"epoch {number} comes from {sender[:8]}, but {assignee[:8]} owns its group"
    if number <= joined:
        return f"epoch {number} is not newer than epoch {joined}, which this node was part of"
    return None


def _lost(view: GroupView, mine: RunningEpoch) -> StopEpoch | None:
    """Return the end of an epoch that a participant has left."""
    for rank, node_id in enumerate(mine.ranks):
        if (how := lost(view.statuses.get(node_id), mine.boots[rank])) is not None:
            reason = f"epoch {mine.number} lost {view.name(node_id)} (rank {rank}): {how}"
            return StopEpoch(reason, lost=node_id)
    return None


def _left(view: GroupView, mine: RunningEpoch) -> StopEpoch | None:
    """Return the end of an epoch that is unloaded, or whose group goes on without a Mac that stops."""
    if view.wanted is None:
        return StopEpoch(f"{mine.wanted.model} was unloaded")
    if (leaving := drained_by(view)) and (view.plan is not None or not view.assigned):
        who = ", ".join(map(view.name, leaving))
        return StopEpoch(f"{who} is about to stop, and another group goes on")
    return None


def lost(status: MemberStatus | None, boot_id: str) -> str | None:
    """Return how the agent that had this boot id was lost; None while it is there."""
    if status is None or not status.present:
        state = status.state if status is not None else MemberState.AWAY
        return "its link broke" if state is MemberState.SUSPECT else f"it is {state}"
    return "its agent was restarted" if status.boot_id != boot_id else None


def _give_up(view: GroupView, mine: RunningEpoch) -> Action:
    """End the epoch of a group that this node owns no longer, once the new owner serves it.

    It need not come to that, so the wait is limited: this epoch may hold what the other one needs.
    """
    where = f"{view.name(view.assignee)} has the group now" if view.assignee else view.refusal
    serves = any(each.ready for each in view.others if each.owner == view.assignee)
    since = view.now if view.waiting_since is None else view.waiting_since
    if view.present(view.assignee) and mine.ready and not serves and view.now < since + view.patience_s:
        reason = f"{view.name(view.assignee)} has yet to serve the group"
        return Wait(reason, since + view.patience_s, for_requests=True)
    return _when_idle(view, [mine], StopEpoch(where or "the group is wanted no longer"))


def _renew(view: GroupView, mine: RunningEpoch, wanted: Wanted) -> Action:
    """Replace an epoch that serves another model, or on more or fewer Macs, than is wanted now.

    The next group is ready before this one ends, if memory allows. Another model cannot go on with requests.
    """
    plan, stop = view.plan, StopEpoch(f"{wanted.model} is wanted now")
    if plan is None:
        return Wait(view.refusal)
    if not plan.proven and mine.ready:
        return _unrest(view) or TryGroup(view.epoch + 1, plan)
    return _when_idle(view, [mine], stop) if mine.wanted.model != wanted.model else stop


def _improve(view: GroupView, mine: RunningEpoch) -> Action:
    """Keep the epoch, unless it uses a Mac that is needed otherwise, or a better plan is possible."""
    plan = view.plan
    if taken := [node_id for node_id in mine.ranks if node_id not in view.nodes]:
        reason = f"{view.name(taken[0])} is needed for another group"
        return _when_idle(view, [mine], StopEpoch(reason)) if plan is not None else Wait(view.refusal)
    if not mine.ready or plan is None or plan.ranks[0] != view.self_id or not better(plan.key, mine.key):
        return NoAction()
    return _replace(view, mine, plan)


def _replace(view: GroupView, mine: RunningEpoch, plan: GroupPlan) -> Action:
    """Replace the running group by a better plan, once that is known to form."""
    if set(plan.ranks) == set(mine.ranks) and plan.backend == mine.backend:
        return NoAction()
    if plan.scarce and mine.backend == "jaccl":  # it works, and its place may be one that cannot form
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


def _form(view: GroupView) -> Action:
    """Form an epoch: the owner has none."""
    plan = view.plan
    if waiting := _unrest(view):
        return waiting
    if plan is None:
        return Wait(view.refusal)
    if waiting := _not_yet(view, plan):
        return waiting
    elsewhere = [other for other in view.others if other.ready and view.present(other.owner)]
    if not plan.proven and elsewhere:
        return TryGroup(view.epoch + 1, plan)
    form = FormEpoch(view.epoch + 1, plan, tuple(map(view.boot_id, plan.ranks)))
    return _when_idle(view, elsewhere, form)


def _not_yet(view: GroupView, plan: GroupPlan) -> Wait | None:
    """Return the reason why this plan cannot be formed now; None if it can."""
    if plan.ranks[0] != view.self_id:
        return Wait(f"{view.name(view.self_id)} can be in no group, {view.name(plan.ranks[0])} can")
    silent = [node_id for node_id in plan.ranks if view.statuses[node_id].state is not MemberState.ALIVE]
    if silent:
        return Wait(f"{view.name(silent[0])} is silent")
    return Wait(view.hold, view.hold_until) if view.now < view.hold_until else None


def _unrest(view: GroupView) -> Wait | None:
    if view.unsynced:
        return Wait(f"{view.name(view.unsynced[0])} has not yet reported its state")
    if view.now < view.settled_at:
        return Wait("members come and go", view.settled_at)
    return None


def _when_idle(view: GroupView, epochs: Iterable[RunningEpoch], action: Action) -> Action:
    """Wait for open requests, for a limited time: requests that never end must not hold up the cluster."""
    requests = sum(epoch.open_requests for epoch in epochs)
    since = view.now if view.waiting_since is None else view.waiting_since
    if not requests or view.now >= since + view.patience_s:
        return action
    return Wait(f"open requests: {requests}", since + view.patience_s, for_requests=True)
