"""The agreement of 64 members, and its cost for each: the pure modules, without a network."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

from mlxtp.cluster.cluster_state import NO_DEPLOYMENTS, ClusterState, Replica, Roster
from mlxtp.cluster.leadership import Leadership
from mlxtp.cluster.membership import Membership, Timeouts
from mlxtp.cluster.reconcile import GroupForm, Situation, decide
from mlxtp.placement.machines_file import read_machines
from mlxtp.placement.planner import PlacementOptions, plan
from mlxtp.wire.cluster_messages import MAX_MEMBERS, Beat, Deployment

from .errors import Unmeasured
from .measures import Row, absolute
from .published_models import published
from .stage import Stage

_TICK_S = Timeouts().beat_s
_LINKING_TICKS = 4  #: Ticks within which each pair of members has found each other.
_STEADY_TICKS = 20
_MOST_TICKS = 60
_CABLED = """
links = ["thunderbolt5 ring", "ethernet 10g"]
node = [{ chip = "Apple M3 Ultra", memory = "512GB", count = 8 }]
"""
_OTHERS = """
links = ["ethernet 10g"]
node = [
  { chip = "Apple M4 Max", memory = "128GB", count = 28 },
  { chip = "Apple M4 Pro", memory = "64GB", count = 28 },
]
"""


async def measure(stage: Stage) -> list[Row]:
    """Ticks until all follow one coordinator, at the start and after its death, and the time of a tick."""
    began: list[float] = []
    followed: list[float] = []
    costs_us: list[float] = []
    for round_number in stage.rounds("64 members", full=5, quick=2):
        crowd = Crowd(MAX_MEMBERS, seed=round_number)
        began_ticks, cost_us = crowd.ticks_until_agreed(), crowd.tick_us()
        crowd.kill(crowd.coordinator)
        followed_ticks = crowd.ticks_until_agreed()
        if round_number:
            began.append(began_ticks)
            followed.append(followed_ticks)
            costs_us.append(cost_us)
    figures = {
        "64 members, from their start to one coordinator": began,
        "64 members, from the coordinator's death to the next": followed,
        "64 members, one tick of one of them": costs_us,
        "64 members, one plan": [plan_ms() for _ in range(stage.pick(full=5, quick=3))],
    }
    return [absolute(name, values) for name, values in figures.items()]


def plan_ms() -> float:
    """Return the milliseconds to place a model on as many Macs as a cluster may have."""
    cabled = read_machines(_CABLED, "cabled")
    others = [replace(member, node_id=f"o-{member.node_id}") for member in read_machines(_OTHERS, "others")]
    shape = published("llama-3.3-70b-4bit")
    began = time.perf_counter()
    made = plan([*cabled, *others], shape, cabled[0].node_id, PlacementOptions(nodes="all"))
    took_ms = (time.perf_counter() - began) * 1e3
    if made.chosen is None:
        raise Unmeasured(made.reason)
    return took_ms


class Crowd:
    """Members that tick together; a beat of one reaches the others in the same tick."""

    def __init__(self, size: int, seed: int) -> None:
        self.now = 0.0
        names = [f"{number:032x}" for number in range(size)]
        roster = Roster()
        for name in names:
            roster = roster.admitting(
                name, f"mac-{int(name, 16)}", f"{int(name, 16):064x}", lambda entry: entry
            )
        self._memberships = {name: Membership(name, f"{name}-1", names, self.now) for name in names}
        replicas = {name: Replica(name, ClusterState(roster=roster)) for name in names}
        for name, replica in replicas.items():
            replica.deployments = NO_DEPLOYMENTS.setting(Deployment("m", "a model"), name)
        self._coordinations = {name: Leadership(replica, 0, self.now) for name, replica in replicas.items()}
        pairs = list(itertools.combinations(names, 2))
        chance = random.Random(seed)
        self._comes_up = [(chance.randrange(_LINKING_TICKS), link, *pair) for link, pair in enumerate(pairs)]
        self._links: dict[str, dict[str, int]] = {name: {} for name in names}

    @property
    def coordinator(self) -> str:
        """Coordinator that the first member follows."""
        return next(iter(self._coordinations.values())).claim.node_id

    def ticks_until_agreed(self) -> int:
        """Return the number of ticks until all have claimed or followed the same living member."""
        for ticks in range(1, _MOST_TICKS):
            self.tick()
            claims = {coordination.claim for coordination in self._coordinations.values()}
            leading = [name for name, coordination in self._coordinations.items() if coordination.leading]
            if len(claims) == len(leading) == 1 and not self._comes_up:
                return ticks
        raise Unmeasured(f"{len(self._links)} members did not agree within {_MOST_TICKS} ticks")

    def tick_us(self) -> float:
        """Return the mean microseconds of a member's tick: judge, decide, take in the others' beats."""
        began = time.perf_counter()
        for _ in range(_STEADY_TICKS):
            self.tick()
        return (time.perf_counter() - began) / _STEADY_TICKS / len(self._links) * 1e6

    def kill(self, name: str) -> None:
        """Its links break."""
        for other, link in self._links.pop(name).items():
            self._memberships[other].link_down(link, self.now)
            del self._links[other][name]
        del self._memberships[name], self._coordinations[name]

    def tick(self) -> None:
        """Links that are due come up; then all judge, decide and beat, and take in each other's beats."""
        self.now += _TICK_S
        self._link()
        beats: dict[str, Beat] = {}
        for name, membership in self._memberships.items():
            coordination = self._coordinations[name]
            coordination.tick(membership, membership.tick(self.now), self.now)
            mine = Situation(assignee=name, model="a model", form=GroupForm("a model", (name,)))
            decide(coordination.view(membership, mine, self.now))
            beats[name] = coordination.beat(healthy=membership.health.healthy)
        for name, links in self._links.items():
            membership, coordination = self._memberships[name], self._coordinations[name]
            for other, link in links.items():
                membership.beat(link, self.now)
                coordination.received_beat(other, f"{other}-1", beats[other], self.now)

    def _link(self) -> None:
        due = round(self.now / _TICK_S) - 1
        for _, link, one, other in [entry for entry in self._comes_up if entry[0] <= due]:
            for name, peer in ((one, other), (other, one)):
                if not self._memberships[name].link_up(link, peer, f"{peer}-1", "", self.now):
                    raise Unmeasured("a member was refused")
                self._links[name][peer] = link
        self._comes_up = [entry for entry in self._comes_up if entry[0] > due]
