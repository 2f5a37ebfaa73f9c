"""Plan of several models at once: their groups, and the memory of each Mac. Nothing is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..cluster.assign import AssignView, WantedDeployment, assign, without_rdma
from ..placement.cost_model import LONG_PROMPT, usable_bytes
from ..placement.model_shape import ModelShape
from ..placement.planner import Placement, PlacementOptions, plan
from ..placement.topology import MemberMachine
from ..wire.cluster_messages import Deployment
from . import planning
from .printing import table_of

GB = planning.GB


@dataclass(frozen=True, slots=True)
class Packed:
    """One model in a packing. `why`: the reason for no group, empty where `plan` has one."""

    shape: ModelShape
    plan: Placement | None
    why: str = ""

    @property
    def ranks(self) -> tuple[str, ...]:
        """Node ids in rank order; () for no group."""
        return self.plan.ranks if self.plan else ()


@dataclass(frozen=True, slots=True)
class MacMemory:
    """Memory of a Mac in bytes: what ranks may have, and their weights, KV caches and headroom."""

    node_id: str
    name: str
    available: int
    weights: int
    kv: int
    headroom: int

    @property
    def free(self) -> int:
        return self.available - self.weights - self.kv - self.headroom


def pack(
    members: Sequence[MemberMachine], wanted: Sequence[tuple[ModelShape, PlacementOptions]]
) -> tuple[Packed, ...]:
    """Return a group for each model, as a cluster without any group would assign them, in order."""
    # A model's place in the command is the name of its deployment.
    rows = [WantedDeployment(Deployment(str(i)), options, shape) for i, (shape, options) in enumerate(wanted)]
    taken = {member.node_id: 0 for member in members}
    busy: set[str] = set()  # with a rank of a group over several Macs
    packed = []
    for given in assign(AssignView(members, rows)).assignments:
        shape, options = wanted[int(given.deployment)]
        if not given.owner:
            packed.append(Packed(shape, None, given.why))
            continue
        there = [
            replace(
                without_rdma(member) if member.node_id in busy else member,
                taken_bytes=taken[member.node_id],
            )
            for member in members
            if member.node_id in given.nodes
        ]
        made = plan(there, shape, given.owner, options)
        for rank in made.chosen.memory if made.chosen else ():
            taken[rank.node_id] += rank.needed
        busy.update(made.ranks if len(made.ranks) > 1 else ())
        packed.append(Packed(shape, made, "" if made.chosen else made.reason))
    return tuple(packed)


def memory_of(members: Sequence[MemberMachine], packed: Sequence[Packed]) -> tuple[MacMemory, ...]:
    """Return the memory of each Mac with all groups of a packing."""
    ranks = [rank for one in packed if one.plan and one.plan.chosen for rank in one.plan.chosen.memory]

    def of(member: MemberMachine) -> MacMemory:
        here = [rank for rank in ranks if rank.node_id == member.node_id]
        sums = (sum(getattr(rank, part) for rank in here) for part in ("weights", "kv", "headroom"))
        return MacMemory(member.node_id, member.name, usable_bytes(member), *sums)

    return tuple(map(of, members))


def run(
    models: Sequence[str | Path],
    members: Sequence[MemberMachine],
    *,
    options: PlacementOptions,
    as_json: bool = False,
    console: Console | None = None,
) -> tuple[Packed, ...]:
    """Plan `models`, the first of which counts most, and print it: tables, or one JSON object on one line.

    `models` are as for `planning.read_shape`. Raises ModelError and ConfigError for the user.
    """
    wanted = [(planning.read_shape(model), planning.as_served(str(model), options)) for model in models]
    packed = pack(members, wanted)
    console = console or planning.a_console()
    if as_json:
        answer = {
            "workload": asdict(options.workload),
            "models": [_to_json(one) for one in packed],
            "macs": [{**asdict(mac), "free": mac.free} for mac in memory_of(members, packed)],
        }
        console.print(json.dumps(answer, ensure_ascii=False), soft_wrap=True, markup=False)
    else:
        _show(packed, memory_of(members, packed), options, console)
    return packed


def _to_json(one: Packed) -> dict[str, Any]:
    found = {"name": one.shape.name, "reason": one.why}
    return {**found, "plan": planning.to_json(one.plan, one.shape) if one.plan else None}


def _show(
    packed: Sequence[Packed], macs: Sequence[MacMemory], options: PlacementOptions, console: Console
) -> None:
    """Print which model runs on which Macs, the memory of each Mac, and reasons below."""
    numbers = ("request", "first token", "tokens/s")
    table = table_of("model", "Macs", *numbers, right=numbers, wrapped=("model", "Macs"))
    for one in packed:
        chosen = one.plan.chosen if one.plan else None
        names = ", ".join(chosen.names) if chosen else "none"
        times = planning.times(chosen, options.workload) if chosen else ("", "", "")
        table.add_row(escape(one.shape.name), escape(names), *times)
    console.print(table)
    console.print(
        f"request: {options.workload.name}, {options.workload}; first token: after {LONG_PROMPT:,} in\n",
        style="dim",
    )
    parts = ("GB for ranks", "weights", "KV caches", "headroom", "free")
    table = table_of("Mac", *parts, right=parts, wrapped=("Mac",))
    for mac in macs:
        sizes = (mac.available, mac.weights, mac.kv, mac.headroom, mac.free)
        table.add_row(escape(mac.name), *(f"{size / GB:.1f}" for size in sizes))
    console.print(table)
    for one in packed:
        if one.why:
            console.print(escape(f"- {one.shape.name}: {one.why}"), style="bold red")
        elif one.plan:
            for line in (one.plan.reason, *one.plan.notes):
                console.print(escape(f"- {one.shape.name}: {line}"))
