"""Decisions of a group's owner on its next action, and of other nodes on its orders; no I/O or clock.

`decide` maps a `GroupView` to an action; equal views give equal actions. The coordinator assigns ranks to a
group (`place.py`). The owner is rank 0, and forms the group's epochs. If the coordinator is lost, the owner
keeps its assignment, and no epoch ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .membership import MemberState, MemberStatus


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Model of an epoch, and its ranks, as in `GroupAssignment`."""

    model: str
    ranks: tuple[str, ...]
    kind: str = ""
    split: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NoAction:
    """No action: all is well, or another node decides."""


@dataclass(frozen=True, slots=True)
class FormEpoch:
    """Formation of epoch `number`. `boots` are the boot ids of its nodes, in rank order."""

    number: int
    form: GroupForm
    boots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopEpoch:
    """End of this node's epoch. `lost`: a needed node that is gone."""

    reason: str
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `until`, or a change; `for_requests`: for open requests; `lacks`: for a node."""

    reason: str
    until: float = math.inf
    for_requests: bool = False
    lacks: str = ""


Action = NoAction | FormEpoch | StopEpoch | Wait


@dataclass(frozen=True, slots=True)
class Situation:
    """Inputs of a decision from groups and requests."""

    assignee: str = ""  #: owner of the group by the coordinator's assignment
    model: str = ""  #: of its deployment; empty once that ended
    form: GroupForm | None = None  #: form to run in, if this node owns the group
    refusal: str = ""  #: why there is no `form`
    running: FormEpoch | None = None  #: this node's epoch, as formed
    ready: bool = False  #: this epoch serves
    open_requests: int = 0  #: of this epoch
    others: Mapping[str, int] = field(default_factory=dict)  #: the same of ready epochs elsewhere, by owner
    waiting_since: float | None = None  #: when a decision began to wait for open requests


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView(Situation):
    """All inputs of a decision about one group. Times are of the caller's clock, in seconds."""

    now: float
    self_id: str
    statuses: Mapping[str, MemberStatus]
    epoch: int = 0  #: the highest number so far
    unrest: Wait | None = None  #: form no group while members come and go, or have yet to report
    patience_s: float = 10.0  #: for open requests
    names: Mapping[str, str] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()  #: nodes about to stop, perhaps this node

    @property
    def assigned(self) -> bool:
        return self.assignee == self.self_id

    def name(self, node_id: str) -> str:
        return self.names.get(node_id) or node_id[:8]

    def boot_id(self, node_id: str) -> str:
        status = self.statuses.get(node_id)
        return status.boot_id if status else ""

    def present(self, node_id: str) -> bool:
        status = self.statuses.get(node_id)
        return status is not None and status.present


def decide(view: GroupView) -> Action:
    mine = view.running
    if mine is None:
        return _form(view) if view.assigned and view.model else NoAction()
    if stop := _lost(view, mine) or _left(view, mine):
        return stop
    return _renew(view, mine) if view.assigned else _give_up(view)


def drained_by(view: GroupView) -> tuple[str, ...]:
    """Return the nodes of this node's epoch that are about to stop: it then takes no new requests."""
    mine = view.running
    return tuple(node_id for node_id in mine.form.ranks if node_id in view.draining) if mine else ()


def refusal(sender: str, number: int, assignee: str, joined: int) -> str | None:
    """Return why to take no part in epoch `number`, ordered by `sender`; None to take part. `assignee` owns
    its group, "" if unknown. `joined` is the sender's last epoch here.
    """
    if assignee and sender != assignee:
        return f"epoch {number} comes from {sender[:8]}, but {assignee[:8]} owns its group"
    if number <= joined:
        return f"epoch {number} is not newer than epoch {joined}, the last one of this node"
    return None


def _lost(view: GroupView, mine: FormEpoch) -> StopEpoch | None:
    for rank, (node_id, boot_id) in enumerate(zip(mine.form.ranks, mine.boots, strict=True)):
        if (how := lost(view.statuses.get(node_id), boot_id)) is not None:
            reason = f"epoch {mine.number} lost {view.name(node_id)} (rank {rank}): {how}"
            return StopEpoch(reason, lost=node_id)
    return None


def _left(view: GroupView, mine: FormEpoch) -> StopEpoch | None:
    """Return the end of an epoch if its model was unloaded, or it has a place without a Mac about to stop."""
    if not view.model:
        return StopEpoch(f"{mine.form.model} was unloaded")
    leaving = drained_by(view)
    elsewhere = not view.assigned or (view.form is not None and not {*leaving} & {*view.form.ranks})
    if leaving and elsewhere:
        who = ", ".join(map(view.name, leaving))
        return StopEpoch(f"{who} is about to stop, and another group goes on")
    return None


def lost(status: MemberStatus | None, boot_id: str) -> str | None:
    """Return how the agent with this boot id was lost; None while it is present."""
    if status is None or not status.present:
        state = status.state if status is not None else MemberState.AWAY
        return "its link broke" if state is MemberState.SUSPECT else f"it is {state}"
    return "its agent was restarted" if status.boot_id != boot_id else None


def _give_up(view: GroupView) -> Action:
    """End the epoch of a group that this node no longer owns, once the new owner serves it. The wait is
    limited: this epoch may hold memory that the new one needs.
    """
    where = f"{view.name(view.assignee)} has the group now" if view.assignee else view.refusal
    since = view.now if view.waiting_since is None else view.waiting_since
    waits = view.ready and view.present(view.assignee) and view.assignee not in view.others
    if waits and view.now < since + view.patience_s:
        reason = f"{view.name(view.assignee)} has yet to serve the group"
        return Wait(reason, since + view.patience_s, for_requests=True)
    return _when_idle(view, view.open_requests, StopEpoch(where or "the group is wanted no longer"))


def _renew(view: GroupView, mine: FormEpoch) -> Action:
    """Keep the epoch, unless its model or form has changed."""
    form = view.form
    if form is None or form == mine.form:
        return NoAction()
    if waiting := view.unrest or _not_yet(view, form):
        return waiting
    where = " + ".join(map(view.name, form.ranks))
    reason = f"it forms again on {where}" if form.model == mine.form.model else f"{form.model} is wanted now"
    return _when_idle(view, view.open_requests, StopEpoch(reason))


def _form(view: GroupView) -> Action:
    form = view.form
    if view.unrest:
        return view.unrest
    if form is None:
        return Wait(view.refusal)
    if waiting := _not_yet(view, form):
        return waiting
    requests = sum(count for owner, count in view.others.items() if view.present(owner))
    return _when_idle(view, requests, FormEpoch(view.epoch + 1, form, tuple(map(view.boot_id, form.ranks))))


def _not_yet(view: GroupView, form: GroupForm) -> Wait | None:
    for node_id in form.ranks:
        if not view.present(node_id):
            return Wait(f"{view.name(node_id)} is not here", lacks=node_id)
        if view.statuses[node_id].state is not MemberState.ALIVE:
            return Wait(f"{view.name(node_id)} is silent")
    return None


def _when_idle(view: GroupView, requests: int, action: Action) -> Action:
    """Wait for open requests, for a limited time: endless requests must not block the cluster."""
    since = view.now if view.waiting_since is None else view.waiting_since
    if not requests or view.now >= since + view.patience_s:
        return action
    return Wait(f"open requests: {requests}", since + view.patience_s, for_requests=True)
