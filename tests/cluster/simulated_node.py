"""One agent as far as membership, coordination and groups go: what `simulation.py` has many of.

Its epochs are only names: an owner asks the others to take part, and one is ready when all agreed. The node
that coordinates assigns groups to owners, by the rule of its world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlxtp.cluster.cluster_state import NO_CLAIM, ClusterState, LeaderClaim, Replica, received
from mlxtp.cluster.leadership import Leadership
from mlxtp.cluster.membership import Change, Duplicate, Membership, MemberState
from mlxtp.cluster.reconcile import (
    Action,
    FormEpoch,
    GroupForm,
    Situation,
    StopEpoch,
    Wait,
    decide,
    lost,
    refusal,
)
from mlxtp.wire.cluster_messages import Beat, Deployments, Members

if TYPE_CHECKING:
    from .simulation import Wire, World

TICK_S = 0.5
REDIAL_S = 0.5
LOAD_S = 0.4
"""From the agreement of all to an epoch that is ready."""
RETRY_S = 0.5


@dataclass(frozen=True)
class RunningEpoch(FormEpoch):
    """As its owner reports it. `draining`: it takes no new requests, and ends with its last one."""

    ready: bool = False
    open_requests: int = 0
    draining: bool = False

    @property
    def ranks(self) -> tuple[str, ...]:
        return self.form.ranks

    @property
    def owner(self) -> str:
        return self.ranks[0]


@dataclass(frozen=True)
class Report:
    """With a beat: the epochs that its sender owns, by group."""

    beat: Beat
    owns: Mapping[str, RunningEpoch]


@dataclass(frozen=True)
class Assigned:
    """From the coordinator: the ranks of a group, its owner first."""

    group: str
    ranks: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    claim: LeaderClaim = NO_CLAIM
    number: int = 0

    @property
    def owner(self) -> str:
        return self.ranks[0] if self.ranks else ""


@dataclass(frozen=True)
class Offer:
    group: str
    running: RunningEpoch


@dataclass(frozen=True)
class Answer:
    group: str
    number: int
    problem: str | None


@dataclass(frozen=True)
class Ready:
    group: str
    number: int


@dataclass(frozen=True)
class Over:
    """From the owner: it ended. From a participant: it left."""

    group: str
    number: int


class Goodbye:
    pass


class Retracted:
    """From a node that has met another: its assignments do not count until it has decided again."""


class Fin:
    """The other end closed the link, or is gone."""


@dataclass
class Journal:
    """Events that one agent saw, over all its starts."""

    changes: list[tuple[float, Change]] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    epochs: list[tuple[float, str, int, str]] = field(default_factory=list)
    """When, what, number, owner; of all groups."""


@dataclass
class Part:
    """One node's part in one group: the epoch that it owns or takes part in, and what it waits for."""

    group: str
    assigned: Assigned
    running: RunningEpoch | None = None
    awaited: set[str] = field(default_factory=set)
    rests_until: float = 0.0  #: An epoch of its own has failed.
    waiting_since: float | None = None


