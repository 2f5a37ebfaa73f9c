"""Many nodes in one process: agents as far as membership and coordination go, on a network that can be cut.

The clock is a number, and what happens is an event in one queue: two runs of one story are alike to
the last beat. Links behave as TCP does. What is sent over one arrives in order; a cut network holds it back
until it heals; a process that is killed closes its links, one whose machine lost its power does not.

A node's epochs are only names here: whoever forms one asks the others to take part, and it is ready when all
have agreed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from mlxtp.cluster.beliefs import Beliefs, Roster
from mlxtp.cluster.coordination import Coordination, Situation
from mlxtp.cluster.decisions import (
    Action,
    FormEpoch,
    HandOver,
    Plan,
    Running,
    StopEpoch,
    refusal,
)
from mlxtp.cluster.membership import Membership
from mlxtp.cluster.standing import Change, Duplicate, State
from mlxtp.node.state import Kept, from_text, to_text
from mlxtp.wire.control import Beat, DesiredState, Members

TICK_S = 0.5
REDIAL_S = 0.5
LOAD_S = 0.4
"""From everybody's agreement to an epoch that is ready."""
RETRY_S = 0.5


@dataclass(frozen=True)
class Report:
    """With a beat: the epoch that its sender owns."""

    beat: Beat
    owns: Running | None


@dataclass(frozen=True)
class Offer:
    running: Running


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


class Wire:
    """One connection. `ends[i]` is the process at end i, None once that end is closed."""

    def __init__(self, world: World, dialler: Node, answerer: Node) -> None:
        self.world = world
        self.nodes = (dialler, answerer)
        self.open = [True, True]
        self.numbers = (next(world.numbers), next(world.numbers))
        self.pipes: tuple[deque[object], deque[object]] = (deque(), deque())
        self.arrives = [0.0, 0.0]

    def send(self, end: int, payload: object) -> None:
        """From end `end` to the other."""
        if self.open[end]:
            self.put(1 - end, payload)

    def put(self, to: int, payload: object) -> None:
        self.pipes[to].append(payload)
        self.arrives[to] = max(self.arrives[to], self.world.now + self.world.delay_s())
        self.world.at(self.arrives[to], lambda: self.pump(to))

    def pump(self, to: int) -> None:
        sender, receiver = self.nodes[1 - to], self.nodes[to]
        if self.world.is_cut(sender.id, receiver.id) or not self.pipes[to]:
            return
        if receiver.paused_until > self.world.now:
            self.world.at(receiver.paused_until, lambda: self.pump(to))
            return
        payload = self.pipes[to].popleft()
        if self.open[to] and receiver.running_process:
            receiver.receive(self, to, payload)

    def resume(self) -> None:
        for to in (0, 1):
            for _ in self.pipes[to]:
                self.arrives[to] = max(self.arrives[to], self.world.now + self.world.delay_s())
                self.world.at(self.arrives[to], lambda to=to: self.pump(to))

    def close(self, end: int) -> None:
        if self.open[end]:
            self.open[end] = False
            self.put(1 - end, Fin())


@dataclass
class Journal:
    """What one node saw, over all its starts."""

    changes: list[tuple[float, Change]] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    actions: list[tuple[float, Action]] = field(default_factory=list)
    epochs: list[tuple[float, str, int, str]] = field(default_factory=list)


