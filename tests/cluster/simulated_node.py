"""One agent as far as membership and coordination go: what `simulation.py` has many of.

Its epochs are only names: an agent asks the others to take part, and one is ready when all agreed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlxtp.cluster.cluster_state import ClusterState, Replica
from mlxtp.cluster.deployments import received
from mlxtp.cluster.leadership import Leadership
from mlxtp.cluster.membership import Change, Duplicate, Membership, MemberState
from mlxtp.cluster.reconcile import (
    Action,
    FormEpoch,
    GroupPlan,
    HandOver,
    RunningEpoch,
    Situation,
    StopEpoch,
    may_leave,
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
class Report:
    """With a beat: the epoch that its sender owns."""

    beat: Beat
    owns: RunningEpoch | None


@dataclass(frozen=True)
class Offer:
    running: RunningEpoch


@dataclass(frozen=True)
class Answer:
    number: int
    problem: str | None


@dataclass(frozen=True)
class Ready:
    number: int


@dataclass(frozen=True)
class Over:
    """From the owner: it ended. From a participant: it left."""

    number: int


class Goodbye:
    pass


class Fin:
    """The other end closed the link, or is gone."""


@dataclass
class Journal:
    """Events that one agent saw, over all its starts."""

    changes: list[tuple[float, Change]] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    actions: list[tuple[float, Action]] = field(default_factory=list)
    epochs: list[tuple[float, str, int, str]] = field(default_factory=list)


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
        self.reports: dict[str, RunningEpoch | None] = {}
        self.running: RunningEpoch | None = None
        self.joined = kept.epoch
        self.awaited: set[str] = set()
        self.open_requests = 0
        self.hold_until = 0.0
        self.dialled: dict[str, float] = {}
        self.running_process = True
        self.paused_until = 0.0

    # --- links

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
            wire, end, _, _ = self.links.pop(number)
            wire.close(end)
            self.membership.link_down(number, self.world.now)

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

    # --- messages

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
            case _:
                self.receive_of_epoch(sender, payload)

    def receive_of_epoch(self, sender: str, payload: object) -> None:
        mine = self.running
        match payload:
            case Offer(running):
                problem = refusal(sender, running.number, self.leadership.claim, self.joined)
                if self.id in self.leadership.draining:
                    problem = "it is about to stop"
                if problem is None:
                    self.leave("for a newer one")
                    self.join(running)
                self.tell(sender, Answer(running.number, problem))
            case Answer(number, problem) if mine and mine.number == number and mine.owner == self.id:
                if problem is not None:
                    self.stop(f"{sender}: {problem}")
                    return
                self.awaited.discard(sender)
                if not self.awaited:
                    self.world.at(self.world.now + LOAD_S, lambda: self.be_ready(number))
            case Ready(number) if mine and (mine.number, mine.owner) == (number, sender):
                self.running = replace(mine, ready=True)
            case Over(number) if mine and mine.number == number:
                if mine.owner == self.id:
                    self.stop(f"{sender} left")
                elif mine.owner == sender:
                    self.leave("its owner ended it")

    # --- epochs

    def join(self, running: RunningEpoch) -> None:
        assert self.running is None, f"{self.id} takes part in two epochs"
        assert running.number > self.joined, f"{self.id} joins epoch {running.number} after {self.joined}"
        self.joined, self.running = running.number, running
        self.replica.saw_epoch(running.number)
        self.log("join", running)

    def leave(self, why: str) -> None:
        if self.running is not None:
            running, self.running = self.running, None
            self.log(f"leave: {why}", running)
            self.awaited.clear()
            others = running.ranks[1:] if running.owner == self.id else running.ranks[:1]
            for node_id in others:
                self.tell(node_id, Over(running.number))

    def stop(self, why: str) -> None:
        self.leave(why)
        self.hold_until = self.world.now + RETRY_S

    def form(self, action: FormEpoch) -> None:
        assert self.leadership.leading, f"{self.id} forms an epoch and does not coordinate"
        desired, plan = self.replica.desired, action.plan
        running = RunningEpoch(
            action.number, plan.ranks, action.boots, plan.key, desired.model, desired.version, ready=False
        )
        self.join(running)
        self.awaited = set(plan.ranks[1:])
        for node_id in self.awaited:
            self.tell(node_id, Offer(running))
        if not self.awaited:
            self.world.at(self.world.now + LOAD_S, lambda: self.be_ready(running.number))

    def be_ready(self, number: int) -> None:
        mine = self.running
        if self.running_process and mine and mine.number == number and mine.owner == self.id:
            self.running = replace(mine, ready=True)
            for node_id in mine.ranks[1:]:
                self.tell(node_id, Ready(number))

    def plan(self) -> GroupPlan | None:
        """The strongest one, two or four of those who are here, this node among them if it can be."""
        wanted = self.replica.desired.nodes
        standings = self.membership.statuses()
        here = sorted(
            (
                node_id
                for node_id, standing in standings.items()
                if standing.present and node_id not in self.leadership.draining
            ),
            key=lambda node_id: (-self.world.strength.get(node_id, 1), node_id != self.id, node_id),
        )
        sizes = [int(wanted)] if wanted.isdecimal() else [4, 2, 1]
        size = next((size for size in sizes if size <= len(here)), 0)
        chosen = sorted(here[:size], key=lambda node_id: (node_id != self.id, node_id))
        key = (float(sum(self.world.strength.get(node_id, 1) for node_id in chosen)),)
        return GroupPlan(tuple(chosen), key) if chosen else None

    # --- what an agent's loop does

    def own(self) -> RunningEpoch | None:
        mine = self.running
        if mine is None or mine.owner != self.id:
            return mine
        leaving = not self.leadership.draining.isdisjoint(mine.ranks)
        return replace(
            mine, open_requests=self.open_requests, draining=leaving, ready=mine.ready and not leaving
        )

    def report(self) -> Report:
        mine = self.own()
        owns = mine if mine and mine.owner == self.id else None
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
        for _ in range(4):
            others = [
                running for node_id, running in self.reports.items()
                if running is not None and self.membership.status_of(node_id).present
            ]  # fmt: skip
            situation = Situation(
                self.own(), others, self.plan(), "too few Macs", self.hold_until, "the last one failed"
            )
            view = self.leadership.view(self.membership, situation, now)
            action = self.leadership.decide(self.membership, situation, now)
            if not self.act(action):
                break
        else:
            raise AssertionError(f"{self.id} never comes to rest: {action}")
        if self.id in self.leadership.draining and may_leave(view) and not self.open_requests:
            self.world.leave(self.id)

    def act(self, action: Action) -> bool:
        if not self.journal.actions or self.journal.actions[-1][1] != action:
            self.journal.actions.append((self.world.now, action))
        match action:
            case FormEpoch():
                self.form(action)
            case StopEpoch(reason):
                self.leave(reason)
            case HandOver(node_id):
                self.leadership.hand_over(node_id, self.world.now)
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