class Node:
    """One start of one agent."""

    def __init__(self, world: World, node_id: str, boot_id: str, kept: ClusterState) -> None:
        self.world, self.id, self.boot_id = world, node_id, boot_id
        self.journal = world.journals.setdefault(node_id, Journal())
        self.replica = Replica(node_id, kept)
        self.leadership = Leadership(self.replica, kept.claim.term, world.now)
        others = [other for other in self.replica.roster.members() if other != node_id]
        self.membership = Membership(node_id, boot_id, others, world.now)
        self.links: dict[int, tuple[Wire, int, str, str]] = {}
        """Link number → wire, our end of it, node id and boot id of the other end."""
        self.ending: set[int] = set()
        """Links that nothing is sent over any more; what is still on its way there counts."""
        self.reports: dict[str, Mapping[str, RunningEpoch]] = {}
        self.told: dict[str, dict[str, Assigned]] = {}  #: rows of each other node, by group
        self.parts: dict[str, Part] = {}
        self.joined: dict[str, int] = {}
        """The last epoch of each owner that it took part in."""
        self.assignments = 0
        self.met = False
        """True from a new link until the next assignments."""
        self.open_requests = 0
        self.dialled: dict[str, float] = {}
        self.running_process = True
        self.paused_until = 0.0

    def connected(self, wire: Wire, end: int, peer: Node) -> None:
        number = wire.numbers[end]
        address = f"10.0.0.{ord(peer.id[-1])}:{number}"
        if not self.membership.link_up(number, peer.id, peer.boot_id, address, self.world.now):
            if self.membership.status_of(peer.id).state is MemberState.REMOVED:
                for message in self.replica.roster.messages():
                    wire.send(end, message)
            wire.close(end)
            self.step()
            return
        self.links[number] = (wire, end, peer.id, peer.boot_id)
        self.send(number, self.report())
        self.send_table(number)
        for message in self.replica.roster.messages():
            self.send(number, message)
        self.met = True
        if self.leadership.leading:
            self.broadcast(Retracted())
        self.close_second_links(peer)
        self.step()

    def close_second_links(self, peer: Node) -> None:
        """Of two links with the same start of a peer, the one dialled by the smaller node id stays."""
        same = [n for n, (_, _, node, boot) in self.links.items() if (node, boot) == (peer.id, peer.boot_id)]
        smaller = [n for n in same if self.links[n][0].nodes[0].id == min(self.id, peer.id)]
        for number in set(same) - {(smaller or same)[0]} - self.ending:
            self.send(number, Fin())
            self.ending.add(number)

    def close(self, number: int) -> None:
        if number in self.links:
            self.ending.discard(number)
            wire, end, peer, _ = self.links.pop(number)
            wire.close(end)
            self.membership.link_down(number, self.world.now)
            if any(node == peer for _, _, node, _ in self.links.values()):
                self.met = True  # it may have lost something
            else:
                self.told.pop(peer, None)

    def send(self, number: int, payload: object) -> None:
        wire, end, _, _ = self.links[number]
        wire.send(end, payload)

    def send_table(self, number: int) -> None:
        [message] = self.replica.deployments.messages()
        self.send(number, message)

    def tell(self, node_id: str, payload: object) -> None:
        numbers = [number for number, (_, _, node, _) in self.links.items() if node == node_id]
        for number in [number for number in numbers if number not in self.ending][-1:]:
            self.send(number, payload)

    def broadcast(self, *payloads: object) -> None:
        for number in [number for number in self.links if number not in self.ending]:
            for payload in payloads:
                self.send(number, payload)

    def dial(self) -> None:
        linked = {node for _, _, node, _ in self.links.values()}
        for node_id in self.replica.roster.members():
            due = self.dialled.get(node_id, -1.0) + REDIAL_S <= self.world.now
            if node_id != self.id and node_id not in linked and due:
                self.dialled[node_id] = self.world.now
                self.world.dial(self, node_id)

    def receive(self, wire: Wire, end: int, payload: object) -> None:
        number = wire.numbers[end]
        if number not in self.links:
            return
        _, _, sender, boot_id = self.links[number]
        now = self.world.now
        match payload:
            case Fin():
                self.close(number)
                self.step()
            case Goodbye():
                self.membership.goodbye(number, now)
                self.step()
            case Report(beat, owns):
                self.membership.beat(number, now)
                if not self.membership.counts(number):
                    return
                self.reports[sender] = owns
                if self.leadership.received_beat(sender, boot_id, beat, now):
                    self.step()
                    self.broadcast(self.report())
                lacks_desired, lacks_roster = self.replica.lacks(beat)
                if lacks_desired:
                    self.send_table(number)
                if lacks_roster:
                    for message in self.replica.roster.messages():
                        self.send(number, message)
            case Deployments(rows, floor):
                if self.replica.desires(received(rows, floor)):
                    self.broadcast(*self.replica.deployments.messages())
                    self.step()
            case Members(entries):
                if self.replica.enrols(entries):
                    self.broadcast(*self.replica.roster.messages())
                    self.follow_roster()
            case Assigned():
                self.told.setdefault(sender, {})[payload.group] = payload
                self.step()
            case Retracted():
                self.told.pop(sender, None)
            case Offer() | Answer() | Ready() | Over():
                self.receive_of_epoch(sender, self.part(payload.group), payload)

    def follow(self) -> None:
        """Only the present coordinator assigns. What another one assigned before counts no longer."""
        claim = self.leadership.claim
        for told in self.told.get(claim.node_id, {}).values():
            before = self.part(told.group).assigned
            if told.claim == claim and (before.claim != claim or before.number < told.number):
                self.part(told.group).assigned = told

    def receive_of_epoch(self, sender: str, part: Part, payload: object) -> None:
        mine = part.running
        match payload:
            case Offer(_, running):
                problem = refusal(sender, running.number, part.assigned.owner, self.joined.get(sender, 0))
                if self.id in self.leadership.draining:
                    problem = "it is about to stop"
                if problem is None and mine and mine.owner == self.id:
                    problem = "it still ends an epoch of its own"
                    self.leave(part, "for another owner")
                if problem is None:
                    self.leave(part, "for a newer one")
                    self.join(part, running)
                self.tell(sender, Answer(part.group, running.number, problem))
            case Answer(_, number, problem) if mine and (mine.number, mine.owner) == (number, self.id):
                if problem is not None:
                    self.stop(part, f"{sender}: {problem}")
                    return
                part.awaited.discard(sender)
                if not part.awaited:
                    self.world.at(self.world.now + LOAD_S, lambda: self.be_ready(part, number))
            case Ready(_, number) if mine and (mine.number, mine.owner) == (number, sender):
                part.running = replace(mine, ready=True)
            case Over(_, number) if mine and mine.number == number:
                if mine.owner == self.id and sender in mine.ranks:
                    self.stop(part, f"{sender} left")
                elif mine.owner == sender:
                    self.leave(part, "its owner ended it")

    def part(self, group: str) -> Part:
        return self.parts.setdefault(group, Part(group, Assigned(group)))

    @property
    def running(self) -> RunningEpoch | None:
        """The epoch that it takes part in. There must be at most one group."""
        epochs = [part.running for part in self.parts.values() if part.running is not None]
        assert len(epochs) <= 1
        return epochs[0] if epochs else None

    def join(self, part: Part, running: RunningEpoch) -> None:
        owner, joined = running.owner, self.joined.get(running.owner, 0)
        assert part.running is None, f"{self.id} takes part in two epochs"
        assert running.number > joined, f"{self.id} joins {owner}'s epoch {running.number} after {joined}"
        self.joined[owner], part.running = running.number, running
        self.replica.saw_epoch(running.number)
        self.log("join", running)

    def leave(self, part: Part, why: str) -> None:
        if part.running is not None:
            running, part.running = part.running, None
            self.log(f"leave: {why}", running)
            part.awaited.clear()
            others = running.ranks[1:] if running.owner == self.id else running.ranks[:1]
            for node_id in others:
                self.tell(node_id, Over(part.group, running.number))

    def stop(self, part: Part, why: str) -> None:
        self.leave(part, why)
        part.rests_until = self.world.now + RETRY_S

    def form(self, part: Part, action: FormEpoch) -> None:
        form = action.form
        assert part.assigned.owner == self.id, f"{self.id} forms an epoch of {part.assigned}"
        assert form.ranks == part.assigned.ranks, f"{form} is not {part.assigned}"
        running = RunningEpoch(action.number, form, action.boots)
        self.leave(part, "for one of its own")
        self.join(part, running)
        part.awaited = set(form.ranks[1:])
        for node_id in part.awaited:
            self.tell(node_id, Offer(part.group, running))
        if not part.awaited:
            self.world.at(self.world.now + LOAD_S, lambda: self.be_ready(part, running.number))

    def be_ready(self, part: Part, number: int) -> None:
        mine = part.running
        if self.running_process and mine and (mine.number, mine.owner) == (number, self.id):
            part.running = replace(mine, ready=True)
            self.world.ready_at[self.id, number] = self.world.now
            for node_id in mine.ranks[1:]:
                self.tell(node_id, Ready(part.group, number))

    def own(self, part: Part) -> RunningEpoch | None:
        """Return the epoch of a group that it owns, as it reports it."""
        mine = part.running
        if mine is None or mine.owner != self.id:
            return None
        leaving = not self.leadership.draining.isdisjoint(mine.ranks)
        return replace(
            mine, open_requests=self.open_requests, draining=leaving, ready=mine.ready and not leaving
        )

    def epochs(self, group: str) -> list[RunningEpoch]:
        """Return the epochs of a group as their owners report them: its own, and those of who is here."""
        here = self.membership.status_of
        found = [owns.get(group) for node_id, owns in self.reports.items() if here(node_id).present]
        return [each for each in (self.own(self.part(group)), *found) if each is not None]

    def assign(self) -> None:
        leadership = self.leadership
        if not leadership.leading or leadership.unrest(self.membership.statuses(), self.world.now):
            return
        leaving = tuple(sorted(leadership.draining))
        for group, ranks in self.world.rule.assign(self):
            part = self.part(group)
            before = part.assigned
            after = Assigned(group, ranks, leaving, leadership.claim, before.number)
            if after != before:
                self.assignments += 1
                part.assigned = replace(after, number=self.assignments)
            if after != before or self.met:
                self.broadcast(part.assigned)
        self.met = False

    @property
    def may_leave(self) -> bool:
        """Return whether the others can do without this node, which is about to stop."""
        for part in self.parts.values():
            mine, assigned = part.running, part.assigned
            if mine is None:
                continue
            if mine.owner == self.id:
                if assigned.owner != self.id or self.id not in assigned.leaving:
                    return False
                continue
            told = self.reports.get(mine.owner, {}).get(part.group)
            if told is None or not told.draining or told.open_requests:
                return False
        return not self.open_requests

    def report(self) -> Report:
        owns = {group: mine for group, part in self.parts.items() if (mine := self.own(part)) is not None}
        return Report(self.leadership.beat(healthy=self.membership.health.healthy), owns)

    def tick(self) -> None:
        if not self.running_process:
            return
        self.world.at(max(self.world.now + TICK_S, self.paused_until), self.tick)
        if self.paused_until > self.world.now:
            return
        self.step()
        self.broadcast(self.report())
        self.dial()

    def step(self) -> None:
        """Judge, and act until nothing is left to do."""
        now = self.world.now
        changes = self.membership.tick(now)
        for change in changes:
            if isinstance(change, Duplicate):
                self.journal.duplicates.append(change)
            else:
                self.journal.changes.append((now, change))
        if self.leadership.tick(self.membership, changes, now):
            self.broadcast(self.report())
        for number in [number for number in self.links if not self.membership.counts(number)]:
            self.close(number)
        self.follow()
        self.assign()
        for part in list(self.parts.values()):
            self.decide(part)
        if self.id in self.leadership.draining and self.may_leave:
            self.world.leave(self.id)

    def decide(self, part: Part) -> None:
        """Act for one group until nothing is left to do."""
        now, mine = self.world.now, part.running
        if mine and mine.owner != self.id:
            how = lost(self.membership.statuses().get(mine.owner), mine.boots[0])
            if how is not None:
                self.leave(part, how)
        for _ in range(4):
            model, assigned = self.world.rule.model(self, part.group), part.assigned
            form = GroupForm(model, assigned.ranks) if model and assigned.owner == self.id else None
            own, told = self.own(part), self.epochs(part.group)
            situation = Situation(
                assignee=assigned.owner,
                model=model,
                form=form,
                refusal="too few Macs",
                running=own,
                ready=own is not None and own.ready,
                open_requests=own.open_requests if own is not None else 0,
                others={
                    each.owner: each.open_requests for each in told if each.owner != self.id and each.ready
                },
                waiting_since=part.waiting_since,
            )
            action = decide(self.leadership.view(self.membership, situation, now))
            if not (isinstance(action, Wait) and action.for_requests):
                part.waiting_since = None
            elif part.waiting_since is None:
                part.waiting_since = now
            if not self.act(part, action):
                return
        raise AssertionError(f"{self.id} never comes to rest: {action}")

    def act(self, part: Part, action: Action) -> bool:
        match action:
            case FormEpoch() if self.world.now >= part.rests_until:
                self.form(part, action)
            case StopEpoch(reason):
                self.leave(part, reason)
            case _:
                return False
        self.broadcast(self.report())
        return True

    def follow_roster(self) -> None:
        members = self.replica.roster.members()
        if self.id not in members:
            self.world.kill(self.id)
            return
        for node_id, standing in self.membership.statuses().items():
            if node_id not in members and standing.state is not MemberState.REMOVED:
                self.membership.removed(node_id)
        for node_id in members:
            self.membership.admitted(node_id)
        self.step()

    def log(self, what: str, running: RunningEpoch) -> None:
        self.journal.epochs.append((self.world.now, what, running.number, running.owner))