class Node:
    """One start of one agent."""

    def __init__(self, world: World, node_id: str, boot_id: str, kept: Beliefs) -> None:
        self.world, self.id, self.boot_id = world, node_id, boot_id
        self.journal = world.journals.setdefault(node_id, Journal())
        self.coordination = Coordination(node_id, kept, world.now)
        others = [other for other in self.coordination.roster.members() if other != node_id]
        self.membership = Membership(node_id, boot_id, others, world.now)
        self.links: dict[int, tuple[Wire, int, str, str]] = {}
        """Link number → wire, our end of it, node id and boot id of the other end."""
        self.ending: set[int] = set()
        """Links that nothing is sent over any more; what is still on its way there counts."""
        self.reports: dict[str, Running | None] = {}
        self.running: Running | None = None
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
            if self.membership.standing(peer.id).state is State.REMOVED:
                for message in self.coordination.roster.messages():
                    wire.send(end, message)
            wire.close(end)
            self.step()
            return
        self.links[number] = (wire, end, peer.id, peer.boot_id)
        self.send(number, self.report())
        self.send(number, self.coordination.desired)
        for message in self.coordination.roster.messages():
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

    def tell(self, node_id: str, payload: object) -> None:
        numbers = [number for number, (_, _, node, _) in self.links.items() if node == node_id]
        for number in [number for number in numbers if number not in self.ending][-1:]:
            self.send(number, payload)

    def tell_all(self, *payloads: object) -> None:
        for number in [number for number in self.links if number not in self.ending]:
            for payload in payloads:
                self.send(number, payload)

    def dial(self) -> None:
        linked = {node for _, _, node, _ in self.links.values()}
        for node_id in self.coordination.roster.members():
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
                if self.coordination.heard(sender, boot_id, beat, now):
                    self.step()
                    self.tell_all(self.report())
                lacks_desired, lacks_roster = self.coordination.lacks(beat)
                if lacks_desired:
                    self.send(number, self.coordination.desired)
                if lacks_roster:
                    for message in self.coordination.roster.messages():
                        self.send(number, message)
            case DesiredState():
                if self.coordination.desires(payload):
                    self.tell_all(payload)
                    self.step()
            case Members(entries):
                if self.coordination.enrols(entries):
                    self.tell_all(*self.coordination.roster.messages())
                    self.follow_roster()
            case _:
                self.receive_of_epoch(sender, payload)

    def receive_of_epoch(self, sender: str, payload: object) -> None:
        mine = self.running
        match payload:
            case Offer(running):
                problem = refusal(sender, running.number, self.coordination.claim, self.joined)
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

    def join(self, running: Running) -> None:
        assert self.running is None, f"{self.id} takes part in two epochs"
        assert running.number > self.joined, f"{self.id} joins epoch {running.number} after {self.joined}"
        self.joined, self.running = running.number, running
        self.coordination.saw_epoch(running.number)
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
        assert self.coordination.leading, f"{self.id} forms an epoch and does not coordinate"
        desired, plan = self.coordination.desired, action.plan
        running = Running(
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

    def plan(self) -> Plan | None:
        """The strongest one, two or four of those who are here, this node among them if it can be."""
        wanted = self.coordination.desired.nodes
        standings = self.membership.standings()
        here = sorted(
            (node_id for node_id, standing in standings.items() if standing.present),
            key=lambda node_id: (-self.world.strength.get(node_id, 1), node_id != self.id, node_id),
        )
        sizes = [int(wanted)] if wanted.isdecimal() else [4, 2, 1]
        size = next((size for size in sizes if size <= len(here)), 0)
        chosen = sorted(here[:size], key=lambda node_id: (node_id != self.id, node_id))
        key = (float(sum(self.world.strength.get(node_id, 1) for node_id in chosen)),)
        return Plan(tuple(chosen), key) if chosen else None

    # --- what an agent's loop does

    def own(self) -> Running | None:
        mine = self.running
        return replace(mine, open_requests=self.open_requests) if mine and mine.owner == self.id else mine

    def report(self) -> Report:
        mine = self.own()
        owns = mine if mine and mine.owner == self.id else None
        return Report(self.coordination.beat(healthy=self.membership.healthy), owns)

    def tick(self) -> None:
        if not self.running_process:
            return
        self.world.at(max(self.world.now + TICK_S, self.paused_until), self.tick)
        if self.paused_until > self.world.now:
            return
        self.step()
        self.tell_all(self.report())
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
        if self.coordination.tick(self.membership, changes, now):
            self.tell_all(self.report())
        for number in [number for number in self.links if not self.membership.counts(number)]:
            self.close(number)
        for _ in range(4):
            others = [
                running for node_id, running in self.reports.items()
                if running is not None and self.membership.standing(node_id).present
            ]  # fmt: skip
            situation = Situation(
                self.own(), others, self.plan(), "too few Macs", self.hold_until, "the last one failed"
            )
            action = self.coordination.decide(self.membership, situation, now)
            if not self.act(action):
                return
        raise AssertionError(f"{self.id} never comes to rest: {action}")

    def act(self, action: Action) -> bool:
        if not self.journal.actions or self.journal.actions[-1][1] != action:
            self.journal.actions.append((self.world.now, action))
        match action:
            case FormEpoch():
                self.form(action)
            case StopEpoch(reason):
                self.leave(reason)
            case HandOver(node_id):
                self.coordination.hand_over(node_id, self.world.now)
            case _:
                return False
        self.tell_all(self.report())
        return True

    def follow_roster(self) -> None:
        members = self.coordination.roster.members()
        if self.id not in members:
            self.world.kill(self.id)
            return
        for node_id, standing in self.membership.standings().items():
            if node_id not in members and standing.state is not State.REMOVED:
                self.membership.removed(node_id)
        for node_id in members:
            self.membership.admitted(node_id)
        self.step()

    def log(self, what: str, running: Running) -> None:
        self.journal.epochs.append((self.world.now, what, running.number, running.owner))


class World:
    """Everything. `names` are node ids; all of them are members from the beginning, and none is started."""

    def __init__(
        self, names: Iterable[str], seed: int = 0, delay_s: tuple[float, float] = (0.001, 0.02)
    ) -> None:
        self.now = 0.0
        self.names = list(names)
        self.nodes: dict[str, Node] = {}
        """Those that run."""
        self.strength: dict[str, int] = {}
        self.numbers = itertools.count(1)
        self.journals: dict[str, Journal] = {}
        self._boots = itertools.count(1)
        self._delays = delay_s
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cuts: set[frozenset[str]] = set()
        self._wires: list[Wire] = []
        roster = Roster()
        for name in self.names:
            roster = roster.admitting(name, f"mac-{name}", f"key of {name}")
        self.disks: dict[str, str] = {name: to_text(Kept(Beliefs(roster=roster))) for name in self.names}

    # --- time

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), act))

    def run(self, seconds: float) -> None:
        ends = self.now + seconds
        while self._queue and self._queue[0][0] <= ends:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = ends

    def run_until(self, quiet: Callable[[], str], within_s: float, stays_s: float = 3.0) -> None:
        """Until `quiet` finds nothing to complain of, and still does not a while later."""
        ends = self.now + within_s
        while (complaint := quiet()) and self.now < ends:
            self.run(1.0)
        assert not complaint, f"after {within_s:g} s: {complaint}"
        self.run(stays_s)
        assert not (complaint := quiet()), f"it was quiet, and then: {complaint}"

    def delay_s(self) -> float:
        return self._random.uniform(*self._delays)

    # --- nodes

    def start(self, *names: str) -> None:
        """Those that do not run; one that knows it was removed does not start."""
        for name in names:
            kept = from_text(self.disks[name]).beliefs
            if name not in self.nodes and name in kept.roster.members():
                self._forget_wires_of(name)
                node = Node(self, name, f"{name}-{next(self._boots)}", kept)
                self.nodes[name] = node
                self.at(self.now + self._random.uniform(0, 0.05), node.tick)

    def kill(self, name: str, *, power: bool = False) -> None:
        """The process ends between two instructions; with `power`, its machine does."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        node.running_process = False
        if node.running is not None:
            node.log("leave: killed", node.running)
        self.disks[name] = to_text(Kept(node.coordination.kept()))
        if not power:
            self._forget_wires_of(name)

    def leave(self, name: str) -> None:
        """The agent is stopped in order."""
        if node := self.nodes.get(name):
            node.leave("stopped")
            node.tell_all(Goodbye())
            self.kill(name)

    def _forget_wires_of(self, name: str) -> None:
        """The system closes what a process had open, or answers for it once its machine is back."""
        for wire in self._wires:
            for end in (0, 1):
                if wire.nodes[end].id == name and not wire.nodes[end].running_process:
                    wire.close(end)
        self._wires = [wire for wire in self._wires if any(wire.open)]

    def pause(self, name: str, seconds: float) -> None:
        """The process stands still; what arrives waits for it."""
        if node := self.nodes.get(name):
            node.paused_until = max(node.paused_until, self.now + seconds)

    # --- the network

    def cut(self, *pairs: Sequence[str]) -> None:
        self._cuts |= {frozenset(pair) for pair in pairs}

    def partition(self, *groups: Sequence[str]) -> None:
        """Only within each group does anything get through; who is named nowhere is alone."""
        self.heal()
        of = {name: number for number, group in enumerate(groups) for name in group}
        self.cut(*[p for p in itertools.combinations(self.names, 2) if of.get(p[0], -1) != of.get(p[1], -2)])

    def heal(self) -> None:
        self._cuts.clear()
        for wire in self._wires:
            wire.resume()

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cuts

    def dial(self, dialler: Node, name: str) -> None:
        """A connection comes up at both ends a moment later, if anybody is there."""

        def up() -> None:
            answerer = self.nodes.get(name)
            if answerer is None or not dialler.running_process or self.is_cut(dialler.id, name):
                return
            if max(dialler.paused_until, answerer.paused_until) > self.now:
                return
            wire = Wire(self, dialler, answerer)
            self._wires.append(wire)
            answerer.connected(wire, 1, dialler)
            if wire.open[0]:
                dialler.connected(wire, 0, answerer)

        self.at(self.now + 2 * self.delay_s(), up)

    # --- what must be true

    def components(self) -> list[set[str]]:
        """Members that run and can reach each other, if need be through others."""
        left, found = set(self.nodes), []
        while left:
            one, edge = set(), {min(left)}
            while edge:
                one |= edge
                edge = {other for other in left - one if any(self.reach(other, member) for member in one)}
            found.append(one)
            left -= one
        return found

    def reach(self, one: str, other: str) -> bool:
        """Whether they run, take each other for members, and nothing stands between them."""
        if not {one, other} <= self.nodes.keys() or self.is_cut(one, other):
            return False
        return all(b in self.nodes[a].coordination.roster.members() for a, b in ((one, other), (other, one)))

    def complaint(self) -> str:
        """What is not as it should be once everything has calmed down; empty when all is well."""
        if paused := [name for name, node in self.nodes.items() if node.paused_until > self.now]:
            return f"{paused} stand still"
        for component in self.components():
            nodes = [self.nodes[name] for name in sorted(component)]
            if complaint := _beliefs_of(nodes) or _standings_of(self, nodes):
                return complaint
            clique = not any(self.is_cut(*pair) for pair in itertools.combinations(component, 2))
            if clique and (complaint := _epochs_of(nodes)):
                return complaint
        return ""


def _beliefs_of(nodes: Sequence[Node]) -> str:
    leaders = [node.id for node in nodes if node.coordination.leading]
    if len(leaders) != 1:
        return f"{leaders} coordinate {[node.id for node in nodes]}"
    for what in ("claim", "desired", "roster", "epoch"):
        held = {node.id: getattr(node.coordination, what) for node in nodes}
        if len(set(map(repr, held.values()))) != 1:
            return f"{what}: {held}"
    return ""


def _standings_of(world: World, nodes: Sequence[Node]) -> str:
    for node in nodes:
        for peer, standing in node.membership.standings().items():
            if not world.reach(node.id, peer):
                if standing.state in (State.ALIVE, State.SUSPECT):
                    return f"{node.id} sees a ghost of {peer}"
            elif (standing.state, standing.boot_id) != (State.ALIVE, world.nodes[peer].boot_id):
                return f"{node.id} does not see {world.nodes[peer].boot_id}: {standing}"
    return ""


def _epochs_of(nodes: Sequence[Node]) -> str:
    leader = next(node for node in nodes if node.coordination.leading)
    plan = leader.plan() if leader.coordination.desired.model else None
    running = {node.id: node.running for node in nodes if node.running is not None}
    if plan is None:
        return f"nothing should run: {running}" if running else ""
    numbers = {one.number for one in running.values()}
    if len(numbers) != 1 or not all(one.ready for one in running.values()):
        return f"{plan} should run: {running}"
    epoch = next(iter(running.values()))
    if set(epoch.ranks) != set(running) or epoch.key != plan.key:
        return f"{plan} should run: {running}"
    return "" if epoch.owner == leader.id else f"{leader.id} coordinates, {epoch.owner} has rank 0"
