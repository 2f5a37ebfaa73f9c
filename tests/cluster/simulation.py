"""Many nodes in one process, on a network that can be cut.

The clock is a number, and what happens is an event in one queue: two runs of one story are alike to the last
beat. Links behave as TCP does. What is sent over one arrives in order; a cut network holds it back until it
heals; a process that is killed closes its links, one whose machine lost its power does not.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mlxtp.cluster.cluster_state import ClusterState, Roster
from mlxtp.cluster.membership import MemberState
from mlxtp.cluster.state_file import SavedState, from_text, to_text

from ..placement.made_up_macs import unsealed
from .simulated_node import Fin, Goodbye, Journal, Node
from .simulated_rules import OneGroup, Rule


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


class World:
    """Everything. `names` are node ids; all of them are members from the beginning, and none is started."""

    def __init__(
        self,
        names: Iterable[str],
        seed: int = 0,
        delay_s: tuple[float, float] = (0.001, 0.02),
        rule: Rule | None = None,
    ) -> None:
        self.now = 0.0
        self.names = list(names)
        self.nodes: dict[str, Node] = {}
        """Those that run."""
        self.rule: Rule = rule or OneGroup()
        self.numbers = itertools.count(1)
        self.journals: dict[str, Journal] = {}
        self.ready_at: dict[tuple[str, int], float] = {}
        """When each epoch became ready, by its owner and number."""
        self._boots = itertools.count(1)
        self._delays = delay_s
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cuts: set[frozenset[str]] = set()
        self._wires: list[Wire] = []
        roster = Roster()
        for name in self.names:
            roster = roster.admitting(name, f"mac-{name}", f"key of {name}", unsealed)
        self.disks: dict[str, str] = {
            name: to_text(SavedState(ClusterState(roster=roster))) for name in self.names
        }

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), act))

    def run(self, seconds: float) -> None:
        ends = self.now + seconds
        while self._queue and self._queue[0][0] <= ends:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = ends

    def run_until(self, quiet: Callable[[], str], within_s: float, stays_s: float = 3.0) -> None:
        """Until `quiet` finds nothing to complain of, and still does not a while later.

        It may find nothing for a moment before that, such as when a member has just returned.
        """
        ends = self.now + within_s
        while self.now < ends:
            if complaint := quiet():
                self.run(1.0)
                continue
            self.run(stays_s)
            if not (complaint := quiet()):
                return
        raise AssertionError(f"after {within_s:g} s: {complaint}")

    def delay_s(self) -> float:
        return self._random.uniform(*self._delays)

    def start(self, *names: str) -> None:
        """Those that do not run; one that knows it was removed does not start."""
        for name in names:
            kept = from_text(self.disks[name]).beliefs
            if name not in self.nodes and name in kept.roster.members():
                self._forget_wires_of(name)
                self.nodes[name] = node = Node(self, name, f"{name}-{next(self._boots)}", kept)
                self.at(self.now + self._random.uniform(0, 0.05), node.tick)

    def kill(self, name: str, *, power: bool = False) -> None:
        """The process ends between two instructions; with `power`, its machine does."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        node.running_process = False
        for part in node.parts.values():
            if part.running is not None:
                node.log("leave: killed", part.running)
        self.disks[name] = to_text(SavedState(node.leadership.persistent_state()))
        if not power:
            self._forget_wires_of(name)

    def leave(self, name: str) -> None:
        """The agent is stopped in order."""
        if node := self.nodes.get(name):
            for part in node.parts.values():
                node.leave(part, "stopped")
            node.broadcast(Goodbye())
            self.kill(name)

    def drain(self, name: str) -> None:
        """The agent is told to stop: it leaves once the others can do without it."""
        node = self.nodes[name]
        node.leadership.drain()
        node.broadcast(node.report())
        node.step()

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
        """Return whether they run, take each other for members, and nothing stands between them."""
        if not {one, other} <= self.nodes.keys() or self.is_cut(one, other):
            return False
        return all(b in self.nodes[a].replica.roster.members() for a, b in ((one, other), (other, one)))

    def complaint(self) -> str:
        """Return what is wrong once everything has calmed down; empty when all is well."""
        if paused := [name for name, node in self.nodes.items() if node.paused_until > self.now]:
            return f"{paused} stand still"
        for component in self.components():
            nodes = [self.nodes[name] for name in sorted(component)]
            if complaint := _beliefs_of(nodes) or _standings_of(self, nodes):
                return complaint
            clique = not any(self.is_cut(*pair) for pair in itertools.combinations(component, 2))
            leader = next(node for node in nodes if node.leadership.leading)
            if clique and (complaint := self.rule.complaint(nodes, leader)):
                return complaint
        return ""


def _beliefs_of(nodes: Sequence[Node]) -> str:
    leaders = [node.id for node in nodes if node.leadership.leading]
    if len(leaders) != 1:
        return f"{leaders} coordinate {[node.id for node in nodes]}"
    if len({node.leadership.claim for node in nodes}) != 1:
        return f"claim: { {node.id: node.leadership.claim for node in nodes} }"
    for what in ("deployments", "roster", "epoch"):
        held = {node.id: getattr(node.leadership.persistent_state(), what) for node in nodes}
        if len(set(map(repr, held.values()))) != 1:
            return f"{what}: {held}"
    return ""


def _standings_of(world: World, nodes: Sequence[Node]) -> str:
    for node in nodes:
        for peer, standing in node.membership.statuses().items():
            if not world.reach(node.id, peer):
                if standing.state in (MemberState.ALIVE, MemberState.SUSPECT):
                    return f"{node.id} sees a ghost of {peer}"
            elif (standing.state, standing.boot_id) != (MemberState.ALIVE, world.nodes[peer].boot_id):
                return f"{node.id} does not see {world.nodes[peer].boot_id}: {standing}"
    return ""
